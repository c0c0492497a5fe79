"""What is shown of workers' files, and what of it is gathered."""

import fcntl
import os
import threading

import pytest

from everstep.launcher.agent import tails
from everstep.launcher.agent.tails import Console, Gathered, Shown, Streams, Tail, prefix_of, tails_of


def test_lines_that_hold_a_word_are_gathered_from_all_ranks_with_their_prefix(tmp_path):
    gathered = tmp_path / "attempt_0" / "filtered_stdout.log"
    made = []
    for rank in "01":
        folder = tmp_path / "attempt_0" / rank
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"epoch {rank}\nloss {rank}\nlr\nthe last loss, no end")
        both = tails_of(f"[default{rank}]:", Streams((str(folder / "stdout.log"), ""), (("loss", "lr"), ("x",))))
        made += [tail for tail in both if tail.needles]
    assert len(made) == 2
    for tail in made:
        assert tail.finish()
    expected = [
        f"[default{rank}]:{line}\n" for rank in "01" for line in (f"loss {rank}", "lr", "the last loss, no end")
    ]
    assert gathered.read_text() == "".join(expected)


def test_nothing_is_followed_of_a_stream_that_is_not_shown():
    assert tails_of("x", Streams(("", ""), (("loss",), ("loss",)))) == []


def test_a_file_that_takes_nothing_loses_the_lines_and_no_more(tmp_path):
    (tmp_path / "stdout.log").write_text("loss\n")
    tail = Tail(str(tmp_path / "stdout.log"), "", Gathered(str(tmp_path / "no" / "folder")), (b"loss",))
    assert tail.finish()
    assert os.listdir(tmp_path) == ["stdout.log"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [(None, "[trainer3]:"), ("", "[trainer3]:"), ("[${rank}/${role_name} $local_rank ${x}]", "[7/trainer 3 ${x}]")],
)
def test_what_stands_before_a_line(template, expected):
    assert prefix_of(template, "trainer", 7, 3) == expected


LINES = b"".join(b"line %d\n" % number for number in range(2_000))


class Slow:
    """A console of one page, and two ranks that have written much more and ended."""

    def __init__(self, tmp_path) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 4096)
        console, self.shown, self.paths = Console(self.writer), Shown(), []
        for rank in "01":
            path = tmp_path / rank
            path.write_bytes(LINES + b"the last word")
            self.paths.append(str(path))
            self.shown.follow([Tail(str(path), f"{rank}:", console)])

    def read(self) -> bytes:
        return os.read(self.reader, 1 << 16)


@pytest.fixture
def slow(tmp_path):
    made = Slow(tmp_path)
    yield made
    os.close(made.reader)
    os.close(made.writer)


def all_of(rank: bytes) -> bytes:
    return b"".join(rank + b":" + line + b"\n" for line in (LINES + b"the last word").split(b"\n"))


def of(told: bytes, rank: bytes) -> bytes:
    return b"".join(line for line in told.splitlines(keepends=True) if line.startswith(rank))


def test_what_a_rank_wrote_last_is_shown_after_its_end_as_the_console_takes_it(slow):
    """W35: the last lines before a crash are the important ones."""
    slow.shown.ended(slow.paths[:1])
    told = b""
    for turn in range(10_000):
        if turn == 10:
            slow.shown.ended(slow.paths[1:])
        slow.shown.pump()
        if not slow.shown._ended and turn > 10:
            break
        told += slow.read()
    told += slow.read()
    assert of(told, b"0:") == all_of(b"0")
    assert of(told, b"1:") == all_of(b"1")
    assert slow.shown._ended == slow.shown._living == []


def test_at_the_job_s_end_the_rest_is_shown_to_who_reads(slow):
    told = bytearray()

    def reads() -> None:
        while not told.endswith(b"1:the last word\n"):
            told.extend(slow.read())

    reader = threading.Thread(target=reads)
    reader.start()
    slow.shown.settle(lambda: 0.0)
    reader.join(30)
    assert of(bytes(told), b"0:") == all_of(b"0")
    assert of(bytes(told), b"1:") == all_of(b"1")


def test_a_console_that_nobody_reads_is_not_waited_for(slow, monkeypatch):
    monkeypatch.setattr(tails, "QUIET_S", 0.01)
    slow.shown.settle(lambda: 0.0)
    assert len(slow.read()) <= 4096


def test_nor_one_that_is_read_for_ever(slow):
    times = iter([0.0, 5.0, tails.REST_S])
    slow.read_one = threading.Thread(target=slow.read)
    slow.read_one.start()
    slow.shown.settle(lambda: next(times, tails.REST_S))
    slow.read_one.join()


def test_of_ended_ranks_whose_lines_nobody_takes_so_many_files_stay_open(slow, tmp_path, monkeypatch):
    monkeypatch.setattr(tails, "MOST_ENDED", 1)
    slow.shown.ended(slow.paths)
    assert [tail.path for tail in slow.shown._ended] == slow.paths[1:]
