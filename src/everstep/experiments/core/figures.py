"""Rows of the in-process benchmark, and how they compare: medians, ratios, budgets.

A row stands for one implementation and one case; its figures are medians over all faults of all of its runs, with the
least and the most. A fault that was never over has no seconds, so the row says beside them how many were.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.experiments.core.tapes import Run

PARTS = ("detect_s", "stop_s", "regroup_s", "rebuild_s", "restore_s", "redo_s", "new_step_s")
"""As our own ledger knows them (see goodput.md)."""
STOPPED = PARTS[:2]
"""Those that it knows of a function without `run.steps` too."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is done to a job."""

    fault: str
    ranks: int
    backend: str = "gloo"
    tuned: bool = False

    def __str__(self) -> str:
        return f"{self.fault}, {self.ranks} rank{'s' * (self.ranks != 1)}"


@dataclass(frozen=True, slots=True)
class Budget:
    """What we promise of a case (DESIGN, Budgets): seconds, every rank kept, and a share of NVRx's time."""

    seconds: float
    share: float | None = None
    after_noticed: bool = False  # the seconds begin when the fault is noticed, not when it hits


BUDGETS: Mapping[tuple[str, str, int], Budget] = {
    ("gloo", "exception", 2): Budget(0.06, share=1 / 15),
    ("gloo", "exception", 4): Budget(0.12),
    ("gloo", "hang", 2): Budget(0.06, after_noticed=True),
    ("gloo", "hang", 4): Budget(0.12, after_noticed=True),
    ("gloo", "sigkill", 2): Budget(0.2, after_noticed=True),
    ("gloo", "sigkill", 4): Budget(0.2, after_noticed=True),
    ("nccl", "exception", 2): Budget(1.0),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a budget is kept, and the comparison that says so."""

    kept: bool
    reason: str


SIZES = (64, 256, 1024, 4096)
"""Of simulated worlds, in ranks."""

NVRX = "nvidia_resiliency_ext.inprocess"


def name_of(row: Mapping[str, Any]) -> str:
    """Name an implementation as a table does."""
    known = {"everstep": "everstep, native", NVRX: "NVRx"}
    how = f"{row['launcher']}, tuned" if row.get("tuned") else row["launcher"]
    return f"{known.get(row['impl'], row['impl'])} ({how})"


def spread(values: Sequence[float]) -> list[float] | None:
    """Return median, least and most; None where there is nothing."""
    return [statistics.median(values), min(values), max(values)] if values else None


def row(
    who: Mapping[str, Any], case: Case, runs: Sequence[Run], ledger: Sequence[Mapping[str, Any]], left_behind: int = 0
) -> dict[str, Any]:
    """Return one row as plain values; `ledger` are the faults as our own ledger tells them, where there is one."""
    faults = [r for run in runs for r in run.recoveries]
    over = [r for r in faults if r.step_s is not None]
    outside = _outside([(r.enter_s, r.group_s, r.step_s) for r in over])
    return {
        **who,
        "fault": case.fault,
        "ranks": case.ranks,
        "backend": case.backend,
        "tuned": case.tuned,
        "runs": len(runs),
        "faults": len(faults),
        "recovered": len(over),
        "recovery_s": spread([r.step_s for r in over if r.step_s is not None]),
        "outside_s": outside,
        "parts_s": _parts(ledger, outside),
        "least_world": min((r.world_after for r in over if r.world_after is not None), default=None),
        "bystanders_lost": max((r.bystanders_lost or 0 for r in over), default=0),
        "outcomes": dict(Counter(run.outcome for run in runs)),
        "left_behind": left_behind,
        "each_s": [r.step_s for r in faults],
    }


def _outside(ends: Sequence[tuple[float | None, float | None, float | None]]) -> dict[str, float] | None:
    """Split each recovery where anybody can see it: back in the function, groups made, first step done."""
    whole = [(a, b, c) for a, b, c in ends if a is not None and b is not None and c is not None]
    if not whole:
        return None
    split = {"back_s": [a for a, _, _ in whole], "group_s": [b - a for a, b, _ in whole],
             "step_s": [c - b for _, b, c in whole]}  # fmt: skip
    return {name: statistics.median(values) for name, values in split.items()}


def _parts(ledger: Sequence[Mapping[str, Any]], outside: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return the median of each part that the ledger knows; a part that nobody reached is left out.

    Where it knows of nothing after the stop, the way from there back into the function is the regroup.
    """
    known = {part: [f[part] for f in ledger if f.get(part) is not None] for part in PARTS}
    found = {part: statistics.median(values) for part, values in known.items() if values}
    if outside is not None and tuple(found) == STOPPED:
        found["regroup_s"] = max(0.0, outside["back_s"] - sum(found.values()))
    return found or None


def ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float | None:
    """Return how many times longer theirs takes, by medians; None where one of them has none."""
    if not ours["recovery_s"] or not theirs["recovery_s"]:
        return None
    return float(theirs["recovery_s"][0] / ours["recovery_s"][0])


def verdict(found: Mapping[str, Any], against: Mapping[str, Any] | None) -> Verdict | None:
    """Judge a row of ours by its budget; None where no budget stands for its case."""
    budget = BUDGETS.get((found["backend"], found["fault"], found["ranks"]))
    if budget is None:
        return None
    wrong = _shortfalls(found, budget)
    times = ratio(found, against) if against is not None else None
    if budget.share is not None and times is not None and times < 1 / budget.share:
        wrong.append(f"{times:.0f} times faster, promised {1 / budget.share:.0f}")
    limit = f"{budget.seconds:g} s{' after noticing' if budget.after_noticed else ''}"
    return Verdict(not wrong, "; ".join(wrong) or f"within {limit}")


def _shortfalls(found: Mapping[str, Any], budget: Budget) -> list[str]:
    wrong: list[str] = []
    if found["recovered"] < found["faults"] or not found["faults"]:
        wrong.append(f"{found['recovered']} of {found['faults']} faults were over")
    elif found["least_world"] < found["ranks"] or found["bystanders_lost"]:
        wrong.append(f"{found['ranks'] - found['least_world']} ranks, {found['bystanders_lost']} bystanders lost")
    took = _took(found, budget)
    if took is None:
        wrong.append("when it was noticed is not known" if found["recovery_s"] else "no figure")
    elif took > budget.seconds:
        wrong.append(f"{took:.3f} s{' after noticing' if budget.after_noticed else ''}, promised {budget.seconds:g}")
    return wrong


def _took(found: Mapping[str, Any], budget: Budget) -> float | None:
    """Return the median that the budget speaks of."""
    if not found["recovery_s"]:
        return None
    whole = float(found["recovery_s"][0])
    if not budget.after_noticed:
        return whole
    parts = found["parts_s"] or {}
    return whole - parts["detect_s"] if "detect_s" in parts else None


def growth(points: Sequence[tuple[int, float]]) -> float | None:
    """Return the exponent with which seconds grow with size, by least squares over logarithms: 1 is linear."""
    logs = [(math.log(size), math.log(seconds)) for size, seconds in points if size > 0 and seconds > 0]
    if len(logs) < 2:  # noqa: PLR2004 - a line needs two points
        return None
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*logs, strict=True))
    across = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / across if across else None
