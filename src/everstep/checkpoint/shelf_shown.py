"""What an operator sees of the memory tier of this node."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from everstep.checkpoint.core.plan import MEMORY
from everstep.checkpoint.segments import SegmentSet


def rows(sets: Iterable[SegmentSet]) -> list[dict[str, Any]]:
    """Return the newest step of which all ranks here have a snapshot, by what they have written at its head."""
    newest: defaultdict[int, int] = defaultdict(int)
    taken = 0
    for each in sets:
        taken += each.bytes
        for segment in each.segments.values():
            newest[each.rank] = max(newest[each.rank], segment.step_hint())
    step = min(newest.values(), default=0)
    return [{"tier": MEMORY, "what": "kept", "step": step, "bytes": taken}] if step else []
