"""The picture of a tier: how old its newest state was over the run, and when it saved, failed or left a step out."""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.goodput.core.axis import to_s
from everstep.goodput.core.shapes import Bar, Window
from everstep.goodput.core.story import Session
from everstep.goodput.core.tiers import Saved, Tier
from everstep.goodput.core.words import seconds, size

COLUMNS = 600  # more teeth than these are drawn as the highest in each column
TALL = 1000
BARS = 400
_Tooth = tuple[int, int, int]  # from when to when, and when the state was taken


@dataclass(frozen=True, slots=True)
class Saw:
    """Positions in percent of the run's time; `path` for a box of 1000 by 1000, the greatest age at its top."""

    path: str
    high_s: float
    bars: list[Bar]
    failed: list[tuple[float, str]]
    left_out: list[float]


def saw(tier: Tier, window: Window, sessions: Sequence[Session]) -> Saw | None:
    """Return the picture, or None where nothing was saved and nothing failed."""
    if not tier.saves:
        return None
    teeth = [_teeth(tier.saves, session) for session in sessions]
    high = max((end - taken for some in teeth for _, end, taken in some), default=0)
    saves = [save for save in tier.saves if save.what == "committed"]
    shown = saves if len(saves) <= BARS else []
    return Saw(
        path="".join(_path(_thinned(some, window), window, max(high, 1)) for some in teeth),
        high_s=to_s(high),
        bars=[_bar(save, window) for save in shown],
        failed=[(window.percent(s.ended), f"step {s.step} failed") for s in tier.saves if s.what == "failed"],
        left_out=[window.percent(at) for at in tier.left_out[:BARS]],
    )


def _teeth(saves: Sequence[Saved], session: Session) -> list[_Tooth]:
    inside = [s for s in saves if s.what == "committed" and session.start <= s.ended <= session.end]
    ends = [*(save.ended for save in inside[1:]), session.end]
    return [(save.ended, end, save.taken) for save, end in zip(inside, ends, strict=True)] if inside else []


def _thinned(teeth: Sequence[_Tooth], window: Window) -> list[_Tooth]:
    """At most one tooth a column: the one that came to the greatest age."""
    if len(teeth) <= COLUMNS:
        return list(teeth)
    highest: dict[int, _Tooth] = {}
    for tooth in teeth:
        column = int(window.percent(tooth[1]) * COLUMNS / 100)
        known = highest.get(column)
        if known is None or tooth[1] - tooth[2] > known[1] - known[2]:
            highest[column] = tooth
    return list(highest.values())


def _path(teeth: Sequence[_Tooth], window: Window, high: int) -> str:
    points = [(at, taken) for begin, end, taken in teeth for at in (begin, end)]
    drawn = (f"{window.percent(at) * TALL / 100:.1f} {TALL * (1 - (at - taken) / high):.1f}" for at, taken in points)
    path = "L".join(drawn)
    return f"M{path}" if path else ""


def _bar(save: Saved, window: Window) -> Bar:
    x = max(0.0, window.percent(save.taken))
    title = f"step {save.step} · {size(save.bytes)} in {seconds(save.seconds)}"
    return Bar(x, round(min(100.0, window.percent(save.ended)) - x, 4), "c-snapshot", title)
