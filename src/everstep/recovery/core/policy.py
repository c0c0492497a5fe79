"""Restart, or give up? A pure decision with its reason.

Two readings of patience. With `max_restarts` the operator has said how many restarts the whole job may have, as
torchrun means it. Without it, what counts is progress: a fault after a step that no earlier fault had reached is
free, and `same_step_limit` faults in a row without such a step end the job, for a restart would only do the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.recovery.core.words import Fault, Policy


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the job goes on, and why."""

    go_on: bool
    reason: str


def decide(policy: Policy, generation: int, faults: Sequence[Fault]) -> Verdict:
    """Judge the fault that ended `generation`: the last of `faults`, the job's causes so far, oldest first."""
    if policy.max_restarts is not None:
        used, allowed = generation + 1, policy.max_restarts
        if used <= allowed:
            return Verdict(True, f"restart {used} of {allowed}")
        return Verdict(False, f"all {allowed} restarts that --max-restarts allows are used: {_told(faults[-1])}")
    if faults[-1].kind == "script":
        return Verdict(False, f"the script failed before it came to the wrapped call: {_told(faults[-1])}")
    row = _without_progress(faults)
    if row < policy.same_step_limit:
        return Verdict(True, "progress since the last fault" if row == 1 else f"{row} faults in a row at this step")
    return Verdict(False, f"{row} faults in a row without a new step in between, the last: {_told(faults[-1])}")


def _without_progress(faults: Sequence[Fault]) -> int:
    """Count the last faults that came no further than some fault before them; the one that got there is the first."""
    best, row = -1, 0
    for fault in faults:
        step = fault.step or 0
        row = 1 if step > best else row + 1
        best = max(best, step)
    return row


def _told(fault: Fault) -> str:
    where = "" if fault.rank is None else f" of rank {fault.rank}"
    when = "" if fault.step is None else f" after step {fault.step}"
    return f"{fault.kind}{where}{when}{f' ({fault.text})' if fault.text else ''}"
