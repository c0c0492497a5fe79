"""The geometry of the report's pictures: what to draw where, in percent of the run's time.

Rule 1: nothing that a fault caused is merged away, however short; it is drawn at least a hair wide.
Rule 2: what the loop does is merged where it is too short to see: neighbours become one block that says what is in it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from everstep.events import Category
from everstep.goodput.core.accounting import Loss
from everstep.goodput.core.axis import to_s
from everstep.goodput.core.lanes import LOOP, Interval
from everstep.goodput.core.words import seconds

BLOCKS = 160  # a merged block is at most this part of the run
HAIR = 1200  # shorter than this part of the run cannot be seen
POINTS = 1600
MERGED = (Category.STEP, Category.LOST)


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of time that a picture shows."""

    start: int
    end: int

    def percent(self, at: int) -> float:
        """Where a moment lies."""
        span = max(1, self.end - self.start)
        return round(100 * (at - self.start) / span, 4)


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of one lane."""

    x: float
    width: float
    css: str
    title: str


def css_name(category: Category | None) -> str:
    """The class that gives a category its colour."""
    return "c-" + (category.name.lower().replace("_", "-") if category is not None else "unplaced")


def bars(intervals: Sequence[Interval], window: Window, merge: bool = True) -> list[Bar]:
    """Return the bars of one lane, in order of time."""
    inside = [p for p in intervals if p.end > window.start and p.start < window.end]
    hair = (window.end - window.start) / HAIR if merge else 0
    longest = (window.end - window.start) / BLOCKS
    out: list[Bar] = []
    block: list[Interval] = []
    for part in inside:
        if not (merge and _small(part, hair)):
            out += _block(block, window)
            block = []
            out.append(_bar(part.start, part.end, part.category, _title(part, window), window))
            continue
        if block and (part.end - block[0].start > longest or not _joins(block, part)):
            out += _block(block, window)
            block = []
        block.append(part)
    return out + _block(block, window)


def _small(part: Interval, hair: float) -> bool:
    return part.category in MERGED or (part.category in LOOP and part.end - part.start < hair)


def _joins(block: Sequence[Interval], part: Interval) -> bool:
    """Lost work and steps that stand never share a block."""
    kinds = {p.category for p in (*block, part)} & set(MERGED)
    return part.start == block[-1].end and len(kinds) < len(MERGED)


def _bar(start: int, end: int, category: Category | None, title: str, window: Window) -> Bar:
    x = max(0.0, window.percent(start))
    return Bar(x, round(min(100.0, window.percent(end)) - x, 4), css_name(category), title)


def _title(part: Interval, window: Window) -> str:
    name = part.category.value if part.category is not None else "cannot be placed"
    step = f" · step {part.step}" if part.step is not None else ""
    text = f" · {part.text}" if part.text else ""
    return f"{name} {seconds(to_s(part.end - part.start))}{step} · at {seconds(to_s(part.start - window.start))}{text}"


def _block(block: Sequence[Interval], window: Window) -> list[Bar]:
    if not block:
        return []
    sums: dict[Category, int] = {}
    for part in block:
        if part.category is not None:
            sums[part.category] = sums.get(part.category, 0) + part.end - part.start
    whole = sum(sums.values()) or 1
    steps = [p.step for p in block if p.step is not None]
    which = "" if not steps else f"step {steps[0]}: " if steps[0] == steps[-1] else f"steps {steps[0]}–{steps[-1]}: "
    said = ", ".join(f"{c.value} {100 * s / whole:.1f} %" for c, s in sorted(sums.items(), key=lambda i: -i[1]))
    title = f"{which}{said} · at {seconds(to_s(block[0].start - window.start))}"
    return [_bar(block[0].start, block[-1].end, max(sums, key=lambda c: sums[c]), title, window)]


# ------------------------------------------------------------------------------------------------ axes


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


# ------------------------------------------------------------------------------------------------ loss


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart of the loss in a box of 1000 x 1000 units, y downwards."""

    stands: list[str]  # path data
    undone: list[str]
    points: list[tuple[float, int, float, int]]  # percent of time, step, value, stands
    low: float
    high: float

    def y_percent(self, value: float) -> float:
        """Where a value lies, from the top."""
        return round(100 * (self.high - value) / ((self.high - self.low) or 1), 3)


def curve(losses: Sequence[Loss], window: Window) -> Curve | None:
    """Return the loss over wall time: what stands, and apart from it what a rollback undid. None without numbers."""
    finite = thinned([p for p in losses if math.isfinite(p.value)])
    if not finite:
        return None
    low, high = min(p.value for p in finite), max(p.value for p in finite)
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    shape = Curve([], [], [], low - pad, high + pad)
    for run in _stretches(finite):
        path = "M" + "L".join(f"{window.percent(p.at) * 10:.1f} {shape.y_percent(p.value) * 10:.1f}" for p in run)
        (shape.stands if run[-1].stands else shape.undone).append(path)
    shape.points.extend((round(window.percent(p.at), 2), p.step, p.value, int(p.stands)) for p in finite)
    return shape


def thinned(losses: Sequence[Loss], limit: int = POINTS) -> list[Loss]:
    """Keep the highest and the lowest of each stretch, and every point next to a change."""
    if len(losses) <= limit:
        return list(losses)
    stride = math.ceil(len(losses) / (limit / 2))
    keep = {0, len(losses) - 1}
    for start in range(0, len(losses), stride):
        part = range(start, min(start + stride, len(losses)))
        keep |= {min(part, key=lambda i: losses[i].value), max(part, key=lambda i: losses[i].value)}
    for i, (a, b) in enumerate(pairwise(losses)):
        if (a.generation, a.stands) != (b.generation, b.stands):
            keep |= {i, i + 1}
    return [losses[i] for i in sorted(keep)]


def _stretches(points: Iterable[Loss]) -> list[list[Loss]]:
    """Cut where a generation ends, and where what stands ends; the latter two stretches share a point."""
    runs: list[list[Loss]] = []
    for point in points:
        last = runs[-1][-1] if runs else None
        if last is None or last.generation != point.generation:
            runs.append([point])
        elif last.stands != point.stands:
            runs.append([last, point])
        else:
            runs[-1].append(point)
    return runs
