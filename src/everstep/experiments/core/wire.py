"""An assignment as it goes over the store: at most 40 bytes a rank, read once per node (EXPERIMENTS P13).

Ranks stand in order; a node is named once and its processes by their place in that list; what is usual (a process
that was kept) is not said. Facts stay with the planner. Hundreds of nodes read the same value at the same moment from
one host, so it is compressed: a tenth of the bytes for a thousandth of a second.
"""

import json
import zlib
from typing import Any

from everstep.recovery.core.words import Incarnation, Member, Roster

USUAL = (False, "kept")
FAST = 1


def pack(roster: Roster) -> bytes:
    """Return the wire form of a roster."""
    nodes: dict[tuple[str, str], int] = {}
    members: list[list[int]] = []
    unusual: list[list[Any]] = []
    for member in roster.members:
        who = member.incarnation
        at = nodes.setdefault((member.node, who.boot_id), len(nodes))
        members.append([at, who.pid, who.start, member.slot])
        if (member.fresh, member.why) != USUAL:
            unusual.append([member.rank, member.fresh, member.why])
    body = {
        "v": 1, "epoch": roster.epoch, "generation": roster.generation, "nodes": list(nodes), "members": members,
        "unusual": unusual, "standby": [str(i) for i in roster.standby], "reason": roster.reason,
        "shortfall": roster.shortfall,
    }  # fmt: skip
    return zlib.compress(json.dumps(body, separators=(",", ":")).encode(), FAST)


def unpack(value: bytes) -> Roster:
    """Read what `pack` wrote."""
    body = json.loads(zlib.decompress(value))
    nodes = body["nodes"]
    unusual = {rank: (fresh, why) for rank, fresh, why in body["unusual"]}
    members = tuple(
        Member(rank, Incarnation(nodes[at][1], pid, start), nodes[at][0], slot, *unusual.get(rank, USUAL))
        for rank, (at, pid, start, slot) in enumerate(body["members"])
    )
    standby = tuple(Incarnation.parse(text) for text in body["standby"])
    return Roster(body["epoch"], body["generation"], members, standby, body["reason"], body["shortfall"])
