"""From whose copies the ranks of several nodes begin: `plan.choose` over the facts of all nodes.

Rule 1: one node decides for all, once for a roster, from what all have told it: what two decide apart may differ, for
a node that goes may have told one of them alone.
Rule 2: a copy counts only while it is whole: a snapshot that is sealed in its own node's memory, or a replica that a
peer has received, hashed and verified.
Rule 3: the newest step first, whoever holds it; then for each rank the nearest copy: its own memory where it stands, a
replica there, its memory elsewhere, a replica elsewhere.
Rule 4: the save of the peer tier that counted last is the newest that anybody knows of: everybody keeps his own part of
it, in his memory and for others, until a newer one counts. A node that goes may leave nothing else in common.
Rule 5: what was struck out (its bytes do not match their checksum, or it could not be fetched) is named by all that
tells it from others, so that what takes its place later is not struck.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from everstep.checkpoint.core.plan import MEMORY, Branch, Committed, Plan, Sealed, choose, living
from everstep.ranks import brief

NO_LIMIT: Mapping[str, int] = {}
_BEGINNING = Plan(None, None, "")

Version = tuple[int, int, int]
"""Step, epoch and generation of a save."""


class Place(NamedTuple):
    """Where one copy lies, and which it is."""

    node: str
    replica: bool
    rank: int
    number: int  # of the buffer, or of the replica, on its node
    step: int
    epoch: int
    generation: int

    @property
    def version(self) -> Version:
        """Which save it belongs to."""
        return self.step, self.epoch, self.generation


@dataclass(frozen=True, slots=True)
class Copy:
    """One whole copy of one rank's snapshot."""

    node: str
    replica: bool
    snapshot: Sealed  # `buffer`: its number on that node
    bytes: int = 0
    age_s: float = 0.0  # since a replica arrived; a snapshot at home is not asked

    @property
    def place(self) -> Place:
        """Which one it is."""
        s = self.snapshot
        return Place(self.node, self.replica, s.rank, s.buffer, s.step, s.epoch, s.generation)

    @property
    def version(self) -> Version:
        """Which save it belongs to."""
        return self.snapshot.step, self.snapshot.epoch, self.snapshot.generation

    def to_row(self) -> list[Any]:
        """Return what is told of it; who tells it is known."""
        s = self.snapshot
        lineage = [s.epoch, s.generation, s.parent, s.world_size]
        return [self.replica, s.rank, s.buffer, s.step, *lineage, self.bytes, self.age_s]

    @classmethod
    def from_row(cls, node: str, row: Sequence[Any]) -> "Copy":
        """Read what `to_row` wrote; ValueError, TypeError for anything else."""
        replica, rank, number, step, epoch, generation, parent, world_size, size, age_s = row
        numbers = [int(n) for n in (rank, number, step, epoch, generation, parent, world_size)]
        return cls(node, bool(replica), Sealed(*numbers), int(size), float(age_s))


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan, and the copy of each rank that it names where it is one in memory."""

    plan: Plan
    sources: Mapping[int, Copy]
    world_size: int
    from_peers: bool = False
    """True where a replica is taken, for whichever rank: `sources` may name those of one node alone."""

    @property
    def resharded(self) -> bool:
        """True where what memory holds was saved by a world of another size than `sources` are for."""
        return self.plan.tier == MEMORY and self.plan.saved_by != self.world_size

    def told_to(self, node: str, homes: Mapping[int, str]) -> dict[str, Any]:
        """Return what a node is told of it: the copies that its ranks take, and those that it is to hand out."""
        plan, committed = self.plan, self.plan.committed
        theirs = [c for r, c in self.sources.items() if self.resharded or homes.get(r) == node]
        lent = [list(c.place) for c in self.sources.values() if c.node == node]
        return {
            "step": plan.step, "tier": plan.tier, "reason": plan.reason, "unfit": plan.unfit,
            "saved_by": plan.saved_by, "sources": [[c.node, *c.to_row()] for c in theirs], "lent": lent,
            "from_peers": self.from_peers,
            "committed": None if committed is None else [dict(committed.where), committed.world_size],
        }  # fmt: skip


def heard(message: Mapping[str, Any], world_size: int) -> tuple[Decision, set[Place]]:
    """Read what `told_to` wrote: the decision, and the places that are to be handed out. Raises for anything else."""
    sources = [Copy.from_row(str(row[0]), row[1:]) for row in message["sources"]]
    step, tier, committed = message["step"], message["tier"], None
    if message["committed"] is not None:
        where, size = message["committed"]
        committed = Committed(int(step), str(tier), where, size)
    plan = Plan(
        step, tier, str(message["reason"]), committed=committed, unfit=str(message["unfit"]),
        saved_by=message["saved_by"],
    )  # fmt: skip
    lent = {Place(*place) for place in message["lent"]}
    return Decision(plan, {c.snapshot.rank: c for c in sources}, world_size, bool(message["from_peers"])), lent


def keepers(copies: Iterable[Copy]) -> dict[int, tuple[str, ...]]:
    """Return who has replicas of whom, as a placement."""
    found: dict[int, dict[str, None]] = {}
    for copy in copies:
        if copy.replica:
            found.setdefault(copy.snapshot.rank, {})[copy.node] = None
    return {rank: tuple(nodes) for rank, nodes in found.items()}


def decide(
    homes: Mapping[int, str],
    copies: Iterable[Copy],
    branches: Sequence[Branch],
    older: Iterable[Committed] = (),
    struck: Set[Place] = frozenset(),
    room: Mapping[str, int] = NO_LIMIT,
) -> Decision:
    """Decide from where the ranks, which stand on the nodes `homes`, begin. Copies in the order of their making.

    State of a world of another size is had whole on every node: what is not there already is fetched, where each has
    `room` for it, in bytes.
    """
    near = sorted((c for c in copies if c.place not in struck), key=lambda c: -_distance(c, homes))
    numbered = [replace(copy.snapshot, buffer=n) for n, copy in enumerate(near)]
    older = list(older)
    plan = choose(len(homes), numbered, branches, older)
    sources = {rank: near[n] for rank, n in sorted(plan.sources.items())}
    crowded = _crowded(sources, homes, room) if plan.saved_by != len(homes) else ""
    if crowded:
        step = plan.step
        plan = choose(len(homes), numbered, branches, older, unable=frozenset({MEMORY}))
        sources = {rank: near[n] for rank, n in sorted(plan.sources.items())}
        plan = replace(plan, reason=f"{plan.reason}; node {crowded} has no room for all of step {step}")
    told = _told(sources, homes)
    plan = replace(plan, reason=f"{plan.reason}; {told}" if told else plan.reason, void=())
    return Decision(plan, sources, len(homes), any(copy.replica for copy in sources.values()))


def _crowded(sources: Mapping[int, Copy], homes: Mapping[int, str], room: Mapping[str, int]) -> str:
    """Return a node that has no room for the copies that it does not have; nothing where all have."""
    for node in sorted(set(homes.values()) & room.keys()):
        if sum(copy.bytes for copy in sources.values() if copy.node != node) > room[node]:
            return node
    return ""


def alive(snapshot: Sealed, branches: Sequence[Branch], plan: Plan = _BEGINNING) -> bool:
    """True where a copy stays of use when a generation begins from `plan`, which comes after `branches`."""
    return snapshot.step <= plan.parent and living(snapshot, branches)


def agreed(counted: Iterable[Version | None], branches: Sequence[Branch]) -> Version | None:
    """Return the save that counts where a generation begins, the last of `branches`; None where none is of use."""
    for step, epoch, generation in sorted({version for version in counted if version is not None}, reverse=True):
        parents = [b.parent for b in branches if (b.epoch, b.generation) == (epoch, generation)]
        if any(living(Sealed(0, 0, step, epoch, generation, parent, 0), branches) for parent in parents):
            return step, epoch, generation
    return None


def version_of(row: Any) -> Version | None:
    """Read a save's name as it was told; ValueError, TypeError for what is none."""
    if row is None:
        return None
    step, epoch, generation = map(int, row)
    return step, epoch, generation


def merged(told: Iterable[Iterable[Sequence[int]]]) -> list[Branch]:
    """Return the generations of which any node knows, in order."""
    known = {(int(epoch), int(generation)): int(parent) for one in told for epoch, generation, parent in one}
    return [Branch(epoch, generation, parent) for (epoch, generation), parent in sorted(known.items())]


def _distance(copy: Copy, homes: Mapping[int, str]) -> int:
    return 2 * (copy.node != homes.get(copy.snapshot.rank)) + copy.replica


def _told(sources: Mapping[int, Copy], homes: Mapping[int, str]) -> str:
    """Say which ranks do not begin from their own memory where they stand, and from whose."""
    groups: dict[tuple[str, bool], list[Copy]] = {}
    for rank, copy in sources.items():
        if copy.replica or copy.node != homes.get(rank):
            groups.setdefault((copy.node, copy.replica), []).append(copy)
    texts: list[str] = []
    for (node, replica), group in groups.items():
        who = f"rank {brief({copy.snapshot.rank for copy in group})}"
        age = max(copy.age_s for copy in group)
        texts.append(f"{who} from the copy that node {node} keeps, {age:.1f} s old" if replica
                     else f"{who} from its own memory, left on node {node}")  # fmt: skip
    return "; ".join(texts)
