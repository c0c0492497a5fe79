"""What the protocol's words become in the ledger."""

from collections.abc import Mapping
from typing import Any

from everstep.events import FaultNoticed, GenerationStarted
from everstep.recovery.core import words


def fault(known: words.Fault, mark_s: float | None) -> FaultNoticed:
    """A fault, with the last sign of progress of its rank; the first line of its text is for people, then a stack."""
    text, _, stack = known.text.partition("\n")
    return FaultNoticed(
        number=known.generation, kind=known.kind, noticed_by=known.noticed_by, injured_rank=known.rank,
        injured_slot=known.rank, step=known.step, text=text, last_mark_s=mark_s, stack=stack,
    )  # fmt: skip


def generation(
    roster: words.Roster, told: Mapping[int, Mapping[str, Any]], node: str = "", allowed: int | None = None
) -> GenerationStarted:
    """A roster that is entered on `node`, and where its state comes from: as rank 0 was told, for all are told alike.

    `allowed`: so many restarts of the job in all; None: no count.
    Where ranks of one step go to tiers of their own (memory, a copy on another node), the furthest is the world's.
    """
    snapshot = told.get(0, {}).get("snapshot") or {}
    restore = snapshot.get("world") or snapshot.get("restore") or {}
    return GenerationStarted(
        epoch=roster.epoch, number=roster.generation, world_size=roster.world_size,
        members=tuple((m.rank, m.rank, m.incarnation.pid, m.why) for m in roster.members),
        restore_step=restore.get("step"), restored_from=restore.get("tier"), reason=roster.reason,
        decided=snapshot.get("decided", True), node=node, nodes=tuple(m.node for m in roster.members), allowed=allowed,
    )  # fmt: skip
