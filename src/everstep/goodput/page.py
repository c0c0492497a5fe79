"""The report as one self-contained HTML page: no script, style, font or picture from anywhere else.

The template draws; this module says what. All positions are percent of the run's time, so the page fits any width.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from everstep.events import Category
from everstep.goodput.core import words
from everstep.goodput.core.accounting import Ledger, RankTime
from everstep.goodput.core.axis import NS, to_s
from everstep.goodput.core.lanes import Lane
from everstep.goodput.core.recoveries import Recovery
from everstep.goodput.core.saws import saw
from everstep.goodput.core.shapes import Bar, Window, bars, css_name, curve, ticks

CLOSE_UP_RANKS = 8
TIMELINE_RANKS = 64
PARTS = (
    ("detect", "detect_s", Category.DETECTION),
    ("stop", "stop_s", Category.STOP),
    ("regroup", "regroup_s", Category.REGROUP),
    ("rebuild", "rebuild_s", Category.REBUILD),
    ("restore", "restore_s", Category.RESTORE),
    ("redo", "redo_s", Category.LOST),
    ("new step", "new_step_s", Category.STEP),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One lane of a timeline: bars, and the moments at which another process took the rank."""

    label: str
    bars: list[Bar]
    swaps: list[tuple[float, str]]
    hurt: list[tuple[float, str]]
    spare: bool = False


def render(ledger: Ledger, name: str) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("everstep.goodput", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "s": words.seconds,
        "share": words.share,
        "size": words.size,
        "maybe": words.maybe,
        "steps": words.steps,
    }
    return environment.get_template("report.html.j2").render(_context(ledger, name))


def _context(ledger: Ledger, name: str) -> dict[str, Any]:
    window = Window(ledger.start, ledger.end)
    opened = ledger.story.sessions[0].opened
    return {
        "name": name,
        "ledger": ledger,
        "figures": ledger.figures,
        "opened": opened,
        **_facts(ledger),
        "cards": _cards(ledger),
        "faults": [_fault(i, r, ledger, window) for i, r in enumerate(ledger.recoveries, 1)],
        "parts": [(label, css_name(category)) for label, _, category in PARTS],
        "loss": _loss(ledger, window),
        "rows": _rows(ledger, window),
        "hidden": max(0, len(ledger.lanes) - TIMELINE_RANKS),
        "time_ticks": _time_ticks(window, 0, 6),
        "categories": _categories(ledger),
        "shares": [(r, _stack(r)) for r in ledger.ranks],
        "tiers": [(tier, saw(tier, window, ledger.story.sessions)) for tier in ledger.tiers],
        "quoted": words.quoted(ledger.tiers),
        "css_name": css_name,
    }


def _facts(ledger: Ledger) -> dict[str, Any]:
    story = ledger.story
    opened = story.sessions[0].opened
    closed = story.sessions[-1].closed
    started = datetime.fromtimestamp(story.sessions[0].wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    world = f"{words.count(opened.world_size, 'rank')} on {words.count(opened.nodes, 'node')}, "
    world += words.count(opened.spares, "warm spare")
    ended = f"exit code {closed.code}" if closed else "not over, or its agent was killed"
    facts = [
        ("job", opened.job),
        ("command", " ".join(opened.argv)),
        ("started", started),
        ("world", world),
        ("generations", str(len(story.generations))),
        ("ended", f"{ended}: {closed.reason}" if closed else ended),
    ]
    if len(story.sessions) > 1:
        facts.append(("sessions", f"{len(story.sessions)}; the time between them is nobody's"))
    if story.axis.bound_s:
        facts.append(("clocks", f"figures across boots may be off by {words.seconds(story.axis.bound_s)}"))
    return {"facts": facts, "world": world, "started": started, "ended": ended}


def _cards(ledger: Ledger) -> list[tuple[str, str, str]]:
    figures, rows = ledger.figures, ledger.recoveries
    survived = [r for r in rows if r.recovery_s is not None]
    times = [r.recovery_s for r in survived if r.recovery_s is not None]
    lost = "steps lost unknown" if figures.steps is None else f"{sum(r.steps_lost or 0 for r in rows)} steps lost"
    back = "fault to new start" if figures.steps is None else "fault to end of first new step"
    return [
        ("training goodput", words.share(figures.training_goodput), "retained steps × fault-free step ÷ wall"),
        ("infra goodput", words.share(figures.infra_goodput), "wall without detection, stop, regroup, start-up"),
        ("faults survived", f"{len(survived)} of {len(rows)}" if rows else "none", lost),
        ("recovery, median", words.seconds(median(times)) if times else words.NONE, back),
        ("steps", words.maybe(figures.steps), f"{words.seconds(figures.step_s)} each; {words.not_kept(figures)}"),
        ("wall time", words.seconds(figures.wall_s), f"checkpoints blocked {_blocked(ledger)}"),
    ]


def _blocked(ledger: Ledger) -> str:
    efficiency = ledger.figures.checkpoint_efficiency
    return words.share(None if efficiency is None else 1 - efficiency)


# ------------------------------------------------------------------------------------------------ timeline


def _rows(ledger: Ledger, window: Window) -> list[Row]:
    rows = [
        Row(f"rank {lane.rank}", bars(lane.intervals, window), _swaps(lane, window), _hurt(ledger, lane, window))
        for lane in ledger.lanes[:TIMELINE_RANKS]
    ]
    for spare in ledger.spares:
        after = f", then rank {spare.took[0]} from generation {spare.took[1]} on" if spare.took else ""
        title = f"{spare.name} (process {spare.pid}) idle for {words.seconds(to_s(spare.end - spare.start))}{after}"
        x = window.percent(spare.start)
        bar = Bar(x, round(window.percent(spare.end) - x, 4), css_name(Category.IDLE_SPARE), title)
        rows.append(Row(spare.name, [bar], [], [], spare=True))
    return rows


def _swaps(lane: Lane, window: Window) -> list[tuple[float, str]]:
    return [
        (window.percent(at), f"process {seat.pid} ({words.TAKEN_BY.get(seat.why, seat.why)}) took rank {lane.rank}")
        for at, seat in lane.holders[1:]
        if window.start <= at <= window.end
    ]


def _hurt(ledger: Ledger, lane: Lane, window: Window) -> list[tuple[float, str]]:
    return [
        (window.percent(r.instant), f"fault {i}: {r.type} in step {words.maybe(r.step)}")
        for i, r in enumerate(ledger.recoveries, 1)
        if r.rank == lane.rank and window.start <= r.instant <= window.end
    ]


def _time_ticks(window: Window, zero: int, wanted: int) -> list[tuple[float, str]]:
    """Marks of a time axis that counts from `zero` (0: from the window's start)."""
    zero = zero or window.start
    marks = ticks(to_s(window.start - zero), to_s(window.end - zero), wanted)
    small = to_s(window.end - window.start) < 1
    return [(window.percent(round(m * NS) + zero), f"{m * 1e3:g} ms" if small else f"{m:g} s") for m in marks]


# ------------------------------------------------------------------------------------------------ faults


def _fault(number: int, recovery: Recovery, ledger: Ledger, window: Window) -> dict[str, Any]:
    step_s = ledger.figures.step_s
    excess = None if recovery.recovery_s is None or step_s is None else max(0.0, recovery.recovery_s - step_s)
    return {
        "number": number,
        "row": recovery,
        "x": window.percent(recovery.instant),
        "at": to_s(recovery.instant - window.start),
        "excess": excess,
        "taken_by": words.taken_by(recovery),
        "parts": [(label, getattr(recovery, key), css_name(category)) for label, key, category in PARTS],
        "close_up": _close_up(recovery, ledger),
    }


def _close_up(recovery: Recovery, ledger: Ledger) -> dict[str, Any]:
    """The way back of one fault, every interval of it, with a little before and after."""
    end = recovery.recovered if recovery.recovered is not None else min(recovery.noticed + NS, ledger.end)
    span = max(end - recovery.instant, 1000)
    window = Window(max(ledger.start, recovery.instant - span // 5), min(ledger.end, end + span // 10))
    chosen = sorted(ledger.lanes, key=lambda lane: (lane.rank != recovery.rank, lane.rank))[:CLOSE_UP_RANKS]
    rows = [
        Row(f"rank {lane.rank}", bars(lane.intervals, window, merge=False), _swaps(lane, window), [])
        for lane in sorted(chosen, key=lambda lane: lane.rank)
    ]
    return {
        "rows": rows,
        "ticks": _time_ticks(window, recovery.instant, 5),
        "instant": window.percent(recovery.instant),
        "noticed": window.percent(recovery.noticed),
        "recovered": None if recovery.recovered is None else window.percent(recovery.recovered),
        "hidden": max(0, len(ledger.lanes) - CLOSE_UP_RANKS),
    }


# ------------------------------------------------------------------------------------------------ loss, shares


def _loss(ledger: Ledger, window: Window) -> dict[str, Any] | None:
    shape = curve(ledger.losses, window)
    if shape is None:
        return None
    return {
        "name": ledger.loss_name,
        "shape": shape,
        "ticks": [(shape.y_percent(v), f"{v:g}") for v in ticks(shape.low, shape.high, 4)],
        "points": json.dumps(shape.points, separators=(",", ":")),
        "wall_s": to_s(window.end - window.start),
        "undone": sum(not p.stands for p in ledger.losses),
    }


def _categories(ledger: Ledger) -> list[tuple[Category | None, str, float]]:
    """Every category that owns time, with its share of all ranks' time."""
    whole = sum(r.wall_s for r in ledger.ranks) or 1.0
    sums: list[tuple[Category | None, str, float]] = []
    for category in Category:
        owned = sum(r.seconds.get(category, 0.0) for r in ledger.ranks)
        if owned:
            sums.append((category, category.value, owned / whole))
    unplaced = sum(r.unplaced_s for r in ledger.ranks)
    return [*sums, (None, "cannot be placed", unplaced / whole)] if unplaced else sums


def _stack(time: RankTime) -> Sequence[Bar]:
    """One rank's time as a bar of 100 %."""
    out: list[Bar] = []
    x = 0.0
    parts: list[tuple[Category | None, float]] = [*time.seconds.items()]
    if time.unplaced_s:
        parts.append((None, time.unplaced_s))
    for category, owned in parts:
        width = 100 * owned / (time.wall_s or 1)
        name = category.value if category else "cannot be placed"
        out.append(
            Bar(round(x, 4), round(width, 4), css_name(category), f"{name} {words.seconds(owned)}, {width:.2f} %")
        )
        x += width
    return out
