"""Rows of the checkpoint benchmark: what a loop paid for its checkpoints, and how old the newest durable one was.

Rule 1: what a loop was blocked by is its wall time less that of the same steps without checkpoints, measured in the
        same process before and after. What a save call says of itself has no part in it.
Rule 2: a window begins when one save call has returned and ends when another has: it holds whole intervals, and
        saves that met a write under way where the mode has such.
Rule 3: an efficiency stands beside what it was had for: the interval that was achieved, and the greatest age of the
        newest durable checkpoint at the end of any step. Of a saver that skips everything the age says so.
Rule 4: ranks train in step, so the slowest one's loop is the job's. A checkpoint is durable when the last of them has
        seen it to be, and whole where it is on all.

All seconds are of one machine's monotonic clock.
"""

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

OURS = ("everstep", "everstep-block", "everstep-skip")
NVRX_MODE = "nvrx"
MODES = (*OURS, "torch.save", "dcp.save", "dcp.async_save-thread", "dcp.async_save-process", NVRX_MODE)
JUDGED = ("everstep", "everstep-skip")
"""Whom the budget is for; `block` waits because it was asked to."""

LABELS: Mapping[str, str] = {
    "everstep": "everstep, coalesce", "everstep-block": "everstep, block", "everstep-skip": "everstep, skip",
    "torch.save": "torch.save and fsync", "dcp.save": "dcp.save", "dcp.async_save-thread": "dcp.async_save, thread",
    "dcp.async_save-process": "dcp.async_save, process", NVRX_MODE: "NVRx TorchAsyncCheckpoint",
}  # fmt: skip

SHARE = 0.99  # DESIGN, Budgets, where the copy runs beside the step (CUDA)
SLACK = 0.005  # on the CPU: the bare copy, and this
WRITES = 2  # of the age: so many write times, and an interval

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{more}": base**power
    for power, letter in enumerate("kMGT", 1)
    for more, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)")


def size(text: str) -> int:
    """Return bytes from `64MB`, `1.5GiB`, `4096`; raises ValueError naming what was expected."""
    found = _SIZE.fullmatch(text.strip())
    unit = found[2].replace("K", "k") if found else None
    if found is None or unit not in _UNITS or (count := int(float(found[1]) * _UNITS[unit])) < 1:
        raise ValueError(f"{text!r}: give a size as 64MB, 1.5GiB or 4096 (bytes)")
    return count


SLOWEST = 64_000
"""Bytes a second. A throttled write of one piece ends at its rate and not before: nothing could end it sooner."""


def rate(text: str) -> int | None:
    """Return bytes a second from `10MB/s`; None for `unlimited`."""
    if text.strip() == "unlimited":
        return None
    try:
        found = size(text.strip().removesuffix("/s"))
    except ValueError as error:
        raise ValueError(f"{text!r}: give a bandwidth as 10MB/s, or unlimited") from error
    if found < SLOWEST:
        raise ValueError(f"{text!r}: give 64kB/s or more; at less a single write takes longer than anything here waits")
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """One measured stretch of a loop with checkpoints, between two stretches of the same loop without.

    bare: (steps, seconds) of each stretch without. before: (step, when the call began) of the saves on the idle disk,
    all durable. ends: (step, when it ended) inside. saves: (step, when the call
    began, when it returned), the one that opens the window first. durable: (step, when it was seen to be durable).
    """

    bare: tuple[tuple[int, float], ...]
    before: tuple[tuple[int, float], ...]
    ends: tuple[tuple[int, float], ...]
    saves: tuple[tuple[int, float, float], ...]
    durable: tuple[tuple[int, float], ...]
    write_s: float  # of one save on an idle disk, from the call until it is durable
    copy_s: float  # of a bare copy of the state
    holds: tuple[int, ...]  # the steps of which the newest durable one holds parts: one, or it is torn
    claimed: int | None  # the step that it should hold

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Window":
        """Read what a loop wrote down."""
        lists = ("bare", "before", "ends", "saves", "durable")
        plain: dict[str, Any] = {name: tuple(tuple(each) for each in body[name]) for name in lists}
        plain |= {name: body[name] for name in ("write_s", "copy_s", "claimed")}
        return cls(**plain, holds=tuple(body["holds"]))

    @property
    def bare_step_s(self) -> float:
        """Seconds of a step without checkpoints."""
        return sum(seconds for _, seconds in self.bare) / sum(steps for steps, _ in self.bare)

    @property
    def begin_s(self) -> float:
        """When the window begins: the first save has returned."""
        return self.saves[0][2]

    @property
    def end_s(self) -> float:
        """When it ends: the last save has returned."""
        return self.saves[-1][2]

    @property
    def whole(self) -> bool:
        """Whether what was said to be durable can be read, and is the state after one step."""
        return self.claimed is not None and self.holds == (self.claimed,)

    def seen_durable(self) -> list[int]:
        """Return the steps that became durable, from that which opens the window on; where there is one within it
        at most, those too that became durable after it.
        """
        own = sorted((step, at) for step, at in self.durable if step >= self.saves[0][0])
        within = [step for step, at in own if at <= self.end_s]
        return within if len(within) > 1 else [step for step, _ in own]

    def ages(self) -> tuple[int, float] | None:
        """Return the greatest age at the end of a step in steps, and in seconds; None where nothing was durable."""
        taken = dict(self.before) | {step: begun for step, begun, _ in self.saves}
        oldest: tuple[int, float] | None = None
        for step, end in self.ends:
            newest = max((saved for saved, at in self.durable if at <= end), default=None)
            if newest is None:
                return None
            steps, seconds = step - newest, end - taken[newest]
            oldest = (max(steps, oldest[0]), max(seconds, oldest[1])) if oldest else (steps, seconds)
        return oldest


def slowest(ranks: Sequence[Window]) -> Window:
    """Return one window of a job (rule 4): the loop of the rank that was blocked most, with what all held durable."""
    one = min(ranks, key=_share)
    seen = [dict(window.durable) for window in ranks]
    everywhere = set.intersection(*map(set, seen))
    claims = {window.claimed for window in ranks}
    return replace(
        one,
        durable=tuple(sorted((step, max(each[step] for each in seen)) for step in everywhere)),
        write_s=max(window.write_s for window in ranks),
        copy_s=max(window.copy_s for window in ranks),
        holds=tuple(sorted({step for window in ranks for step in window.holds})) if all(w.holds for w in ranks) else (),
        claimed=None if None in claims else max(claims, key=lambda step: step or 0),
    )


def _share(window: Window) -> float:
    return len(window.ends) * window.bare_step_s / (window.end_s - window.begin_s)


def row(
    mode: str, interval: int, windows: Sequence[Window], outcome: str, left_behind: int = 0, least_write_s: float = 0.0
) -> dict[str, Any]:
    """Return one row as plain values; without a window it has no figures, and `outcome` says why.

    least_write_s: what the store's bandwidth takes for the state. A throttle lets a little through at once when it has
        idled, as it has before a save alone and has not between saves that follow one another.
    """
    named = {"mode": mode, "interval": interval, "outcome": outcome, "left_behind": left_behind}
    return named | (_figures(interval, windows, least_write_s) if windows else dict.fromkeys(_FIGURES))


_FIGURES = (
    "windows", "steps", "saves", "wall_s", "step_s", "blocked_s", "in_save_s", "efficiency", "efficiencies", "write_s",
    "copy_s", "interval_s", "durable", "achieved", "age_steps", "age_s", "age_budget_s", "whole", "holds",
)  # fmt: skip


def _figures(interval: int, windows: Sequence[Window], least_write_s: float) -> dict[str, Any]:
    steps = [len(w.ends) for w in windows]
    walls = [w.end_s - w.begin_s for w in windows]
    free = [count * w.bare_step_s for count, w in zip(steps, windows, strict=True)]
    ages = [age for w in windows if (age := w.ages()) is not None]
    gaps = [later - former for w in windows for former, later in itertools.pairwise(w.seen_durable())]
    interval_s = interval * sum(walls) / sum(steps)
    write_s = max(least_write_s, statistics.median(w.write_s for w in windows))
    torn = next((w for w in windows if not w.whole), None)
    return {
        "windows": len(windows),
        "steps": sum(steps),
        "saves": sum(len(w.saves) - 1 for w in windows),
        "wall_s": sum(walls),
        "step_s": sum(free) / sum(steps),
        "blocked_s": sum(walls) - sum(free),
        "in_save_s": sum(end - begun for w in windows for _, begun, end in w.saves[1:]),
        "efficiency": sum(free) / sum(walls),
        "efficiencies": [one / wall for one, wall in zip(free, walls, strict=True)],
        "write_s": write_s,
        "copy_s": statistics.median(w.copy_s for w in windows),
        "interval_s": interval_s,
        "durable": sum(len(w.seen_durable()) for w in windows),
        "achieved": statistics.fmean(gaps) if gaps else None,
        "age_steps": max(steps for steps, _ in ages) if len(ages) == len(windows) else None,
        "age_s": max(seconds for _, seconds in ages) if len(ages) == len(windows) else None,
        "age_budget_s": WRITES * write_s + interval_s,
        "whole": torn is None,
        "holds": None if torn is None else _holds(torn),
    }


def _holds(torn: Window) -> str:
    if torn.claimed is None:
        return "nothing was durable"
    if not torn.holds:
        return f"step {torn.claimed} was said to be durable and cannot be read"
    found = " and ".join(map(str, dict.fromkeys((min(torn.holds), max(torn.holds)))))
    return f"the checkpoint of step {torn.claimed} holds state of step {found}"


def verdict(found: Mapping[str, Any], device: str = "cpu") -> tuple[bool, str] | None:
    """Judge a row by DESIGN's budget; None for modes that none is promised for."""
    if found["mode"] not in JUDGED:
        return None
    if found["efficiency"] is None:
        return False, f"no figure: {found['outcome']}"
    promised = SHARE if device != "cpu" else 1 - found["copy_s"] / (found["interval"] * found["step_s"]) - SLACK
    wrong: list[str] = []
    if found["efficiency"] < promised:
        wrong.append(f"{found['efficiency']:.2%} of the time, promised {promised:.2%}")
    if found["age_s"] is None:
        wrong.append("nothing was durable")
    elif found["age_s"] > found["age_budget_s"]:
        wrong.append(f"the newest durable one {found['age_s']:.2f} s old, promised {found['age_budget_s']:.2f}")
    if not found["whole"]:
        wrong.append(found["holds"])
    kept = f"{found['efficiency']:.2%} (at least {promised:.2%}), at most {_seconds(found['age_s'])} old"
    return not wrong, "; ".join(wrong) or f"{kept} ({found['age_budget_s']:.2f})"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def stretch(state: int, bandwidth: int | None, step_s: float, given: float | None = None) -> tuple[float, float]:
    """Return for how many seconds a loop is measured with checkpoints, at least, and without, each time.

    Four writes at the least: two fill what is under way, and the age comes to its greatest at the end of the second.
    """
    with_s = given if given is not None else max(2.0, 20 * step_s, 4 * state / bandwidth if bandwidth else 0.0)
    return with_s, max(min(1.0, with_s), 10 * step_s, with_s / 6)


def estimate(modes: int, intervals: Sequence[int], rounds: int, step_s: float, state: int, bandwidth: int | None,
             given: float | None = None, ranks: int = 1) -> float:  # fmt: skip
    """Return about how many seconds a benchmark takes, a start of four seconds for each loop's rank included."""
    with_s, bare_s = stretch(state, bandwidth, step_s, given)
    write_s = state / bandwidth if bandwidth else 0.1
    each = [max(with_s, every * step_s) + min(write_s, every * step_s) + 3 * bare_s + 4 * write_s + 4.0 * ranks
            for every in intervals]  # fmt: skip
    return modes * rounds * math.fsum(each)


def word(mode: str, text: str) -> str:
    """Say in a few words why a loop came to no figure; `text` is the last that it wrote of an error."""
    if mode == NVRX_MODE and re.search(r"CUDA|NVIDIA driver", text):
        return "needs CUDA"
    return text[:160] or "it ended without a word"
