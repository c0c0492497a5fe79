"""What was seen of a trial, said in words, and in what one outcome is better than another."""

import dataclasses

import pytest

from everstep.experiments.core.tapes import Ending, Mark
from everstep.experiments.core.weaknesses import (
    NOT_RUN,
    TRIALS,
    Counted,
    End,
    Outcome,
    Trial,
    better,
    last_words,
    outcome,
    page,
    told,
)

TRIAL = Trial(id="W2", case="W2", does="rank 1 raises", ranks=2)
RECOVERED = Outcome(ranks=2, faults=1, over=1, seconds=0.05, kept=2, iterations=2, returned=2)


def marks(*lines):
    return [Mark(at, what, 10 + rank, gen, rank, 2, text) for at, what, gen, rank, text in lines]


def recovery(world=2, after=1.5):
    """Two ranks step; rank 1 is at fault at 1.0; so many step again."""
    before = [(0.1, "enter", 0, 0, ""), (0.1, "enter", 0, 1, ""), (0.2, "step", 0, 0, ""), (0.2, "step", 0, 1, "")]
    again = [(after - 0.1, "enter", 1, r, "") for r in range(world)] + [(after, "step", 1, r, "") for r in range(world)]
    made = marks(*before, (1.0, "fault", 0, 1, ""), *again, *((after + 1, "done", 1, r, "") for r in range(world)))
    return [dataclasses.replace(m, world=world) if m.generation == 1 else m for m in made]


def test_a_recovery_is_told_with_its_ranks_and_its_seconds():
    found = outcome(TRIAL, recovery(), Ending(3.0, (0, 0)), [], 0)
    assert (found.kept, found.end, found.returned, found.iterations) == (2, End.DONE, 2, 2)
    assert found.seconds == pytest.approx(0.5)
    assert told(TRIAL, found) == "**2 of 2** ranks trained on after **0.500 s**; done"


def test_a_rank_that_is_lost_and_had_done_nothing_is_told():
    lost = dataclasses.replace(RECOVERED, kept=1, bystanders_lost=1, seconds=90.0, left=2)
    assert told(TRIAL, lost) == (
        "**1 of 2** ranks trained on after **90.0 s**; 1 of those lost had done nothing; done; 2 processes left behind"
    )


def test_an_end_that_does_not_come_and_one_that_comes_early_are_told_with_the_last_words():
    made = [m for m in recovery() if m.generation == 0]
    endless = outcome(TRIAL, made, Ending(130.0, (None, None), 130.0), ["warming up\n"], 0)
    assert endless.end is End.ENDLESS
    assert told(TRIAL, endless) == "**without end** (no new step within 130 s of the fault), 1 iteration entered"
    busy = outcome(TRIAL, recovery(), Ending(TRIAL.most_s + 1, (None, None), TRIAL.most_s), [], 0)
    assert "**without end** (ended by us after 300 s, though its ranks came to something again" in told(TRIAL, busy)
    early = outcome(TRIAL, made, Ending(3.0, (1, 1)), ["a line\nValueError: of all ranks\n  more\n"], 0)
    assert early.end is End.EARLY
    assert told(TRIAL, early) == (
        "**ended early** (ended early, exit codes 1, 1), 1 iteration entered; last words: ValueError: of all ranks"
    )


@pytest.mark.parametrize(
    ("said", "outputs", "expected"),
    [
        ("TypeError: of the call", ["KeyError: printed\n"], "TypeError: of the call"),
        ("", ["Traceback …\n  File\nKeyError: printed\n", "warnings.warn('nothing')\n"], "KeyError: printed"),
        ("", ["everstep: rank 1 is lost\nbye\n"], "everstep: rank 1 is lost"),
        ("", ["warnings.warn('nothing')\n", ""], ""),
        ("x" * 200, [], "x" * 160 + " …"),
    ],
)
def test_last_words(said, outputs, expected):
    assert last_words(marks((1.0, "failed", 0, 0, said)) if said else [], outputs) == expected


@pytest.mark.parametrize(("how", "expected"), [("most", 4.0), ("sum", 6.0)])
def test_what_a_case_counts_becomes_one_number(how, expected):
    trial = dataclasses.replace(TRIAL, counted=Counted(words="apples", how=how))
    made = [*recovery(), *marks((2.0, "seen", -1, 0, "2"), (2.0, "seen", -1, 1, "4"))]
    found = outcome(trial, made, Ending(3.0, (0, 0)), [], 0)
    assert found.counted == expected
    assert f"**{expected:.3g}** apples" in told(trial, found)
    assert outcome(trial, recovery(), Ending(3.0, (0, 0)), [], 0).counted is None


def test_a_cause_that_is_told_anywhere_is_told():
    trial = dataclasses.replace(TRIAL, told="load_shard")
    assert outcome(trial, recovery(), Ending(3.0, (0, 0)), ["", "in load_shard\n"], 0).told is True
    silent = outcome(trial, recovery(), Ending(3.0, (0, 0)), ["nothing"], 0)
    assert "`load_shard` is **nowhere told**" in told(trial, silent)
    assert outcome(TRIAL, recovery(), Ending(3.0, (0, 0)), [""], 0).told is None


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"seconds": 0.1}, []),
        ({"seconds": 1.2}, ["24 times faster"]),
        ({"kept": 1, "seconds": 0.06}, ["2 of 2 ranks instead of 1"]),
        ({"bystanders_lost": 1}, ["no rank lost that had done nothing"]),
        (
            {"end": End.ENDLESS, "kept": None, "seconds": None, "over": 0},
            ["it goes on to its end", "2 of 2 ranks instead of none"],
        ),
        ({"left": 3}, ["nothing is left behind"]),
        ({"told": False}, ["the cause is told"]),
        ({"counted": 3.0}, ["1 apples instead of 3"]),
        ({"counted": 0.5}, []),
    ],
)
def test_in_what_ours_is_better(theirs, expected):
    trial = dataclasses.replace(TRIAL, counted=Counted(words="apples"))
    ours = dataclasses.replace(RECOVERED, told=True, counted=1.0)
    other = dataclasses.replace(RECOVERED, **{"told": True, "counted": 1.0, **theirs})
    assert better(trial, ours, other) == expected
    assert better(trial, ours, ours) == [], "nothing is better than itself"


def test_ours_is_not_called_better_where_it_is_worse():
    lost = dataclasses.replace(RECOVERED, over=0, kept=None, seconds=None, end=End.ENDLESS, told=False, left=1)
    assert better(TRIAL, lost, RECOVERED) == []


def test_an_end_with_words_is_better_than_none():
    early = dataclasses.replace(RECOVERED, end=End.EARLY)
    assert better(TRIAL, early, dataclasses.replace(RECOVERED, end=End.ENDLESS)) == ["it ends by itself"]


def test_every_weakness_of_the_section_is_tried_or_has_a_reason():
    assert {t.id for t in TRIALS} | set(NOT_RUN) == {f"W{n}" for n in range(1, 24)}
    assert not {t.id for t in TRIALS} & set(NOT_RUN)
    assert len({t.case for t in TRIALS}) == len(TRIALS)


def test_the_page_says_what_was_seen_when_and_with_what():
    row = {"id": "W2", "does": "rank 1 raises", "ranks": 2, "theirs_told": "a | b", "ours_told": "done", "better": []}
    text = page(
        {
            "command": "everstep bench weaknesses",
            "machine": {"when": "2026-11-30", "cores": 2, "load": 1.0, "load_at_end": 2.0},
            "versions": {"NVRx": {"torch": "2.13"}},
            "rows": [row],
            "not_run": {"W10": "HEAD alone"},
        }
    )
    assert "| W2 | rank 1 raises (2 ranks) | a \\| b | done | no difference was seen |" in text
    assert (
        "`everstep bench weaknesses`, 2026-11-30, 2 cores, load 1.0 before and 2.0 after; NVRx with torch 2.13." in text
    )
    assert "| W10 | HEAD alone |" in text
