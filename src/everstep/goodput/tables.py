"""The report as tables in a terminal."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from everstep.events import Category
from everstep.goodput.core import words
from everstep.goodput.core.accounting import Ledger
from everstep.goodput.core.axis import to_s
from everstep.goodput.core.comparable import verdict
from everstep.goodput.core.recoveries import Recovery
from everstep.goodput.core.tiers import Tier

PARTS = ("detect_s", "stop_s", "regroup_s", "rebuild_s", "restore_s", "redo_s", "new_step_s")
RANKS_SHOWN = 64
PADDING = 3


def tables(ledger: Ledger, name: str, width: int) -> RenderableType:
    """Return everything that a terminal of `width` columns shows of a run."""
    return Group(*_sections(ledger, name, width))


def _sections(ledger: Ledger, name: str, width: int) -> Iterator[RenderableType]:
    yield _headline(ledger, name)
    if ledger.recoveries:
        yield from _faults(ledger, width)
    else:
        yield Text("no fault was recorded\n")
    yield from _seconds(ledger, width)
    for spare in ledger.spares:
        took = f", then rank {spare.took[0]}" if spare.took else ""
        yield Text(f"apart: {spare.name} stood ready for {words.seconds(to_s(spare.end - spare.start))}{took}", "dim")
    if ledger.tiers:
        yield from _tiers(ledger, width)
    for text in ledger.notes:
        yield Text(f"note: {text}", style="dim")
    if ledger.not_comparable:
        yield Text(f"note: {verdict(ledger.not_comparable)}")
    if ledger.errors:
        yield Text(f"\nThe ledger does not close: {words.count(len(ledger.errors), 'error')}", style="bold red")
        for text in ledger.errors[:20]:
            yield Text(f"  {text}", style="red")


def _grid(title: str, rows: Sequence[Sequence[str]], width: int, *, strong: int = -1) -> Iterator[RenderableType]:
    """A table of `rows`, heads first; turned, and in pieces, where the terminal is too narrow for it."""
    if sum(_breadths(list(zip(*rows, strict=True)))) <= width and strong >= 0:
        yield _drawn(title, rows, strong)
        return
    heads, *body = rows
    room = 0
    piece: list[Sequence[str]] = []
    for row, breadth in zip(body, _breadths(body), strict=True):
        if piece and room + breadth > width:
            yield _drawn(title, list(zip(heads, *piece, strict=True)), -1)
            piece = []
        room = breadth + (room if piece else _breadths([heads])[0])
        piece.append(row)
    yield _drawn(title, list(zip(heads, *piece, strict=True)), -1)


def _breadths(columns: Sequence[Sequence[str]]) -> list[int]:
    """What each column needs, with the space around it."""
    return [max(len(text) for text in column) + PADDING for column in columns]


def _drawn(title: str, rows: Sequence[Sequence[str]], strong: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for position, head in enumerate(rows[0]):
        style = "bold" if position == strong else ""
        table.add_column(head, justify="right" if position else "left", no_wrap=True, style=style)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _headline(ledger: Ledger, name: str) -> RenderableType:
    figures = ledger.figures
    opened = ledger.story.sessions[0].opened
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(style="bold", justify="right", no_wrap=True)
    grid.add_column(style="dim")
    world = f"{words.count(opened.world_size, 'rank')}, {words.count(opened.spares, 'spare')}"
    efficiency = "1 - time blocked by snapshots and checkpoints / wall"
    grid.add_row("wall time", words.seconds(figures.wall_s), f"{world}: {' '.join(opened.argv)}")
    grid.add_row("steps", words.maybe(figures.steps), words.not_kept(figures))
    grid.add_row("fault-free step", words.seconds(figures.step_s), figures.step_source)
    grid.add_row("training goodput", words.share(figures.training_goodput), "retained steps x fault-free step / wall")
    grid.add_row("infra goodput", words.share(figures.infra_goodput), "wall without detection, stop, regroup, start-up")
    grid.add_row("checkpoint efficiency", words.share(figures.checkpoint_efficiency), efficiency)
    return Group(Text(name, style="bold"), grid, Text())


def _faults(ledger: Ledger, width: int) -> Iterator[RenderableType]:
    """One line a fault; the parts of its recovery add up to it."""
    parts = [part.removesuffix("_s").replace("_", " ") for part in PARTS]
    heads = [
        "fault",
        "step",
        "rank",
        "type",
        "noticed by",
        *parts,
        "recovery",
        "excess",
        "steps lost",
        "state from",
        "held by",
    ]
    rows = [heads]
    for number, row in enumerate(ledger.recoveries, 1):
        rows.append([
            f"#{number}", words.maybe(row.step), words.maybe(row.rank), row.type, row.noticed_by,
            *(words.seconds(getattr(row, part)) for part in PARTS),
            words.seconds(row.recovery_s), words.seconds(excess(row, ledger.figures.step_s)),
            words.maybe(row.steps_lost), words.maybe(row.restored_from), words.taken_by(row),
        ])  # fmt: skip
    yield from _grid("faults", rows, width, strong=heads.index("recovery"))


def excess(row: Recovery, step_s: float | None) -> float | None:
    """A recovery less the fault-free step that it ends with (EXPERIMENTS L4)."""
    return None if row.recovery_s is None or step_s is None else max(0.0, row.recovery_s - step_s)


def _seconds(ledger: Ledger, width: int) -> Iterator[RenderableType]:
    """Ranks across, categories down: each column adds up to the wall time under it."""
    owned = [c for c in Category if any(c in r.seconds for r in ledger.ranks)]
    holes = any(r.unplaced_s for r in ledger.ranks)
    whole = sum(r.wall_s for r in ledger.ranks) or 1.0
    rows = [["seconds", *(c.value for c in owned), *(["cannot be placed"] if holes else []), "wall time"]]
    for rank in ledger.ranks[:RANKS_SHOWN]:
        cells = [f"{rank.seconds.get(c, 0.0):.3f}" for c in owned]
        cells += [f"{rank.unplaced_s:.3f}"] if holes else []
        rows.append([f"rank {rank.rank}", *cells, f"{rank.wall_s:.3f}"])
    shares = [words.share(sum(r.seconds.get(c, 0.0) for r in ledger.ranks) / whole) for c in owned]
    shares += [words.share(sum(r.unplaced_s for r in ledger.ranks) / whole)] if holes else []
    rows.append(["all ranks", *shares, words.share(1.0)])
    yield from _grid("seconds by rank", rows, width)


def _tiers(ledger: Ledger, width: int) -> Iterator[RenderableType]:
    heads = [
        "tier", "taken", "coalesced", "committed", "failed", "interval", "in time", "one took", "written", "newest",
        "its age", "oldest",
    ]  # fmt: skip
    rows = [heads, *(_tier(tier) for tier in ledger.tiers)]
    yield from _grid("checkpoints", rows, width, strong=0)
    efficiency = words.share(ledger.figures.checkpoint_efficiency)
    yield Text(f"checkpoint efficiency {efficiency} with {words.quoted(ledger.tiers)}", style="dim")


def _tier(tier: Tier) -> list[str]:
    return [
        tier.name, *(str(n) for n in (tier.taken, tier.coalesced, tier.committed, tier.failed)),
        words.steps(tier.interval_steps), words.seconds(tier.interval_s), words.seconds(tier.save_s),
        words.size(tier.bytes), words.maybe(tier.newest_step), words.seconds(tier.age_s), words.seconds(tier.oldest_s),
    ]  # fmt: skip
