"""What a node does as a keeper of other nodes' snapshots: makes places, takes copies in, and knows which save counts.

Rule 1: what was told of copies when a generation ended stays true until the next has its plan: nothing takes their
place meanwhile (EXPERIMENTS M11).
Rule 2: an order of a generation that we have not heard of yet waits for it; one of another that is over is nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from everstep.checkpoint.carrier import Carrier, End, Ticket
from everstep.checkpoint.core.copies import Copy, Place, Version, version_of
from everstep.checkpoint.core.plan import Branch, living
from everstep.checkpoint.fetching import Say
from everstep.checkpoint.replicas import Replicas, Slot
from everstep.errors import MemoryShortage
from everstep.recovery.api import Message, NodeHost

SLICE = 64 << 20
MOST_EARLY = 65536


class Standing(Protocol):
    """What is asked of the shelf: who stands where in the present generation."""

    @property
    def homes(self) -> Mapping[int, str]:
        """See `NodeShelf.homes`."""
        ...

    @property
    def leader(self) -> str:
        """See `NodeShelf.leader`."""
        ...

    @property
    def branches(self) -> Sequence[Branch]:
        """See `NodeShelf.branches`."""
        ...

    @property
    def bytes(self) -> int:
        """See `NodeShelf.bytes`."""
        ...


class Keeping:
    """Of one node."""

    def __init__(
        self,
        host: NodeHost,
        carrier: Carrier,
        say: Say,
        shelf: Standing,
        kept: Replicas,
        staged: Callable[[str, int], list[int]],
    ) -> None:
        """`staged`: see `Sending.staged`: of what a copy has in common with snapshots here nothing is sent."""
        self._host, self._carrier, self._say, self._shelf, self.kept = host, carrier, say, shelf, kept
        self._staged = staged
        self.counted: Version | None = None
        self._unready: set[int] = set()  # ranks whose places are being allocated
        self._coming: dict[tuple[str, int], tuple[Slot, str]] = {}
        self._early: list[tuple[str, Message]] = []
        self._frozen = False

    def _lineage(self) -> list[int]:
        branches = self._shelf.branches
        return [branches[-1].epoch, branches[-1].generation] if branches else []

    # generations

    def told(self) -> Sequence[Copy]:
        """Say what is whole here; it stays so until `begin`."""
        self._frozen = True
        return self.kept.copies(self._host.clock.now())

    def begin(self, branches: Sequence[Branch], counted: Version | None) -> None:
        """A generation has its plan: what is not on the line that leads to it is void, and so much counts."""
        self._frozen = False
        self.kept.keep_only(lambda copy: living(copy.snapshot, branches))
        self.counted = counted
        early, self._early = self._early, []
        for node, message in early:
            self.on_keep(node, message)

    def give_up(self, token: str | None = None) -> None:
        """What is coming for this save (None: for any) is not wanted any more."""
        for (save, _), (_, transfer) in list(self._coming.items()):
            if token in (None, save):
                self._carrier.forget(transfer)

    def counts(self, version: Version | None, mine: Sequence[int]) -> None:
        """A save counts everywhere: who has no part in it here, and is none of these ranks, is kept elsewhere."""
        self.counted = version
        part = {c.snapshot.rank for c in self.kept.copies(0.0) if c.version == version}
        self.kept.let_go([rank for rank in self.kept.ranks if rank not in mine and rank not in part])

    # places

    def on_keep(self, node: str, message: Message) -> None:
        """A node wants its rank's snapshots kept here."""
        rank, needed, generation = int(message["rank"]), int(message["bytes"]), list(message["roster"])
        if generation > self._lineage() or self._frozen:
            self._early = [*self._early[-MOST_EARLY:], (node, message)]
            return
        if generation != self._lineage() or self._shelf.homes.get(rank) != node or needed < 1:
            return
        why = self.kept.want(rank, needed, self._shelf.bytes)
        if why:
            self._refuse(why)
            return
        self._unready.add(rank)
        self.allocate()

    def allocate(self) -> None:
        """Allocate a slice where there is something to allocate, and say what is there by now."""
        if not self._unready:
            return
        try:
            done = self.kept.allocate(SLICE)
        except MemoryShortage as error:
            self.shed(str(error))
            return
        for rank in [rank for rank in sorted(self._unready) if self.kept.ready(rank)]:
            self._unready.discard(rank)
            body = {"kind": "peer.ready", "roster": self._lineage(), "rank": rank}
            self._say(self._shelf.leader, body)
        if not done:
            self._host.later(0.0)

    def shed(self, why: str) -> bool:
        """Let go of everything; False where there was nothing."""
        had = bool(self.kept.bytes)
        self.kept.let_go(self.kept.ranks)
        self._unready.clear()
        if had:
            self._refuse(why)
        return had

    def _refuse(self, why: str) -> None:
        self._say(self._shelf.leader, {"kind": "peer.no", "roster": self._lineage(), "text": why})

    # copies

    def on_offer(self, node: str, message: Message) -> None:
        """A rank's snapshot is to be had: make room, and say how it may come."""
        rank, step, epoch, generation = map(int, message["what"])
        token, counted = str(message["save"]), version_of(message["counted"])
        present = [epoch, generation] == self._lineage() and not self._frozen
        if not present or self._shelf.homes.get(rank) != node or (token, rank) in self._coming:
            return
        if counted is not None:
            self.counted = max(counted, self.counted or counted)
        slot = self.kept.place(rank, int(message["bytes"]), self.counted) if self._carrier.ready else None
        if slot is None:
            text = "there is no place for it" if self._carrier.ready else "no porter is there to receive it"
            self._say(node, {"kind": "peer.declined", "save": token, "rank": rank, "text": text})
            return
        what = Place(self._host.node, True, rank, slot.number, step, epoch, generation)

        def expected(ticket: Ticket) -> None:
            body = {"kind": "peer.come", "save": token, "what": message["what"], "ticket": ticket.to_row()}
            self._say(node, body)

        def received(end: End) -> None:
            self._received(token, what, end)

        sources = self._staged(token, rank)
        transfer = self._carrier.expect(slot.segment, expected, received, sources)
        self._coming[token, rank] = slot, transfer

    def _received(self, token: str, what: Place, end: End) -> None:
        slot, _ = self._coming.pop((token, what.rank))
        why = end.why
        if why:
            self.kept.dropped(slot)
        else:
            why = self.kept.received(slot, self._host.node, what, self._host.clock.now())
        body: dict[str, Any] = {"save": token, "rank": what.rank}
        if why:
            self._say(self._shelf.leader, {"kind": "peer.refused", **body, "text": why})
        else:
            self._say(self._shelf.leader, {"kind": "peer.kept", **body, "bytes": end.bytes})

    def close(self) -> None:
        """The job is over."""
        self.kept.close()
