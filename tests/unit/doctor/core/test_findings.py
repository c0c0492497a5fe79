"""Findings as people and scripts read them."""

from everstep.doctor.core.findings import Level, count, lines, ok, problem, summary, warning

FOUND = [
    ok("kernel", "6.1"),
    warning("own name", "a is 127.0.0.1", "another address", "Mend /etc/hosts."),
    problem("torch", "2.1", "2.8 to 2.13", "Install a newer torch."),
]


def test_what_is_to_be_done_stands_below_what_was_seen():
    assert lines(FOUND) == [
        "ok       kernel    6.1",
        "warning  own name  a is 127.0.0.1",
        "                   expected: another address",
        "                   mend: Mend /etc/hosts.",
        "problem  torch     2.1",
        "                   expected: 2.8 to 2.13",
        "                   mend: Install a newer torch.",
    ]


def test_a_row_has_every_field_and_the_summary_counts():
    keys = ["level", "what", "seen", "expected", "mend"]
    assert [list(one.row()) for one in FOUND] == [keys] * 3
    assert [one.row()["level"] for one in FOUND] == ["ok", "warning", "problem"]
    assert count(FOUND, Level.PROBLEM) == 1
    assert summary(FOUND) == "1 problem, 1 warning in 3 findings"
