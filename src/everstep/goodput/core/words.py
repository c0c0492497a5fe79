"""How figures are put to people: the same in the terminal, on the page and in the line of a fault."""

from collections.abc import Sequence

from everstep.goodput.core.figures import Figures
from everstep.goodput.core.recoveries import Recovery
from everstep.goodput.core.tiers import Tier

NONE = "–"
TAKEN_BY = {"kept": "same process", "spare": "a spare", "started": "a new process", "shrunk": "nobody"}
MINUTE_S = 60
MS_BELOW_S = 1.0
FINE_BELOW_S = 10.0
KIB = 1024


def seconds(value: float | None) -> str:
    """12 ms, 1.68 s, 36.4 s, 12 min 04 s."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if value < MS_BELOW_S:
        return f"{value * 1e3:.1f} ms" if value * 1e3 < FINE_BELOW_S else f"{value * 1e3:.0f} ms"
    if value < MINUTE_S:
        return f"{value:.2f} s" if value < FINE_BELOW_S else f"{value:.1f} s"
    return f"{int(value // MINUTE_S)} min {int(value % MINUTE_S):02d} s"


def share(value: float | None) -> str:
    """97.31 %."""
    return NONE if value is None else f"{value:.2%}".replace("%", "\N{NO-BREAK SPACE}%")


def size(value: float) -> str:
    """1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < KIB:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= KIB
    return f"{value:.1f} TiB"


def count(number: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def steps(value: float | None) -> str:
    """1 step, 12.5 steps."""
    return NONE if value is None else f"{value:.1f} steps" if value % 1 else count(int(value), "step")


def quoted(tiers: Sequence[Tier]) -> str:
    """What efficiency is never told without: how often each tier saved, and how old its newest state is."""
    told = [
        f"{tier.name}: every {steps(tier.interval_steps)}, step {maybe(tier.newest_step)}, {seconds(tier.age_s)} old"
        if tier.interval_steps is not None
        else f"{tier.name}: {count(tier.committed, 'save')}, step {maybe(tier.newest_step)}, {seconds(tier.age_s)} old"
        for tier in tiers
    ]
    return "; ".join(told) or "no tier that saved anything"


def not_kept(figures: Figures) -> str:
    """3 steps done and not kept; unknown of a script without the library."""
    if figures.steps is None:
        return "unknown: the script does not use the library"
    return count(figures.executions - figures.steps, "step") + " done and not kept"


def taken_by(recovery: Recovery) -> str:
    """Who holds the injured rank after the fault."""
    return TAKEN_BY.get(recovery.took_over, NONE)


def maybe(value: float | int | str | None) -> str:
    """The value, or a dash."""
    return NONE if value is None else str(value)
