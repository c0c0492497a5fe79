"""What is shown of workers' files, and what of it is gathered."""

import os

import pytest

from everstep.launcher.agent.tails import Gathered, Streams, Tail, prefix_of, tails_of


def test_lines_that_hold_a_word_are_gathered_from_all_ranks_with_their_prefix(tmp_path):
    gathered = tmp_path / "attempt_0" / "filtered_stdout.log"
    tails = []
    for rank in "01":
        folder = tmp_path / "attempt_0" / rank
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"epoch {rank}\nloss {rank}\nlr\nthe last loss, no end")
        made = tails_of(f"[default{rank}]:", Streams((str(folder / "stdout.log"), ""), (("loss", "lr"), ("x",))))
        tails += [tail for tail in made if tail.needles]
    assert len(tails) == 2
    for tail in tails:
        tail.close()
    expected = [
        f"[default{rank}]:{line}\n" for rank in "01" for line in (f"loss {rank}", "lr", "the last loss, no end")
    ]
    assert gathered.read_text() == "".join(expected)


def test_nothing_is_followed_of_a_stream_that_is_not_shown():
    assert tails_of("x", Streams(("", ""), (("loss",), ("loss",)))) == []


def test_a_file_that_takes_nothing_loses_the_lines_and_no_more(tmp_path):
    (tmp_path / "stdout.log").write_text("loss\n")
    tail = Tail(str(tmp_path / "stdout.log"), "", Gathered(str(tmp_path / "no" / "folder")), (b"loss",))
    tail.close()
    assert os.listdir(tmp_path) == ["stdout.log"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [(None, "[trainer3]:"), ("", "[trainer3]:"), ("[${rank}/${role_name} $local_rank ${x}]", "[7/trainer 3 ${x}]")],
)
def test_what_stands_before_a_line(template, expected):
    assert prefix_of(template, "trainer", 7, 3) == expected
