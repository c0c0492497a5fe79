"""The agent's side of its porter: what is on its way between this node and others, and what became of it.

Rule 1: every transfer ends by one call, with the reason where it came to nothing: a porter that dies takes all that was
under way with it, and another takes its place.
Rule 2: a ticket is drawn here, for one transfer, and given to the one node that is to use it.
Rule 3: a transfer that nobody has begun in time is given up. One that has begun is the porter's to judge.
Rule 4: memory that is being received into is free again when the porter has said so, or is gone: never before.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint.carrying import SOURCES
from everstep.checkpoint.core.copies import Place
from everstep.checkpoint.segments import Segment
from everstep.recovery.api import Child, Host, Message

ENTRY = "everstep.checkpoint.porter:main"
DEATHS_IN_A_ROW = 3
BEGIN_S = 30.0
TICKET_BYTES = 32

Expected = Callable[["Ticket"], None]
"""Called once, when whoever has the ticket may come."""


@dataclass(frozen=True, slots=True)
class End:
    """What became of a transfer."""

    why: str = ""  # it came to nothing
    bytes: int = 0  # that went over the line, where it has arrived
    again: bool = False  # a line or a porter failed, and nothing is known against the copy


Done = Callable[[End], None]
"""Called once."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What lets another node send to us, once."""

    secret: str
    host: str
    port: int

    def to_row(self) -> list[Any]:
        """Return what is told to that node."""
        return [self.secret, self.host, self.port]


@dataclass(slots=True)
class _Under:
    """One transfer."""

    done: Done
    ticket: Ticket | None = None
    expected: Expected | None = None
    due_s: float | None = None  # the other side must have begun by then


class Carrier:
    """One per node. `opened` is called when the porter can be reached: again when another has taken its place."""

    def __init__(self, host: Host, opened: Callable[[], None], lost: Callable[[str], None]) -> None:
        self._host, self._opened, self._lost = host, opened, lost
        self._address = ""
        self._child: Child | None = None
        self._port = 0
        self._under: dict[str, _Under] = {}
        self._count = 0
        self._deaths = 0
        self._closed = False

    @property
    def ready(self) -> bool:
        """True when others can send to us."""
        return self._port != 0

    @property
    def given_up(self) -> bool:
        """True when porters die whatever is done."""
        return self._deaths >= DEATHS_IN_A_ROW

    def begin(self, address: str) -> None:
        """Have a porter that is reached at this address."""
        if self._child is None and not self.given_up and not self._closed:
            self._address = address
            self._child = self._host.spawn("porter", ENTRY, {"address": address})

    def expect(self, segment: Segment, expected: Expected, done: Done, sources: Sequence[int] = ()) -> str:
        """Receive into a buffer, from whoever shows the ticket; return the transfer's name.

        The ticket is handed out when the porter knows it. ValueError where there is no porter.
        `sources`: snapshots here that may hold parts of it, by descriptor; what is overwritten meanwhile does no harm.
        """
        if self._child is None or not self.ready:
            raise ValueError("no porter is there to receive it")
        name = self._begun(done, self._host.clock.now() + BEGIN_S)
        secret = secrets.token_hex(TICKET_BYTES)
        self._under[name].ticket = Ticket(secret, self._address, self._port)
        self._under[name].expected = expected
        self._child.send({"kind": "expect", "transfer": name, "ticket": secret}, [segment.fd, *sources[:SOURCES]])
        return name

    def forget(self, transfer: str) -> None:
        """Nobody shall come any more. Its end is told as every other: the memory is not free before."""
        if self._child is not None and transfer in self._under:
            self._child.send({"kind": "forget", "transfer": transfer})

    def send(self, fd: int, place: Place, ticket: tuple[str, str, int], done: Done) -> None:
        """Send a buffer that is held until `done`."""
        if self._child is None:
            done(End("no porter is there to send it", again=True))
            return
        secret, host, port = ticket
        what = {"rank": place.rank, "step": place.step, "epoch": place.epoch, "generation": place.generation}
        where = {"ticket": secret, "host": host, "port": port}
        self._child.send({"kind": "send", "transfer": self._begun(done, None), **where, **what}, [fd])

    def _begun(self, done: Done, due_s: float | None) -> str:
        self._count += 1
        name = str(self._count)
        self._under[name] = _Under(done, due_s=due_s)
        if due_s is not None:
            self._host.later(BEGIN_S)
        return name

    def on_tick(self, now: float) -> None:
        """Time has passed: who has not come is not awaited."""
        for name, under in self._under.items():
            if under.due_s is not None and now >= under.due_s:
                under.due_s = None
                self.forget(name)

    def on_message(self, child: Child, message: Message) -> None:
        """The porter speaks."""
        if child is not self._child:
            return
        kind, name = message["kind"], str(message.get("transfer", ""))
        if kind == "door":
            self._port = int(message["port"])
            self._opened()
        elif kind == "expecting" and name in self._under:
            under = self._under[name]
            if under.expected is not None and under.ticket is not None:
                under.expected(under.ticket)
        elif kind == "begun" and name in self._under:
            self._under[name].due_s = None
        elif kind in ("received", "sent"):
            self._deaths = 0
            self._end(name, End(bytes=int(message["bytes"])))
        elif kind == "refused":
            self._end(name, End(str(message["text"]), again=bool(message["again"])))

    def on_exit(self, child: Child, status: int) -> bool:
        """A helper is gone; False where it is not our porter."""
        if child is not self._child:
            return False
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        text = f"the porter of this node ended by {how}"
        self._child, self._port = None, 0
        self._deaths += 1
        under, self._under = self._under, {}
        for each in under.values():
            each.done(End(text, again=True))
        if self.given_up:
            self._lost(f"{text}, {DEATHS_IN_A_ROW} times in a row; it is not begun again: no copies from here on")
        else:
            self._lost(f"{text}; another takes its place")
            self.begin(self._address)
        return True

    def _end(self, name: str, end: End) -> None:
        under = self._under.pop(name, None)
        if under is not None:
            under.done(end)

    def close(self) -> None:
        """The job is over; the porter ends with its line."""
        self._closed = True
        self._under.clear()
