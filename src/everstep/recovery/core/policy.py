"""Restart, or give up? A pure decision with its reason.

Two readings of patience. With `max_restarts` the operator has said how many restarts the whole job may have, as
torchrun means it. Without it, what counts is progress: a fault after a step that no earlier fault had reached is free.
Without such a step in between,

* `same_step_limit` faults that are alike end the job, for a restart would only do the same;
* so do `patience` faults of any kind, for something is wrong even if it shows in a new place each time.

A script without the wrapper is not begun again at once where its faults repeat at one place: `pause_s`.

A fault of a generation that nobody could attempt, for a member was dead before it was entered, counts for the second
alone: it says nothing of the step.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from everstep.ranks import brief
from everstep.recovery.core.words import Fault, Policy

MOST_TOLD = 12
"""Attempts that are told one by one, or in groups of the same; of the others, how many."""
_LONGEST = 300
MOST_PAUSE_S = 30.0
_SAME_S, _SAME_SHARE = 1.0, 0.2
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_KILLED = "ended by signal 9"
NO_PYTHON = ("SyntaxError:", "IndentationError:", "TabError:")
"""What a script's end is told with where it would fail alike on each start: as many as are allowed are not tried."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the job goes on, and why."""

    go_on: bool
    reason: str


def decide(policy: Policy, generation: int, faults: Sequence[Fault]) -> Verdict:
    """Judge the fault that ended `generation`: the last of `faults`, the job's causes so far, oldest first."""
    if faults[-1].kind == "script" and faults[-1].text.startswith(NO_PYTHON):
        return Verdict(False, f"the script is no Python, and no restart mends that: {told(faults[-1:])}")
    if policy.max_restarts is not None:
        used, allowed = generation + 1, policy.max_restarts
        if used <= allowed:
            return Verdict(True, f"restart {used} of {allowed}")
        return Verdict(False, f"all {allowed} restarts that --max-restarts allows are used: {told(faults)}")
    if faults[-1].kind == "script":
        return Verdict(False, f"the script failed before it came to the wrapped call: {told(faults[-1:])}")
    row = _without_progress(faults)
    many = f"{len(row)} faults in a row"
    same = [fault for fault in row if fault.attempted and alike(fault, faults[-1])]
    if faults[-1].attempted and len(same) >= policy.same_step_limit:
        count = "" if len(same) == len(row) else f", {len(same)} of them alike"
        return Verdict(False, f"{many} without a new step in between{count}, the last: {told(row)}")
    if len(row) >= policy.patience:
        return Verdict(False, f"{many} without a new step in between, the last: {told(row)}")
    return Verdict(True, "progress since the last fault" if len(row) == 1 else f"{many} at this step")


def pause_s(policy: Policy, faults: Sequence[Fault], lives: Mapping[int, float]) -> float:
    """Return for how long the next attempt of an unwrapped script is put off; the last fault is the newest.

    `lives`: how long each generation had run until its fault, in seconds. A fault repeats another where the
    same was said, numbers apart (a step, a pid, an address), or befell the same rank, after about the same time: the
    first repetition costs 1 s, each one more twice as much, `MOST_PAUSE_S` at the most. A SIGKILL is from outside, and
    repeats nothing.
    """
    if not policy.deaf or not faults or faults[-1].text in ("", _KILLED):
        return 0.0
    last = faults[-1]
    row = 0
    for fault in reversed(faults):
        by_whom = fault.kind == "exception" or fault.rank == last.rank  # what all raise any may tell of first
        if (fault.kind, _gist(fault)) != (last.kind, _gist(last)) or not by_whom:
            break
        before, now = lives.get(fault.generation), lives.get(last.generation)
        if before is None or now is None or abs(before - now) > max(_SAME_S, _SAME_SHARE * now):
            break
        row += 1
    return min(2.0 ** (row - 2), MOST_PAUSE_S) if row > 1 else 0.0


def _gist(fault: Fault) -> str:
    """What an exception says on each attempt; how a process ended is told by nothing but its number."""
    return _NUMBER.sub("#", fault.text) if fault.kind == "exception" else fault.text


def alike(one: Fault, other: Fault) -> bool:
    """Tell whether the second may be the first again: by who it befell, or by what was said.

    Who is named for a hang is the judgement of a moment, so that all hangs are alike.
    """
    if one.kind != other.kind:
        return False
    return one.kind == "stall" or one.rank == other.rank or (one.kind == "exception" and one.text == other.text != "")


def _without_progress(faults: Sequence[Fault]) -> Sequence[Fault]:
    """Return the last faults that came no further than some fault before them; the one that got there is the first."""
    best, first = -1, 0
    for at, fault in enumerate(faults):
        if (fault.step or 0) > best:
            best, first = fault.step or 0, at
    return faults[first:]


def told(faults: Sequence[Fault]) -> str:
    """Tell the last fault; where there were others, the story of all: what ended each attempt, in their order."""
    last = _one(faults[-1])
    groups = [(text, [fault.generation for fault in same]) for text, same in groupby(faults, _one)]
    if len(groups) == 1:
        return last if len(faults) == 1 else f"{last}, in generations {brief(groups[0][1])}"
    lines = [f"generation {brief(which)}: {text}" for text, which in groups]
    before = sum(len(which) for _, which in groups[:-MOST_TOLD])
    hidden = [f"{before} others before these"] if before else []
    return "\n  ".join([last, *hidden, *lines[-MOST_TOLD:]])


def _one(fault: Fault) -> str:
    where = "" if fault.rank is None else f" of rank {fault.rank}"
    when = "" if fault.step is None else f" after step {fault.step}"
    first = fault.text.partition("\n")[0][:_LONGEST]
    early = "" if fault.attempted else ", before the generation was entered"
    return f"{fault.kind}{where}{when}{early}{f' ({first})' if first else ''}"
