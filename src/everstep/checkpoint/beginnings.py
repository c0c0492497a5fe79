"""What the ranks of one node among several begin from: had here, wherever it lies, and kept while it is needed.

Rule 1: a copy that cannot be fetched, or does not match its checksum, is struck out by whoever found it, and the
generation ends by that rank's error: the next plan does without it (M11).
Rule 2: buffers of a rank that stands elsewhere now are kept while a plan names them, and no longer. What a world of
another size goes on from is kept on every node until all nodes have said that their ranks have sealed their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.checkpoint.core.copies import Copy, Place
from everstep.checkpoint.core.plan import MEMORY
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.lending import Lender
from everstep.checkpoint.segments import Segment, SegmentSet
from everstep.checkpoint.shelf import Ask, Shelf
from everstep.checkpoint.tier_settings import PEER
from everstep.events import Notice, TierEvent
from everstep.recovery.api import Message, NodeHost
from everstep.recovery.core.words import Roster

Id = tuple[int, int]
"""Epoch and generation of a roster."""


class Beginnings(Shelf):
    """The part of a node's memory tier that has what a plan names, and tells each rank what is its own."""

    lender: Lender | None = None

    def __init__(self, **settings: Any) -> None:
        """`settings`: of the shelf."""
        super().__init__(**settings)
        self.sized: Callable[[int, int], None] = lambda rank, size: None
        """Called with a rank that stands here and the size of its buffers, when it has asked for them."""
        self._several = False  # there are, or were, other nodes
        self._roster: Roster | None = None
        self._bad: set[Place] = set()
        self._told_ranks: dict[int, Message] = {}
        self._failed: dict[int, str] = {}
        self._lent = 0
        self._origins: dict[tuple[int, int], Place] = {}  # of buffers that came from elsewhere
        self._settled_on: dict[Id, set[str]] = {}  # nodes whose ranks need nothing of the other world any more
        self._from_peers = False  # some rank of the present roster begins from a replica

    # where ranks stand

    @property
    def homes(self) -> Mapping[int, str]:
        """Rank → the node where it stands in the present roster."""
        return {m.rank: m.node for m in self._roster.members} if self._roster is not None else {}

    @property
    def here(self) -> Sequence[int]:
        """The ranks that stand on this node."""
        return [rank for rank, node in self.homes.items() if not self._several or node == self._node]

    @property
    def _node_host(self) -> NodeHost:
        host: NodeHost = self._host  # type: ignore[assignment]  # see `start`
        return host

    @property
    def _node(self) -> str:
        return self._node_host.node

    def _tell(self, node: str, message: Message) -> None:
        self._node_host.tell(node, message)

    def _ranks_here(self) -> Sequence[int]:
        return self.here if self._several else super()._ranks_here()

    # what a rank begins from

    def _have(self, copy: Copy, other: bool) -> None:
        """Have one source here, then tell whose it is."""
        roster = self._roster

        def done(found: Segment | str) -> None:
            if roster is not self._roster:  # the generation has ended meanwhile
                if isinstance(found, Segment):
                    found.close()
                return
            if isinstance(found, str):
                self._lost(copy, found)
            else:
                self._source(copy, self._adopt(copy, found), other)
            self._proceed()

        if copy.node == self._node and not copy.replica:
            self._source(copy, copy.snapshot.buffer, other)
        elif self.lender is None:
            done("nobody carries copies between the nodes of this job")
        elif copy.node == self._node:
            done(self.lender.take(copy.place) or "it is not here any more")
        else:
            self.lender.fetch(copy, done)

    def _source(self, copy: Copy, buffer: int, other: bool) -> None:
        plan, rank = self.plan, copy.snapshot.rank
        assert plan is not None, "sources are a plan's"
        if other:
            self._begun_from[rank] = buffer
            if len(self._begun_from) == plan.saved_by:
                self._tell_those_here(
                    {"step": plan.step, "tier": MEMORY, "saved_by": plan.saved_by, **self._furthest(self._from_peers)}
                )
            return
        source = {"step": plan.step, "tier": MEMORY, "buffer": buffer, **self._furthest(copy.replica)}
        self._tell_rank(rank, source)

    def _furthest(self, replica: bool) -> Message:
        """What a rank says of the tier that it begins from, where that is not its own memory."""
        return {"from": PEER} if replica else {}

    def _tell_those_here(self, source: Message | None = None) -> None:
        """All ranks here begin alike: from a slower tier, a world of another size, or the beginning."""
        plan = self.plan
        assert plan is not None, "called when it is known"
        if plan.committed is not None:
            source = {"step": plan.step, "tier": plan.tier, **plan.committed.where}
        for rank in self.here:
            self._tell_rank(rank, source)

    def _tell_rank(self, rank: int, source: Message | None) -> None:
        plan, roster = self.plan, self._roster
        assert plan is not None, "called when it is known"
        assert roster is not None, "a plan is for a roster"
        lineage = [roster.epoch, roster.generation, plan.parent]
        told = {"lineage": lineage, "reason": plan.reason, "unfit": plan.unfit, "restore": source}
        self._told_ranks[rank] = {**told, "held": sorted(self.held(rank))}

    def _lost(self, copy: Copy, why: str) -> None:
        """A copy cannot be had: it is struck out, and the rank that waits for it says so."""
        rank, step = copy.snapshot.rank, copy.snapshot.step
        self._bad.add(copy.place)
        kind = "the copy" if copy.replica else "the snapshot"
        text = f"{kind} of rank {rank}'s step {step} that node {copy.node} has cannot be had: {why}"
        self._host.emit(TierEvent(tier=PEER, what="damaged", step=step, text=text))
        self._host.emit(Notice(text=f"{text}. It is struck out; the next best is taken", level="error"))
        for waiting in self.here if rank not in self.here else [rank]:
            self._failed[waiting] = text

    def _adopt(self, copy: Copy, segment: Segment) -> int:
        """A copy that came from elsewhere is a buffer of its rank until that has filled buffers of its own.

        Its set comes before all others (a worker writes into its newest set), so its number is below theirs.
        """
        rank = copy.snapshot.rank
        self._lent += 1
        number = self._next_buffer[rank]
        self._next_buffer[rank] += 1
        adopted = SegmentSet.of(-self._lent, rank, {number: segment})
        self._sets = {adopted.number: adopted, **self._sets}
        self._origins[rank, number] = copy.place
        self.changed()
        return number

    def _strike(self, rank: int, message: Message) -> None:
        """See `Shelf._strike`; a copy that came from elsewhere is struck out there as well."""
        super()._strike(rank, message)
        if not self._several or message.get("tier", MEMORY) != MEMORY:
            return
        header = self.header(rank, message["buffer"])
        if isinstance(header, Header):
            what = header.step, header.epoch, header.generation
            self._bad.add(Place(self._node, False, rank, message["buffer"], *what))
        origin = self._origins.get((rank, message["buffer"]))
        if origin is not None:
            self._bad.add(origin)

    def _beside(self, rank: int) -> Message:
        return {"told": self._told_ranks[rank]} if rank in self._told_ranks else {}

    def _answer(self, ask: Ask) -> bool:
        if self._several and ask.rank in self._failed:
            self._host.send(ask.rank, {"kind": "snapshot.lost_copy", "ask": ask.number, "text": self._failed[ask.rank]})
            return True
        if self._several and ask.rank not in self._told_ranks:
            return False  # the plan, or the copy that it names, is not here yet
        answered = super()._answer(ask)
        if answered:
            self.sized(ask.rank, self._of(ask.rank)[-1].size)
        return answered

    # a world of another size

    def _settled(self, rank: int) -> None:
        """See `Shelf._settled`: other nodes may still be fetching what lies here."""
        if not self._several:
            super()._settled(rank)
            return
        roster = self._roster
        self._unsettled.discard(rank)
        if roster is None or self._unsettled or not self._begun_from:
            return
        for node in set(self.homes.values()) - {self._node}:
            self._tell(node, {"kind": "snapshot.settled", "roster": [roster.epoch, roster.generation]})
        self._hear_settled(self._node, (roster.epoch, roster.generation))

    def _hear_settled(self, node: str, of: Id) -> None:
        """A node needs nothing of the other world any more. When that is true of all, it may go."""
        roster = self._roster
        self._settled_on.setdefault(of, set()).add(node)
        if (
            roster is None
            or not self._begun_from
            or set(self.homes.values()) - self._settled_on.get((roster.epoch, roster.generation), set())
        ):
            return
        begun_from, self._begun_from = self._begun_from, {}
        for source, buffer in begun_from.items():
            if source in self.here and buffer not in self.held(source):
                self._send_released(source, buffer)
        self._let_go_of_those_elsewhere(set())

    def adopted(self, place: Place) -> int | None:
        """Return the descriptor of a replica that lay here and became a buffer; None where it is no more."""
        for (rank, number), origin in self._origins.items():
            header = self.header(rank, number) if origin == place and self._has(rank, number) else ""
            if isinstance(header, Header) and (header.step, header.epoch, header.generation) == place.version:
                return self.fd(rank, number)
        return None

    def _has(self, rank: int, number: int) -> bool:
        return any(number in each.segments for each in self._of(rank))

    def _let_go_of_those_elsewhere(self, needed: set[tuple[int, int]]) -> None:
        here = set(self.here)
        for each in self._sets.values():
            lent = any((each.rank, buffer) in needed for buffer in each.segments)
            each.retired = each.retired or (each.rank not in here and not lent)
        self._forget_retired()
