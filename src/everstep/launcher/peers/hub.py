"""The hub: where the watchers of one job meet, say their facts, and hear everybody's in one order.

Rank 0's process starts it as a process of its own, so that rank 0's death takes nothing away. It ends by itself when
nobody is connected any more. It also keeps the store that process groups meet on, and judges silence, since a hang is a
property of the world (H1).

    watcher → hub:  join, fact (with a key: only the first one counts), view (its rank's page, once a second), bye
    hub → watcher:  joined, refused, fact, probe, condemn, beat

usage: python -m everstep.launcher.peers.hub LINK_FD (then one packet: job, world_size, bind, advertise, settings;
front: the launcher's port, or 0; store: the port of one in rank 0's process)
"""

import contextlib
import functools
import itertools
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from everstep.clock import SYSTEM
from everstep.launcher.peers.core.books import BEAT_S, Books
from everstep.launcher.peers.core.judge import Judge
from everstep.launcher.peers.store import StoreKeeper
from everstep.launcher.peers.stream import Stream
from everstep.process.detach import detach
from everstep.process.loop import Loop
from everstep.ranks import brief
from everstep.recovery.link import Link, LinkClosed
from everstep.telemetry import say

LOOK_S = 0.5
SAY_MISSING_S = 15.0
_LOSSES = ("gone", "Died", "Wedged")


class Hub:
    """One job's meeting place."""

    def __init__(self, loop: Loop, order: Mapping[str, Any], doors: list[socket.socket], starter: Link) -> None:
        self._loop, self._order = loop, order
        self._books = Books(order["job"], order["world_size"])
        self._judge = Judge.of(order["settings"])
        self._numbers = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._first = ""  # the incarnation of rank 0
        self._held: list[Mapping[str, Any]] = []  # rosters that wait for the store
        self._untold: deque[Mapping[str, Any]] = deque()
        self._tells = False
        self._doors, self._starter = doors, starter
        self._started_s, self._said_missing, self._starter_here = loop.clock.now(), False, True
        self._store = StoreKeeper(loop, order["bind"], order["store"], self._release, self._no_store)
        for door in doors:
            loop.watch(door.fileno(), functools.partial(self._accept, door))
        loop.watch(starter.fileno(), self._starter_gone)

    def run(self) -> None:
        """Serve until nobody is here any more."""
        if self._books.world_size > 1:
            self._store.start()
        self._look()
        self._loop.run()
        self._store.close()

    # -- connections ---------------------------------------------------------------------------------------------

    def _accept(self, door: socket.socket) -> None:
        with contextlib.suppress(OSError):
            line, _ = door.accept()
            number = next(self._numbers)
            self._streams[number] = Stream(
                self._loop, line, lambda message: self._heard(number, message), lambda: self._ended(number)
            )

    def _heard(self, number: int, message: Mapping[str, Any]) -> None:
        """Whatever comes may come from anybody who reaches the port: what cannot be read ends its connection alone."""
        try:
            self._take(number, message)
        except (KeyError, TypeError, ValueError, AttributeError):
            if number in self._streams:
                self._drop(number)
                self._ended(number)

    def _take(self, number: int, message: Mapping[str, Any]) -> None:
        self._books.heard(number, self._loop.clock.now())
        kind = message.get("kind")
        if number not in self._books.peers:
            self._join(number, message)
        elif kind == "fact":
            self._say(message["fact"], message.get("key"))
        elif kind == "view":
            self._judge.take(message, self._loop.clock.now())
        elif kind == "bye":
            self._books.leave(number)
            self._drop(number)
            self._end_if_deserted()

    def _join(self, number: int, told: Mapping[str, Any]) -> None:
        stream = self._streams[number]
        refusal = self._books.join(number, told, self._loop.clock.now())
        if refusal:
            stream.send({"kind": "refused", "text": refusal})
            self._drop(number)
            return
        if told["rank"] == 0:
            self._first = told["incarnation"]
        stream.send({"kind": "joined", "settings": self._order["settings"]})
        for fact in self._books.facts:
            stream.send({"kind": "fact", "fact": fact})
        if self._books.complete:
            self._books.facts.clear()
            self._close_front()

    def _close_front(self) -> None:
        """All are here: the launcher's port is the script's own again."""
        for door in self._doors:
            self._loop.unwatch(door.fileno())
            door.close()
        self._doors.clear()

    def _drop(self, number: int) -> None:
        self._streams.pop(number).close()

    def _ended(self, number: int) -> None:
        """The connection is gone, and with it the rank: its watcher ends its worker, or has died with it."""
        self._streams.pop(number, None)
        peer = self._books.lose(number)
        if peer is not None:
            self._say({"is": "gone", "incarnation": peer.incarnation}, None)
        self._end_if_deserted()

    # -- facts ---------------------------------------------------------------------------------------------------

    def _say(self, fact: Mapping[str, Any], key: str | None) -> None:
        if not self._books.say(fact, key):
            return
        if fact["is"] in _LOSSES and fact["incarnation"] == self._first:
            self._store.forget_given()
        if fact["is"] == "Faulted":
            self._store.suspect(str(fact["fault"]["text"]))
        if fact["is"] == "Published" and fact["roster"]["members"]:
            self._held.append(fact)
            self._release()
            return
        self._tell(fact)

    def _release(self) -> None:
        """A roster is known with the store its members meet on, and not before."""
        while self._held and (port := self._store.port()) is not None:
            fact = self._held.pop(0)
            self._tell({**fact, "store": [self._order["advertise"], port]})
            self._store.forget(fact["roster"]["epoch"], fact["roster"]["generation"])

    def _tell(self, fact: Mapping[str, Any]) -> None:
        """One fact after another: to tell one may show that somebody is gone, which is a fact itself."""
        self._untold.append(fact)
        if self._tells:
            return
        self._tells = True
        try:
            while self._untold:
                one = self._untold.popleft()
                self._judge.hear(one)
                self._to_all({"kind": "fact", "fact": one})
        finally:
            self._tells = False

    def _to_all(self, message: Mapping[str, Any]) -> None:
        for number in list(self._books.peers):
            if number in self._streams:  # it may have ended while others were told
                self._streams[number].send(message)

    def _no_store(self, text: str) -> None:
        self._tell({"is": "EndRequested", "code": 1, "reason": text})

    # -- time ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = self._loop.clock.now()
        for number in self._books.look(now):
            self._drop(number)
            self._ended(number)
        for message, rank in self._judge.look(now):
            self._send(rank, message)
        self._to_all({"kind": "beat"})
        self._say_who_is_missing(now)
        self._end_if_deserted()
        self._loop.later(min(LOOK_S, BEAT_S), self._look)

    def _send(self, rank: int, message: Mapping[str, Any]) -> None:
        for number, peer in list(self._books.peers.items()):
            if peer.rank == rank:
                self._streams[number].send(message)

    def _say_who_is_missing(self, now: float) -> None:
        if not self._books.complete and not self._said_missing and now - self._started_s > SAY_MISSING_S:
            self._said_missing = True
            size = self._books.world_size
            say(f"still waiting for ranks {brief(self._books.missing)} of {size} to come to the wrapped function")

    def _starter_gone(self) -> None:
        """Rank 0's process lets go of us: from here on we live for as long as somebody is connected."""
        try:
            self._starter.receive()
        except (LinkClosed, ValueError):
            self._loop.unwatch(self._starter.fileno())
            self._starter_here = False
            self._end_if_deserted()

    def _end_if_deserted(self) -> None:
        if not self._books.peers and (self._books.complete or not self._starter_here):
            self._loop.stop()


def open_doors(order: Mapping[str, Any]) -> list[socket.socket]:
    """Listen at the launcher's port, where one is given, and at one of our own. Raises OSError.

    `front` is left to the script as soon as all have joined; connections made there stay.
    """
    ports = [0, order["front"]] if order["front"] else [0]
    return [socket.create_server((order["bind"], port), backlog=2048) for port in ports]


def main(argv: list[str]) -> int:
    """Serve one job."""
    starter = Link.from_fd(int(argv[0]))
    detach()
    order, _ = starter.receive()
    try:
        doors = open_doors(order)
    except OSError as error:
        starter.send({"kind": "hub.failed", "errno": error.errno or 0, "text": error.strerror or str(error)})
        return 0
    starter.send({"kind": "hub.ready", "port": doors[0].getsockname()[1], "pid": os.getpid()})
    Hub(Loop(SYSTEM), order, doors, starter).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
