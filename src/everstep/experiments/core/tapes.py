"""From what the processes of a run wrote down to what became of each fault.

Rule 1: a fault is over when every rank of the next generation that trains has done its first step. So a figure stands
        for all ranks, and a rank that was lost on the way is counted, never left out.
Rule 2: a fault that is never over has no figure. It is told in words: what was waited for, and how long.
Rule 3: the parts of a figure are the slowest rank's, end to end: back in the function, groups made, first step done.

All times are of one machine's monotonic clock.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mark:
    """One line of a tape."""

    at_s: float
    what: str  # enter | group | step | fault | done | failed
    pid: int
    generation: int
    rank: int
    world: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of one fault. Seconds are from the fault; None where it was never over."""

    generation: int
    rank: int
    world: int
    at_s: float = 0.0  # when it hit, by the machine's monotonic clock
    enter_s: float | None = None
    group_s: float | None = None
    step_s: float | None = None
    world_after: int | None = None  # ranks that trained on
    bystanders_lost: int | None = None  # processes that were not at fault and are gone


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its recoveries, how many ranks came to the end, and how it ended."""

    recoveries: tuple[Recovery, ...]
    done: int
    wall_s: float
    outcome: str  # done, or what was seen instead


@dataclass(frozen=True, slots=True)
class Ending:
    """How the driver saw a run end. `codes` are the exit codes of the processes that it had started."""

    wall_s: float
    codes: tuple[int | None, ...]
    silent_s: float | None = None  # no rank came to anything for so long, so the run was ended


def read(texts: Iterable[str]) -> tuple[Mark, ...]:
    """Read tapes; a line that a kill has torn is left out."""
    found: list[Mark] = []
    for text in texts:
        for line in text.splitlines():
            mark = _mark(line)
            if mark is not None:
                found.append(mark)
    return tuple(sorted(found, key=lambda m: m.at_s))


def _mark(line: str) -> Mark | None:
    try:
        body: Mapping[str, Any] = json.loads(line)
        return Mark(
            float(body["t"]), str(body["is"]), int(body["pid"]), int(body.get("gen", -1)), int(body.get("rank", -1)),
            int(body.get("world", 0)), str(body.get("text", "")),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None


def judge(marks: Sequence[Mark], ending: Ending) -> Run:
    """Say what became of each fault of a run, and of the run."""
    recoveries = tuple(_recovery(marks, mark) for mark in marks if mark.what == "fault")
    finished = {m.pid for m in marks if m.what == "done"}
    return Run(recoveries, len(finished), ending.wall_s, _outcome(marks, recoveries, len(finished), ending))


def _recovery(marks: Sequence[Mark], harm: Mark) -> Recovery:
    """Look for the next generation that trains."""
    later = [m for m in marks if m.generation > harm.generation and m.at_s > harm.at_s]
    empty = Recovery(harm.generation, harm.rank, harm.world, harm.at_s)
    stepped = [m for m in later if m.what == "step"]
    if not stepped:
        return empty
    number = min(m.generation for m in stepped)
    here = [m for m in later if m.generation == number]
    world = max(m.world for m in here)
    if sum(m.what == "step" for m in here) < world:
        return empty
    before = {m.pid for m in marks if m.generation == harm.generation and m.what == "step"} - {harm.pid}
    after = {m.pid for m in here if m.what == "step"}
    return Recovery(
        harm.generation, harm.rank, harm.world, harm.at_s,
        _last(here, "enter", harm), _last(here, "group", harm), _last(here, "step", harm), world, len(before - after),
    )  # fmt: skip


def _last(marks: Sequence[Mark], what: str, harm: Mark) -> float | None:
    times = [m.at_s for m in marks if m.what == what]
    return max(times) - harm.at_s if times else None


def _outcome(marks: Sequence[Mark], recoveries: Sequence[Recovery], done: int, ending: Ending) -> str:
    """Say how a run ended, the way a person would."""
    open_ones = [r for r in recoveries if r.step_s is None]
    if ending.silent_s is not None:
        what = "no new step" if open_ones else "no end"
        return f"{what} within {ending.silent_s:g} s" + (" of the fault" if open_ones else "")
    world = recoveries[-1].world_after if recoveries else None
    if done and not open_ones and (world is None or done >= world):
        return "done"
    said = next((m.text for m in reversed(marks) if m.what == "failed"), "")
    codes = ", ".join("?" if code is None else str(code) for code in ending.codes)
    return f"ended early, exit codes {codes}" + (f" ({said})" if said else "")
