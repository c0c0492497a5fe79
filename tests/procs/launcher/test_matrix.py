"""Faults at every moment, with real processes: phase by kind of fault by rank, each cell a second fault in a restart.

    EVERSTEP_MATRIX=DIR pytest tests/procs/launcher/test_matrix.py -m long     # every cell; keeps what it saw in DIR
    python tests/procs/launcher/test_matrix.py DIR                             # prints that as the page in docs/results

The job is `matrix_job.py`: three ranks, two spares, a step of 20 ms. A cell's time runs from the second fault to the
first new step on all ranks, the limits in `FLAGS` included where the fault is one of silence.
"""

import json
import os
import random
import sys
from itertools import cycle, product
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]

JOB = Path(__file__).with_name("matrix_job.py")
FLAGS = ("--nproc-per-node", "3", "--spares", "2")
LIMITS = ("--soft-timeout", "3", "--first-timeout", "6", "--hard-timeout", "8")
RESTART = ("abort", "unwind", "finalize", "health check", "roster", "assignment", "initialize", "first collective")
END = ("completion", "a peer completed", "shutdown")
KINDS = ("exception", "hang", "SIGKILL", "SIGSTOP", "GIL")
ASKING = ("SystemExit", "SIGINT")
RANKS = (0, 1, 2)
NAMES = ("rank 0", "middle", "last")
LAST_WORDS = {("completion", "hang"), *(("shutdown", kind) for kind in KINDS)}
"""Faults of a process whose work is done: the job ends with 1 and says so."""


def cell(phase, kind, rank, also=None):
    return {"phase": phase, "kind": kind, "rank": rank, "also": also}


def cells_of(phase, kinds=KINDS):
    return [[cell(phase, kind, rank)] for kind, rank in product(kinds, RANKS) if (phase, kind) not in LAST_WORDS]


def play(start, cells, name=None, flags=()):
    """Run one job through its cells; return how it ended, what it cost by strike is kept for the page."""
    job = start(JOB.read_text(), *FLAGS, *LIMITS, *flags, env={"CELLS": json.dumps(cells)})
    ended = job.ended(550)
    job.gone_within(1.0)
    if name and "EVERSTEP_MATRIX" in os.environ:
        (end,) = ended.events("RunEnded")
        times = [(seconds(ended, strike), end["mono_s"] - strike["at"]) for strike in ended.of("strike")]
        seen = [s | {"seconds": new, "ends": last} for s, (new, last) in zip(ended.of("strike"), times, strict=True)]
        Path(os.environ["EVERSTEP_MATRIX"], f"{name}.json").write_text(
            json.dumps({"code": ended.code, "strikes": seen})
        )
    return ended


def seconds(ended, strike):
    """From a strike to the end of the first step that all ranks do after it; None where the job ends instead."""
    steps = [n for n in ended.of("step") if n["generation"] > strike["generation"] and n["at"] > strike["at"]]
    after = [min((n["at"] for n in steps if n["rank"] == rank), default=None) for rank in RANKS]
    return None if None in after else max(after) - strike["at"]


def whole(ended, cells):
    """Every strike came, nothing is lost, and nobody computed another loss."""
    told = (ended.err[-6000:], [n["name"] for n in ended.of("strike")])
    assert ended.code == 0, told
    names = [f"{number}-{at}" for number, strikes in enumerate(cells) for at in range(len(strikes))]
    assert sorted(n["name"] for n in ended.of("strike")) == sorted(names), told
    losses = {}
    for n in ended.of("step"):
        losses.setdefault(n["step"], set()).add(n["loss"])
    assert sorted(losses) == list(range(1, max(losses) + 1)), told
    assert all(len(values) == 1 for values in losses.values()), losses
    assert sorted(n["rank"] for n in ended.of("returned")) == [0, 1, 2], told


def test_a_sample(start):
    """Two of every phase, fast kinds, drawn from a seed."""
    rng = random.Random(3)
    cells = [[cell(p, kind, rng.choice(RANKS))] for p in RESTART for kind in rng.sample(("exception", "SIGKILL"), 2)]
    cells += [[cell("completion", "SIGKILL", 1)], [cell("a peer completed", "exception", 0)]]
    whole(play(start, cells), cells)


@pytest.mark.long
@pytest.mark.parametrize("phase", [*RESTART, "completion", "a peer completed"])
def test_every_kind_on_every_rank(start, phase):
    cells = cells_of(phase)
    whole(play(start, cells, phase), cells)


@pytest.mark.parametrize(
    ("phase", "kind", "rank"),
    [
        pytest.param(phase, kind, rank, marks=pytest.mark.long)
        for (phase, kind), rank in product(sorted(LAST_WORDS), RANKS)
    ],
)
def test_a_fault_after_all_have_completed_is_told_and_nothing_is_repeated(start, phase, kind, rank):
    ended = play(start, [[cell(phase, kind, rank)]], f"{phase} {kind} {rank}")
    assert ended.code == 1, ended.err
    assert f"rank {rank} ended with status" in ended.err, ended.err
    assert len(ended.of("strike")) == 1
    assert sorted({n["generation"] for n in ended.of("step")}) == [0]
    assert len(ended.of("returned")) >= 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_third_fault_and_two_at_once(start, seed):
    """Ten restarts, each with a second fault that comes together with the end of another rank, and a third."""
    rng = random.Random(seed)
    cells = []
    for _ in range(10):
        rank, other = rng.sample(RANKS, 2)
        second = cell(rng.choice(RESTART), rng.choice(KINDS), rank, (other, rng.choice(("SIGKILL", "SIGSTOP"))))
        last = rng.choice(RANKS)
        kind = "exception" if last in (rank, other) else rng.choice(("exception", "SIGKILL"))  # no three alike
        cells.append([second, cell(rng.choice(("initialize", "first collective")), kind, last)])
    ended = play(start, cells, f"third {seed}")
    whole(ended, cells)


# Who asks for the end, and when it is enough.


@pytest.mark.long
def test_who_asks_for_the_end_while_it_leaves_is_replaced_or_not_heard(start):
    """Outside the function nobody asks for anything: an exit is a death, and in a function that is left it is void."""
    phases = ("unwind", "finalize", "health check", "roster")
    cells = [[cell(phase, kind, rank)] for (phase, kind), rank in zip(product(phases, ASKING), cycle(RANKS))]
    whole(play(start, cells), cells)


@pytest.mark.parametrize(
    ("phase", "kind"),
    [("initialize", "SIGINT"), pytest.param("first collective", "SystemExit", marks=pytest.mark.long)],
)
def test_who_asks_for_the_end_in_the_function_gets_it_in_any_generation(start, phase, kind):
    ended = play(start, [[cell(phase, kind, 1)]])
    assert ended.code == 1
    assert "rank 1:" in ended.err
    assert "raised in the wrapped function, asked for the end" in ended.err
    assert [e["number"] for e in ended.events("GenerationStarted")] == [0, 1]


def test_the_budget_counts_a_fault_in_a_restart_and_the_last_words_tell_both(start):
    ended = play(start, [[cell("initialize", "exception", 0)]], flags=("--max-restarts", "1"))
    assert ended.code == 1
    (end,) = ended.events("RunEnded")
    assert end["reason"].splitlines() == [
        "all 1 restarts that --max-restarts allows are used: exception of rank 0 after step 3 (Injected: 0-0)",
        "  generation 0: exception of rank 1 after step 3 (Injected: 0)",
        "  generation 1: exception of rank 0 after step 3 (Injected: 0-0)",
    ]


ENDLESS = """
@everstep.resilient
def train(run):
    model = torch.nn.Linear(2, 2)
    for step in run.steps(20, model=model):
        dist.barrier()
        if step == 5 and run.rank == 1:
            raise ValueError("the batch of step 5 is bad")
train()
"""


def test_an_endless_fault_ends_with_the_story_of_its_attempts(start):
    ended = start(ENDLESS, "--nproc-per-node", "3").ended(100)
    assert ended.code == 1
    story = "exception of rank 1 after step 4 (ValueError: the batch of step 5 is bad), in generations 0-2"
    (end,) = ended.events("RunEnded")
    assert end["reason"] == f"3 faults in a row without a new step in between, the last: {story}"
    assert story in ended.err
    told = [(f["number"], f["kind"], f["injured_rank"], f["step"], f["text"]) for f in ended.events("FaultNoticed")]
    assert told == [(g, "exception", 1, 4, "ValueError: the batch of step 5 is bad") for g in range(3)]


UNAWARE = """
dist.init_process_group("gloo")
dist.barrier()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and dist.get_rank() == 1:
    raise ValueError("only once")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_those_that_are_killed_for_a_fault_are_not_its_cause(start):
    """A script that does not know us: all of its processes end for the exception of one."""
    ended = start(UNAWARE, "--nproc-per-node", "3", "--max-restarts", "1", wrapped=False).ended(100)
    assert ended.code == 0, ended.err
    (fault,) = ended.events("FaultNoticed")
    assert (fault["kind"], fault["injured_rank"], fault["text"]) == ("exception", 1, "ValueError: only once")


SLOW = """
if os.path.exists("killed"):
    note("top")
    time.sleep(13)
@everstep.resilient
def train(run):
    model = torch.nn.Linear(2, 2)
    for step in run.steps(6, model=model):
        dist.barrier()
        if step == 3 and run.rank == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    note("returned")
def meanwhile():
    while not any('"top"' in line for line in open(os.environ["NOTES"])):
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(int(open("second").read()), signal.SIGKILL)
if os.environ["RANK"] == "0":
    open(os.environ["NOTES"], "a").close()
    import threading
    threading.Thread(target=meanwhile, daemon=True).start()
if os.environ["RANK"] == "2":
    open("second", "w").write(str(os.getpid()))
train()
"""


@pytest.mark.long
def test_a_newcomer_that_is_slow_to_come_to_its_call_is_not_overdue(start):
    """Rank 1's successor is in its script for 13 s when rank 2 dies: it arrives for the next generation at once."""
    ended = start(SLOW, "--nproc-per-node", "3", "--spares", "2").ended(100)
    assert ended.code == 0, ended.err
    assert "has not left" not in ended.err
    assert len([e for e in ended.events("FaultNoticed") if e["kind"] == "death"]) == 2, ended.err
    slow = {n["pid"] for n in ended.of("top") if n["rank"] == 1}
    assert slow == {n["pid"] for n in ended.of("returned") if n["rank"] == 1}


def page(folder):
    """Print what was seen as a table; one line a phase and kind, one column a rank."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}
    strikes = [s for name, run in runs.items() if not name.startswith("third") for s in run["strikes"]]
    print("| phase | fault | " + " | ".join(NAMES) + " |\n|---|---|---|---|---|")
    for phase, kind in product((*RESTART, *END), KINDS):
        row = [next(s for s in strikes if (s["phase"], s["kind"], s["rank"]) == (phase, kind, r)) for r in RANKS]
        times = [f"{s['ends']:.2f}, ends" if s["seconds"] is None else f"{s['seconds']:.2f}" for s in row]
        print(f"| {phase} | {kind} | " + " | ".join(times) + " |")
    more = [s for name, run in runs.items() if name.startswith("third") for s in run["strikes"]]
    print(f"\n{len(strikes)} cells, and {len(more)} strikes in jobs with a third fault and two at once")


if __name__ == "__main__":
    page(sys.argv[1])
