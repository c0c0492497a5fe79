"""Rows and budgets of `everstep bench injob`: restarts, starts, ends, and what a launcher costs at rest. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.experiments.core.figures import spread
from everstep.experiments.core.tapes import Run

WAYS = ("unwrapped", "cold", "spare", "ft_launcher", "torchrun")
"""Ours for a script without the wrapper, the same with `--preload none`, a wrapped one with a spare; theirs."""
OURS = WAYS[:3]
MONITORED = ("ft_launcher",)
"""Who hears of a hang by the script's heartbeats; the wrapped function needs none, torchrun hears of none."""
RESTART_S = 0.2
SHARE = 1 / 4
END_S = 0.2
IDLE_SHARE = 0.01


def restart_row(
    way: str, fault: str, ranks: int, runs: Sequence[Run], noticed: Sequence[float], left: int
) -> dict[str, Any]:
    """Return what faults of one kind cost under one launcher; `noticed`: after how long ours knew of each."""
    faults = [r for run in runs for r in run.recoveries]
    over = [r for r in faults if r.step_s is not None and r.enter_s is not None]
    began = [r.enter_s for r in over if r.enter_s is not None]
    steps = [r.step_s for r in over if r.step_s is not None]
    return {
        "way": way, "fault": fault, "ranks": ranks, "faults": len(faults), "recovered": len(over),
        "recovery_s": spread(steps), "noticed_s": spread(noticed), "began_s": spread(began),
        "own_s": spread([step - enter for step, enter in zip(steps, began, strict=True)]),
        "outcomes": dict(Counter(run.outcome for run in runs)), "left_behind": left,
    }  # fmt: skip


def launch_row(way: str, ranks: int, lives: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return how long a job takes from the command to its first lines and steps, and from its last line to its end."""
    return {"way": way, "ranks": ranks, "runs": len(lives)} | {
        name: spread([life[name] for life in lives]) for name in ("began_s", "step_s", "end_s")
    }


def verdicts(result: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Judge our rows by what is promised of them."""
    found: list[dict[str, Any]] = []
    for row in result["restarts"]:
        if row["way"] in ("unwrapped", "spare"):
            theirs = next((r for r in result["restarts"] if r["way"] == "ft_launcher" and _case(r) == _case(row)), None)
            found.append(_said(f"{row['way']}, {row['fault']}", row["ranks"], _restart(row, theirs)))
    for row in result["launches"]:
        if row["way"] == "unwrapped":
            took = row["end_s"][0] if row["end_s"] else None
            wrong = [] if took is not None and took <= END_S else [f"ended after {_s(took)}, promised {END_S:g} s"]
            found.append(_said("exit of a finished job", row["ranks"], (wrong, f"ended within {END_S:g} s")))
    for row in result["idle"]:
        if row["way"] in OURS:
            share = row["cpu_share"]
            wrong = [] if share < IDLE_SHARE else [f"{share:.2%} of a core, promised less than {IDLE_SHARE:.0%}"]
            found.append(_said("agent and zygote at rest", row["ranks"], (wrong, f"less than {IDLE_SHARE:.0%}")))
    return found


def _restart(row: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> tuple[list[str], str]:
    """An unwrapped script's own set-up is its own; a wrapped function with a spare is to be back in its steps."""
    if not row["faults"] or row["recovered"] < row["faults"]:
        return [f"{row['recovered']} of {row['faults']} faults were over"], ""
    wrong: list[str] = []
    noticed = row["noticed_s"][0] if row["noticed_s"] else 0.0
    until = row["began_s"] if row["way"] == "unwrapped" else row["recovery_s"]
    if until[0] - noticed > RESTART_S:
        wrong.append(f"{until[0] - noticed:.3f} s after it was noticed, promised {RESTART_S:g}")
    if row["way"] == "unwrapped" and theirs is not None and theirs["recovery_s"]:
        share = row["recovery_s"][0] / theirs["recovery_s"][0]
        if share > SHARE:
            wrong.append(f"{share:.2f} of ft_launcher's time, promised {SHARE:g}")
    what = "its first line" if row["way"] == "unwrapped" else "its first step"
    return wrong, f"{what} within {RESTART_S:g} s of the notice"


def _said(what: str, ranks: int, judged: tuple[list[str], str]) -> dict[str, Any]:
    wrong, kept = judged
    return {"what": what, "ranks": ranks, "budget_kept": not wrong, "budget": "; ".join(wrong) or kept}


def _case(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row["fault"], row["ranks"]


def _s(seconds: float | None) -> str:
    return "no end" if seconds is None else f"{seconds:.3f} s"
