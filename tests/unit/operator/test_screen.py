"""Where commands print."""

from everstep.operator.screen import console, table


def test_a_row_is_one_line_for_who_is_no_terminal(capsys):
    console().print(table(["a", "b"], [["x" * 200, "y" * 200], ["[bold]1[/]", "2"]]))
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 3
    assert out[1].split() == ["x" * 200, "y" * 200]
    assert out[2].split() == ["[bold]1[/]", "2"], "what a job says is not markup"
