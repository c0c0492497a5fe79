"""Copies that ranks of this node begin from and that lie on another: asked for, received, and handed over.

Rule 1: what arrives is what was asked for, hashed and compared, or it is not handed over.
Rule 2: every fetch ends by one call: the node that has it goes, or says that it has not, or the porter gives up.
Rule 3: where a line or a porter failed it is asked for again, `TRIES` times in all: that says nothing against the copy,
and whoever strikes it out goes further back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.checkpoint.carrier import Carrier, End, Ticket
from everstep.checkpoint.core.copies import Copy, Place
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.lending import Fetched
from everstep.checkpoint.segments import Segment
from everstep.errors import MemoryShortage
from everstep.recovery.api import Message

TRIES = 3
Say = Callable[[str, Message], None]


@dataclass(eq=False)
class _Fetch:
    copy: Copy
    segment: Segment
    done: Fetched
    transfer: str = ""
    tries: int = 0
    why: str = ""  # better than what the porter can know


class Fetching:
    """Of one node."""

    def __init__(self, carrier: Carrier, say: Say) -> None:
        self._carrier, self._say = carrier, say
        self._under: list[_Fetch] = []

    @property
    def bytes(self) -> int:
        """What is being received, and not handed over yet."""
        return sum(each.segment.size for each in self._under)

    def fetch(self, copy: Copy, done: Fetched) -> None:
        """Have a copy brought here. What it needs is allocated by `allocate`, a slice at a time."""
        place = copy.place
        segment = Segment(f"fetched-{place.rank}-{place.step}", copy.bytes)
        self._under.append(_Fetch(copy, segment, done))

    def allocate(self, at_most: int) -> bool:
        """Allocate a slice, and ask for what has room; True when nothing is left to allocate."""
        for each in list(self._under):
            try:
                at_most -= each.segment.allocate(at_most)
            except MemoryShortage as error:
                self._end(each, str(error))
        self.ask()
        return all(each.segment.ready for each in self._under)

    def ask(self) -> None:
        """Ask for what has room and was not asked for: also when the porter has come."""
        for each in list(self._under):
            if each.segment.ready and not each.transfer and self._carrier.ready:
                self._ask(each)
            elif self._carrier.given_up:
                self._end(each, "no porter is there to receive it")

    def _ask(self, each: _Fetch) -> None:
        def expected(ticket: Ticket) -> None:
            body = {"kind": "peer.fetch", "place": list(each.copy.place), "ticket": ticket.to_row()}
            self._say(each.copy.node, {**body, "transfer": each.transfer})

        each.tries += 1
        each.transfer = self._carrier.expect(each.segment, expected, lambda end: self._arrived(each, end))

    def unfetched(self, node: str, place: Place, transfer: str, end: End) -> None:
        """The node that should have it says why it does not come; `transfer`: which asking it answers."""
        for each in [one for one in self._under if one.copy.place == place and one.copy.node == node]:
            if not end.again:
                self._give_up(each, end.why)
            elif each.transfer == transfer:
                self._carrier.forget(transfer)

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """Who is here now: from nobody else anything comes."""
        for each in list(self._under):
            if each.copy.node not in nodes:
                self._give_up(each, f"node {each.copy.node} is gone")

    def _give_up(self, each: _Fetch, why: str) -> None:
        each.why = each.why or why
        if each.transfer:
            self._carrier.forget(each.transfer)
        else:
            self._end(each, why)

    def _arrived(self, each: _Fetch, end: End) -> None:
        if end.again and not each.why and each.tries < TRIES:
            each.transfer = ""
            each.segment.void()
            self.ask()
            return
        header = each.segment.header() if not end.why else ""
        place = each.copy.place
        if isinstance(header, Header):
            came = (header.rank, header.step, header.epoch, header.generation)
            if came != (place.rank, place.step, place.epoch, place.generation):
                header = f"step {header.step} of rank {header.rank} came instead"
        if isinstance(header, str):
            self._end(each, each.why or end.why or header)
            return
        self._under.remove(each)
        each.done(each.segment)

    def _end(self, each: _Fetch, why: str) -> None:
        if each in self._under:
            self._under.remove(each)
            each.segment.close()
            each.done(why)

    def close(self) -> None:
        """The job is over."""
        for each in self._under:
            each.segment.close()
        self._under.clear()
