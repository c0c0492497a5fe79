"""What a node does for its own ranks' copies: hands on intents, holds what is staged, offers and sends it.

Rule 1: a buffer is held while it is staged, while a porter reads it, and as its rank's part of the save that counts.
Rule 2: an intent that is said again is answered again: what was said may have been lost.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from everstep.checkpoint.carrier import Carrier, End
from everstep.checkpoint.core.copies import Place, version_of
from everstep.checkpoint.core.placement import Placement
from everstep.checkpoint.fetching import Say
from everstep.checkpoint.node_shelf import NodeShelf
from everstep.checkpoint.source import Source
from everstep.recovery.api import Message, NodeHost

NONE = (-1, -1, -1)


class Sending:
    """Of one node. `holds`: the peer tier's share of the shelf."""

    def __init__(self, host: NodeHost, carrier: Carrier, say: Say, shelf: NodeShelf, holds: Source) -> None:
        self._host, self._carrier, self._say, self._shelf, self._holds = host, carrier, say, shelf, holds
        self._intent = ""
        self._version = NONE  # of the save that is intended
        self._staged: dict[int, int] = {}
        self._pinned: dict[int, int] = {}  # rank → its buffer of the save that counts
        self._open: dict[int, set[str]] = {}  # rank → keepers that have not answered
        self._active: Counter[tuple[int, int]] = Counter()  # copies of a rank's buffer that the porter sends

    def on_intent(self, node: str, message: Message) -> None:
        """All ranks are to stage a step: hand it on to those here. What became of the last save is said with it."""
        if node != self._shelf.leader:
            return
        if message["save"] == self._intent:  # said again: perhaps what we said was lost
            for rank in self._staged:
                self._say(node, {"kind": "peer.staged", "save": self._intent, "rank": rank})
            return
        if self._intent:
            self.ended(self._intent, committed=version_of(message["counted"]) == self._version)
        epoch, generation = message["lineage"]
        self._intent, self._version = str(message["save"]), (int(message["step"]), int(epoch), int(generation))
        for rank in self._shelf.here:
            self._host.send(rank, {"kind": "peer.intent", "save": self._intent, "step": int(message["step"])})

    def on_message(self, rank: int, message: Message) -> None:
        """A rank here says `staged` or `late`."""
        token, verb = message["save"], message["kind"].partition(".")[2]
        if verb == "late":
            body = {"kind": "peer.late", "save": token, "rank": rank, "step": int(message["step"])}
            self._say(self._shelf.leader, body)
        elif verb == "staged" and (token != self._intent or rank in self._staged):
            self._holds.release(rank, message["buffer"], message["hold"])  # it came after the save was given up
            self._say(self._shelf.leader, {"kind": "peer.refused", "save": token, "rank": rank, "text": "too late"})
        elif verb == "staged":
            self._holds.hold(rank, message["buffer"], message["hold"])
            self._staged[rank] = message["buffer"]
            self._say(self._shelf.leader, {"kind": "peer.staged", "save": token, "rank": rank})

    def on_go(self, node: str, message: Message, placement: Placement, sizes: Mapping[int, int]) -> None:
        """All have staged: offer what those here have to its keepers."""
        token = str(message["save"])
        if node != self._shelf.leader or token != self._intent:
            return
        epoch, generation = message["lineage"]
        for rank in list(self._staged):
            keepers = placement.get(rank, ())
            self._open[rank] = set(keepers)
            body = {"kind": "peer.offer", "save": token, "counted": message["counted"], "bytes": sizes[rank]}
            for keeper in keepers:
                self._say(keeper, {**body, "what": [rank, int(message["step"]), int(epoch), int(generation)]})

    def on_come(self, node: str, message: Message) -> None:
        """A keeper has room: send."""
        rank, step, epoch, generation = map(int, message["what"])
        secret, host, port = message["ticket"]
        if message["save"] != self._intent or node not in self._open.get(rank, ()):
            return
        place = Place(self._host.node, False, rank, self._staged[rank], step, epoch, generation)
        buffer = self._staged[rank]
        self._active[rank, buffer] += 1

        def done(end: End) -> None:
            self._active[rank, buffer] -= 1
            self._answered(node, rank, str(message["save"]), end.why)
            self._free(rank, buffer)

        self._carrier.send(self._holds.fd(rank, buffer), place, (str(secret), str(host), int(port)), done)

    def on_declined(self, node: str, message: Message) -> None:
        """A keeper has none."""
        if message["save"] == self._intent:
            self._answered(node, int(message["rank"]), self._intent, str(message["text"]))

    def staged(self, token: str, beside: int) -> list[int]:
        """Return what ranks here have staged for a save, by descriptor, first that of the rank with the place here that
        rank `beside` has where it stands: of those that are divided alike over nodes it is the replica.
        """
        if token != self._intent:
            return []
        homes = self._shelf.homes
        place = sorted(rank for rank, node in homes.items() if node == homes.get(beside)).index(beside)
        here = sorted(self._shelf.here)
        order = sorted(self._staged, key=lambda rank: (here.index(rank) != place, rank))
        return [self._holds.fd(rank, self._staged[rank]) for rank in order]

    def _answered(self, node: str, rank: int, token: str, why: str) -> None:
        if token == self._intent:
            self._open.get(rank, set()).discard(node)
        if why:
            self._say(self._shelf.leader, {"kind": "peer.refused", "save": token, "rank": rank, "text": why})

    def _free(self, rank: int, buffer: int) -> None:
        """Let a buffer go where nothing is made of it any more, and nobody reads it."""
        in_use = self._staged.get(rank) == buffer or self._pinned.get(rank) == buffer or self._active[rank, buffer]
        if not in_use:
            self._holds.release(rank, buffer)

    def give_up(self) -> None:
        """Its save has ended: nothing more is sent for it; what the porter sends is held until it is done."""
        self._intent = ""
        self._open.clear()
        staged, self._staged = self._staged, {}
        for rank, buffer in staged.items():
            self._free(rank, buffer)

    def _keep(self, pinned: dict[int, int]) -> None:
        """These are the ranks' own parts of the save that counts."""
        before, self._pinned = self._pinned, pinned
        for rank, buffer in before.items():
            self._free(rank, buffer)

    def pin(self) -> None:
        """A generation begins: what counts is agreed upon, and every rank here keeps its own part of it."""
        wanted = self._own_parts(self._shelf.here)
        for rank, buffer in wanted.items():
            self._holds.hold(rank, buffer)
        self._keep(wanted)

    def pin_late(self, rank: int) -> None:
        """What came from another node is there when its rank has its buffers."""
        if rank not in self._pinned:
            for buffer in self._own_parts([rank]).values():
                self._holds.hold(rank, buffer)
                self._pinned[rank] = buffer

    def _own_parts(self, ranks: Sequence[int]) -> dict[int, int]:
        counted = self._shelf.counted
        return {s.rank: s.buffer for s in self._shelf.sealed()
                if s.rank in ranks and (s.step, s.epoch, s.generation) == counted}  # fmt: skip

    def ended(self, token: str, *, committed: bool) -> None:
        """A save has come to its end everywhere."""
        if token != self._intent:
            return
        if committed:
            staged, self._staged = self._staged, {}
            self._keep(staged)
        self.give_up()
        for rank in () if committed else self._shelf.here:
            self._host.send(rank, {"kind": "peer.void", "save": token})
