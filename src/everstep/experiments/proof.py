"""Does a run with faults equal its fault-free twin? Judged from what the training step itself wrote down.

Rule 1: the witness is the record: one line a step from inside the user's own training step (process, rank, step, exact
        loss), and a hash of all state at the end. Our ledger is asked for two things only, which the script cannot
        know: when each fault struck, and when each process began.
Rule 2: equal means every bit: losses are compared as hexadecimal floats, those of steps done again too.
Rule 3: a finding says what was looked at, also where it holds; where it does not, the first place, with both values.
Rule 4: silence is no proof: an empty record, a fault that never struck and a loss that is no number all fail.

Pure: lines and facts come in, findings come out. `experiments.demo` makes the runs and reads the files.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from everstep import ranks
from everstep.errors import LedgerError
from everstep.faults.core.plan import INSIDE, PlannedFault

LETHAL = frozenset({"sigkill", "sigterm", "sigstop", "segfault", "abort", "exit", "gil"})
"""Types of fault that no process comes back from; all others leave it alive, and it must be the same to the end."""

_WARM_UP = 5  # steps of a process that say nothing about the rate


@dataclass(frozen=True, slots=True)
class Execution:
    """One training step, as it told of itself when it was through."""

    pid: int
    rank: int
    step: int
    loss: str  # float.hex()
    at_s: float  # monotonic


@dataclass(frozen=True, slots=True)
class Ending:
    """A rank's hashes after its last step."""

    pid: int
    rank: int
    model: str
    optimizer: str


@dataclass(frozen=True, slots=True)
class Tape:
    """All that one run recorded, in the order in which it was written."""

    executions: tuple[Execution, ...]
    endings: tuple[Ending, ...]

    def of(self, rank: int) -> list[Execution]:
        """Return one rank's steps."""
        return [e for e in self.executions if e.rank == rank]

    def losses(self) -> dict[tuple[int, int], str]:
        """Return the loss that stands for (rank, step): that of its last execution."""
        return {(e.rank, e.step): e.loss for e in self.executions}


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was let go, and when (monotonic)."""

    index: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the findings rest on."""

    twin: Tape
    run: Tape
    steps: int
    world_size: int
    planned: tuple[PlannedFault, ...]
    struck: tuple[Struck, ...]
    started: Mapping[int, float]
    """When each process of the run began, by process id (monotonic)."""
    exit_codes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Finding:
    """One question put to the evidence, and its answer."""

    name: str
    holds: bool
    text: str


def read_tape(lines: Iterable[str], name: str) -> Tape:
    """Read a record. Raises LedgerError with the number of the first line that is not one of its lines."""
    executions: list[Execution] = []
    endings: list[Ending] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body: dict[str, Any] = json.loads(line)
            if "step" in body:
                float.fromhex(body["loss"])
                executions.append(Execution(body["pid"], body["rank"], body["step"], body["loss"], body["at"]))
            else:
                endings.append(Ending(body["pid"], body["rank"], body["model"], body["optimizer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"{name}, line {number} is no record of a step: {line[:120]!r} ({error})") from error
    return Tape(tuple(executions), tuple(endings))


def prove(evidence: Evidence) -> tuple[Finding, ...]:
    """Return all findings; the proof stands where each holds."""
    questions = (
        _exit_codes, _complete, _twin_is_plain, _losses, _state, _learning, _struck, _places, _executions, _steps_lost,
        _survivors, _successors,
    )  # fmt: skip
    return tuple(question(evidence) for question in questions)


def same_training(plain: Tape, twin: Tape) -> Finding:
    """Return whether the plain loop, which knows nothing of Everstep, trains to the very same bits."""
    theirs, bad = plain.losses(), list[str]()
    for x in twin.executions:
        there = theirs.get((x.rank, x.step))
        if there != x.loss:
            bad.append(f"step {x.step} on rank {x.rank}: {there or 'nothing'} in the plain loop, {x.loss} in the twin")
    hashes = [{x.rank: (x.model, x.optimizer) for x in tape.endings} for tape in (plain, twin)]
    if hashes[0] != hashes[1]:
        bad.append("the plain loop and the twin hash their state at the end to other values")
    if not plain.executions or not plain.endings:
        bad.insert(0, "the plain loop did not record its end")
    return _holds("plain loop", f"{len(theirs)} losses and the state at the end are the twin's, bit for bit", bad)


def step_s(tape: Tape, rank: int = 0) -> float | None:
    """Return the median time from step to step on a rank, warm-up and gaps between processes left out."""
    gaps: list[float] = []
    seen: dict[int, int] = {}
    for before, after in pairwise(tape.of(rank)):
        seen[after.pid] = seen.get(after.pid, 0) + 1
        if before.pid == after.pid and after.step == before.step + 1 and seen[after.pid] > _WARM_UP:
            gaps.append(after.at_s - before.at_s)
    return median(gaps) if gaps else None


def _holds(name: str, good: str, troubles: Sequence[str]) -> Finding:
    more = f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else ""
    return Finding(name, not troubles, troubles[0] + more if troubles else good)


def _exit_codes(e: Evidence) -> Finding:
    bad = [f"{name} ended with {code}" for name, code in e.exit_codes.items() if code != 0]
    return _holds("exit codes", f"0 from {', '.join(e.exit_codes)}", bad if e.exit_codes else ["nothing was run"])


def _complete(e: Evidence) -> Finding:
    wanted = {(rank, step) for rank in range(e.world_size) for step in range(1, e.steps + 1)}
    bad: list[str] = []
    for name, tape in (("twin", e.twin), ("run", e.run)):
        have = set(tape.losses())
        bad += [f"{name}: rank {r} has no step {s}" for r, s in sorted(wanted - have, key=lambda x: x[::-1])]
        bad += [f"{name}: rank {r}, step {s} is outside the job" for r, s in sorted(have - wanted)]
    return _holds("complete", f"{e.steps} steps on each of {e.world_size} ranks, in both runs", bad)


def _twin_is_plain(e: Evidence) -> Finding:
    bad: list[str] = []
    for rank in range(e.world_size):
        mine = e.twin.of(rank)
        if [x.step for x in mine] != list(range(1, e.steps + 1)):
            bad.append(f"the twin's rank {rank} did not go from step 1 to {e.steps} once each")
        if len({x.pid for x in mine}) > 1:
            bad.append(f"the twin's rank {rank} changed its process")
    return _holds("twin", "fault-free: every step once, every rank one process", bad)


def _losses(e: Evidence) -> Finding:
    twin = e.twin.losses()
    bad = [_parted(x, twin[x.rank, x.step]) for x in sorted(e.run.executions, key=lambda x: (x.step, x.rank))
           if twin.get((x.rank, x.step)) not in (None, x.loss)]  # fmt: skip
    bad += [f"rank {r}, step {s}: the loss is {h}, no number" for (r, s), h in twin.items() if not _finite(h)]
    if not e.run.executions:
        bad.append("the run recorded no loss")
    redone = len(e.run.executions) - len(e.run.losses())
    return _holds("losses", f"{len(e.run.executions)} losses equal bit for bit, {redone} of them of steps redone", bad)


def _parted(x: Execution, twin: str) -> str:
    ours, theirs = float.fromhex(x.loss), float.fromhex(twin)
    return (
        f"they part at step {x.step} on rank {x.rank}: {twin} ({theirs!r}) in the twin, {x.loss} ({ours!r}) in the run,"
        f" process {x.pid}"
    )


def _finite(loss: str) -> bool:
    return math.isfinite(float.fromhex(loss))


def _state(e: Evidence) -> Finding:
    twin = {x.rank: x for x in e.twin.endings}
    ours = {x.rank: x for x in e.run.endings}
    bad: list[str] = []
    for rank in range(e.world_size):
        a, b = twin.get(rank), ours.get(rank)
        if a is None or b is None:
            bad.append(f"rank {rank} has no hash at the end of the {'twin' if a is None else 'run'}")
            continue
        for what, there, here in (("model", a.model, b.model), ("optimizer", a.optimizer, b.optimizer)):
            if there != here:
                bad.append(f"rank {rank}: the {what} hashes to {there[:16]} in the twin and to {here[:16]} in the run")
    return _holds("state", f"model and optimizer of {e.world_size} ranks hash alike at the end", bad)


def _learning(e: Evidence) -> Finding:
    values = [float.fromhex(x.loss) for x in e.twin.of(0)]
    tenth = max(1, len(values) // 10)
    first, last = (fmean(values[:tenth]), fmean(values[-tenth:])) if values else (math.nan, math.nan)
    good = f"the loss fell from {first:.3f} to {last:.3f}"
    return _holds("learning", good, [] if last < first else [f"the loss went from {first:.3f} to {last:.3f}"])


def _struck(e: Evidence) -> Finding:
    times = [s.index for s in e.struck]
    names = {f.index: f"fault {f.index} ({f.type}, step {f.step}, rank {f.rank})" for f in e.planned}
    bad = [f"{names[i]} never struck" for i in names if i not in times]
    bad += [f"{names.get(i, f'fault {i}, which nobody planned,')} struck {times.count(i)} times"
            for i in sorted(set(times)) if times.count(i) > 1 or i not in names]  # fmt: skip
    if not names:
        bad.append("no fault was planned")
    return _holds("faults", f"each of {len(names)} struck once: {_kinds(e.planned)}", bad)


def _kinds(planned: Iterable[PlannedFault]) -> str:
    kinds = [f.type for f in planned]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def _places(e: Evidence) -> Finding:
    bad = [f"no fault {place}" for place in INSIDE if place not in {f.position for f in e.planned}]
    if 0 not in {f.rank for f in e.planned}:
        bad.append("no fault on rank 0")
    told = ", ".join(f"{f.position} of step {f.step} on rank {f.rank}" for f in sorted(e.planned, key=lambda f: f.step))
    return _holds("places", told, [f"{trouble}: the five must hit inside the step, rank 0 too" for trouble in bad])


def _executions(e: Evidence) -> Finding:
    counts = {rank: len(e.run.of(rank)) for rank in range(e.world_size)}
    most = e.steps + len(e.planned)
    bad = [
        f"rank {r} did {n} steps, more than {e.steps} + {len(e.planned)} faults" for r, n in counts.items() if n > most
    ]
    told = ", ".join(f"{n} on rank {r}" for r, n in counts.items())
    return _holds("executions", f"{told}; allowed are {e.steps} + {len(e.planned)}", bad)


def _steps_lost(e: Evidence) -> Finding:
    bad: list[str] = []
    lost = 0
    for rank in range(e.world_size):
        back = [(a, b) for a, b in pairwise(e.run.of(rank)) if b.step != a.step + 1]
        lost = max(lost, sum(a.step - b.step + 1 for a, b in back if b.step <= a.step))
        bad += [f"rank {rank} went from step {a.step} to step {b.step}" for a, b in back if b.step != a.step]
        if len(back) > len(e.planned):
            bad.append(f"rank {rank} went back {len(back)} times for {len(e.planned)} faults")
    return _holds("steps lost", f"at most one per fault; {lost} in all on the rank that lost most", bad)


def _changes(e: Evidence, rank: int) -> list[tuple[Execution, Execution]]:
    return [(a, b) for a, b in pairwise(e.run.of(rank)) if a.pid != b.pid]


def _killers(e: Evidence, rank: int) -> list[tuple[PlannedFault, float]]:
    when = {s.index: s.at_s for s in e.struck}
    found = [(f, when[f.index]) for f in e.planned if f.rank == rank and f.type in LETHAL and f.index in when]
    return sorted(found, key=lambda pair: pair[1])


def _cause(e: Evidence, change: tuple[Execution, Execution]) -> tuple[PlannedFault, float] | None:
    """Return the lethal fault between the last step of the old process and the first of the new one."""
    old, new = change
    between = [pair for pair in _killers(e, new.rank) if old.at_s <= pair[1] <= new.at_s]
    return between[-1] if between else None


def _survivors(e: Evidence) -> Finding:
    bad: list[str] = []
    kept: list[int] = []
    for rank in range(e.world_size):
        changes = _changes(e, rank)
        bad += [f"rank {rank} went from process {a.pid} to {b.pid} after step {a.step}, and no fault had ended it"
                for a, b in changes if _cause(e, (a, b)) is None]  # fmt: skip
        ended = {x.pid for x in e.run.endings if x.rank == rank}
        last = [x.pid for x in e.run.of(rank)][-1:]
        bad += [f"rank {rank} ended in process {p}, its last step was in {last}" for p in ended if [p] != last]
        if not changes and e.run.of(rank):
            kept.append(rank)
    hit = sorted({f.rank for f in e.planned if f.type in LETHAL})
    good = f"one process from first step to last on rank {ranks.brief(kept)}; killed on purpose on {ranks.brief(hit)}"
    return _holds("survivors", good, bad)


def _successors(e: Evidence) -> Finding:
    bad: list[str] = []
    ready: list[str] = []
    for rank in range(e.world_size):
        for old, new in _changes(e, rank):
            cause, began = _cause(e, (old, new)), e.started.get(new.pid)
            if began is None:
                bad.append(f"process {new.pid}, which took over rank {rank}, does not stand in the ledger")
            elif cause is not None and began >= cause[1]:
                bad.append(
                    f"process {new.pid} took over rank {rank} but began {began - cause[1]:.3f} s after the fault"
                )
            elif cause is not None:
                ready.append(f"process {new.pid} had stood ready for {cause[1] - began:.1f} s when it took rank {rank}")
    killers = [f for f in e.planned if f.type in LETHAL]
    if killers and not ready and not bad:
        bad.append(f"{len(killers)} faults end a process, and nobody was seen to take over")
    return _holds("successors", "; ".join(ready) or "no fault ended a process", bad)
