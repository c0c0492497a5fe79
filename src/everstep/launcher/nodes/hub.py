"""The hub: where the agents of one job meet, say their facts, and hear everybody's in one order.

The agent at whose address the end point is starts it, as a process of its own that outlives it: that agent's death is
the loss of its node alone. It ends by itself when no agent is connected any more. It judges silence, of nodes and,
since a hang is a property of the world (H1), of ranks.

    agent → hub:  join, ready, fact (with a key: only the first one counts), views, limits, tell, beat, bye
    hub → agent:  waiting, refused, over, complete, welcome, fact, told, probe, condemn, beat, notice

A node that comes when the job has begun is let in when there is a place for it (`complete`), says that it is `ready`,
hears what it must know (`welcome`, and facts), and is one of them from then on: the others hear that it `came`.

usage: python -m everstep.launcher.nodes.hub LINK_FD DOOR_FD (then one packet: terms, limits, last_call_s)
"""

import contextlib
import functools
import itertools
import os
import socket
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from everstep.clock import SYSTEM
from everstep.launcher.nodes.core.lease import BEAT_S, GIVEN_AWAY_S, Silence
from everstep.launcher.nodes.core.minutes import Fact, Minutes
from everstep.launcher.nodes.core.recap import Recap
from everstep.launcher.nodes.core.register import Node, Register
from everstep.launcher.peers.core.judge import Judge
from everstep.launcher.peers.stream import Stream
from everstep.process.detach import detach
from everstep.process.loop import Loop
from everstep.recovery.link import Link, LinkClosed

LOOK_S = 0.5
STRANGER_S = 30.0
"""An agent says who it is when it connects: who has not by then is let go."""
COMPLAINTS = ("StoreTimeout", "StoreError")
GOOD_BYE = "its agent has ended its part of the job"


class Hub:
    """One job's meeting place."""

    def __init__(self, loop: Loop, order: Mapping[str, Any], door: socket.socket, starter: Link) -> None:
        self._loop = loop
        self._register = Register(order["terms"], float(order["last_call_s"]))
        self._recap = Recap()
        self._over = False  # an agent has ended its part of the job: nobody else is let in
        self._minutes = Minutes(renewed=not order["terms"]["wrapped"])
        self._silence = Silence.of_nobody()
        self._judge = Judge.of(order["limits"])
        self._numbers = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._strangers: dict[int, float] = {}  # connections that have not said who they are, and since when
        self._members: dict[str, list[str]] = {}  # of the last roster, by node
        self._ranks: dict[int, str] = {}  # the node of each rank
        self._untold: deque[Fact] = deque()
        self._tells = False
        self._door, self._starter, self._starter_here = door, starter, True
        door.setblocking(False)
        loop.watch(door.fileno(), self._accept)
        loop.watch(starter.fileno(), self._starter_gone)

    def run(self) -> None:
        """Serve until nobody is here any more."""
        self._look()
        self._loop.run()

    # -- connections ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            line, _ = self._door.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # no descriptor is free: the loop would turn round the error
            self._loop.unwatch(self._door.fileno())
            self._loop.later(LOOK_S, lambda: self._loop.watch(self._door.fileno(), self._accept))
            return
        with contextlib.suppress(OSError):
            number = next(self._numbers)
            self._streams[number] = Stream(
                self._loop, line, functools.partial(self._heard, number), functools.partial(self._ended, number)
            )
            self._strangers[number] = self._loop.clock.now()

    def _heard(self, number: int, message: Mapping[str, Any]) -> None:
        """Whatever comes may come from anybody who reaches the port: what cannot be read ends its connection alone."""
        try:
            self._take(number, message)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            if number in self._streams:
                self._streams.pop(number).close()
                self._lost(number, "it said what nobody understands")

    def _take(self, number: int, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        node = self._register.here.get(number)
        if node is None:
            self._join(number, message)
            return
        if self._silence.heard(number, self._loop.clock.now()):
            self._notice(f"{node.name} is heard again")
        if kind == "bye":
            self._over = True
            self._streams.pop(number).close()
            self._leave(number, GOOD_BYE, lost=False)
        elif kind == "ready":
            self._welcome(number, node)
        elif kind == "beat":
            self._streams[number].send({"kind": "beat", "at": message["at"]})
        elif kind == "fact":
            self._take_fact(node.name, message["fact"], message.get("key"))
        elif kind == "tell":
            told = {"kind": "told", "from": node.name, "prefix": message["prefix"], "message": message["message"]}
            self._send(message["to"], told)
        else:
            self._judge_hears(kind, message)

    def _judge_hears(self, kind: str, message: Mapping[str, Any]) -> None:
        if kind == "limits":
            self._judge.heed(message["limits"])
        if kind == "views":
            self._judge.teach(message["lessons"])
            for view in message["views"]:
                told = {"lessons": [], "generation": message["generation"], "view": view}
                self._judge.take(told, self._loop.clock.now())

    def _join(self, number: int, told: Mapping[str, Any]) -> None:
        stream, register = self._streams[number], self._register
        self._strangers.pop(number, None)
        refusal = register.join(number, told, self._loop.clock.now())
        if refusal:
            stream.send({"kind": "refused", "text": refusal})
            self._streams.pop(number).close()
            self._notice(f"an agent ({told['who']}) was refused: {refusal}")
            return
        if register.complete:
            stream.send({"kind": "waiting", "lacking": "a place in the job, which runs"})
            self._let_in()
            return
        self._silence.heard(number, self._loop.clock.now())
        if not self._begin():
            self._to_all({"kind": "waiting", "lacking": register.lacking})

    def _let_in(self) -> None:
        """Give places to those in line, and turn away for whom there is none."""
        register = self._register
        if self._over:
            for number in list(register.line):
                self._turn_away(number, {"kind": "over"})
        if not self._recap.possible:
            return
        for number in register.let_in():
            node = register.here[number]
            self._silence.heard(number, self._loop.clock.now())
            self._streams[number].send({**self._complete(node), "late": True})
        for number, text in register.turned_away(self._loop.clock.now()).items():
            self._turn_away(number, {"kind": "refused", "text": text})

    def _turn_away(self, number: int, message: Mapping[str, Any]) -> None:
        self._register.leave(number)
        self._streams[number].send(message)
        self._streams.pop(number).close()

    def _welcome(self, number: int, node: Node) -> None:
        """It hears what it must know, and all hear of it."""
        if node.here:
            return
        node.here = True
        present = self._register.present
        stream = self._streams[number]
        stream.send({"kind": "welcome", "generation": self._recap.generation, "nodes": present})
        for fact in self._recap.told(present):
            stream.send({"kind": "fact", "fact": fact})
        self._minutes.come(node.name)
        self._tell([{"is": "came", "node": node.name, "address": node.address, "who": node.who}])

    def _complete(self, node: Node) -> dict[str, Any]:
        register = self._register
        told = {"kind": "complete", "nodes": register.present | {node.name: node.address}}
        return {**told, "at_work": list(register.at_work), "you": node.name, "ordinal": node.ordinal, "late": False}

    def _begin(self) -> bool:
        """Begin the job if it is time: enough have come."""
        register = self._register
        if not register.look(self._loop.clock.now()):
            return False
        present = register.present
        self._minutes.begin(present)
        for connection, node in list(register.here.items()):
            self._streams[connection].send(self._complete(node))
        return True

    def _ended(self, number: int) -> None:
        self._streams.pop(number, None)
        self._strangers.pop(number, None)
        self._lost(number, "the connection of its agent has ended")

    def _lost(self, number: int, why: str) -> None:
        self._leave(number, why, lost=True)

    def _leave(self, number: int, why: str, *, lost: bool) -> None:
        self._silence.forget(number)
        node = self._register.leave(number)
        if node is not None and self._register.complete:
            self._tell(self._minutes.leave(node.name, f"{node.name} ({node.address}) is lost: {why}", lost=lost))
        elif node is not None:
            self._to_all({"kind": "waiting", "lacking": self._register.lacking})
        if self._register.complete:
            self._let_in()
        self._end_if_deserted()

    def _starter_gone(self) -> None:
        """The agent that started us lets go: from here on we live for as long as somebody is connected."""
        try:
            self._starter.receive()
        except (LinkClosed, ValueError):
            self._loop.unwatch(self._starter.fileno())
            self._starter_here = False
            self._end_if_deserted()

    def _end_if_deserted(self) -> None:
        if not self._register.here and (self._register.complete or not self._starter_here):
            for number in list(self._register.line):
                self._turn_away(number, {"kind": "over"})
            self._loop.stop()

    # -- facts ---------------------------------------------------------------------------------------------------

    def _take_fact(self, node: str, fact: Fact, key: str | None) -> None:
        if fact["is"] == "store":  # not for all: it goes with the rosters
            told = self._minutes.serves(node, fact["address"]) if fact["address"] else []
            if not fact["address"]:
                self._minutes.serves_no_more(node)
            self._tell(told)
            return
        if fact["is"] == "Faulted":
            self._suspect_store(str(fact["fault"]["text"]))
        self._tell(self._minutes.say(fact, key))

    def _suspect_store(self, complaint: str) -> None:
        """Whoever keeps it hears the same complaint, and has it replaced; until then no roster names it."""
        store = self._minutes.store
        if store is not None and complaint.startswith(COMPLAINTS) and f"{store[1][0]}:{store[1][1]}" in complaint:
            self._minutes.serves_no_more(store[0])

    def _tell(self, facts: Iterable[Fact]) -> None:
        """One fact after another: to tell one may show that somebody is gone, which is a fact itself."""
        self._untold += facts
        if self._tells:
            return
        self._tells = True
        try:
            while self._untold:
                fact = self._untold.popleft()
                self._follow(fact)
                self._recap.hear(fact)
                for number, node in list(self._register.here.items()):
                    if node.here and number in self._streams:  # it may have ended while others were told
                        self._streams[number].send({"kind": "fact", "fact": fact})
        finally:
            self._tells = False

    def _follow(self, fact: Fact) -> None:
        """What the judge of ranks must know."""
        if fact["is"] == "Published":
            members = fact["roster"]["members"]
            self._ranks = {member[0]: member[2] for member in members}
            self._members = {}
            for member in members:
                self._members.setdefault(member[2], []).append(member[1])
        if fact["is"] == "gone":
            for incarnation in self._members.get(fact["node"], ()):
                self._judge.hear({"is": "Died", "incarnation": incarnation})
        elif fact["is"] not in ("kept", "drained", "came", "leaves"):
            self._judge.hear(fact)

    def _to_all(self, message: Mapping[str, Any]) -> None:
        for number in list(self._register.here):
            if number in self._streams:  # it may have ended while others were told
                self._streams[number].send(message)

    def _send(self, node: str, message: Mapping[str, Any]) -> None:
        number = self._register.connection_of(node)
        if number is not None and number in self._streams:
            self._streams[number].send(message)

    def _notice(self, text: str) -> None:
        self._to_all({"kind": "notice", "text": text})

    # -- time ----------------------------------------------------------------------------------------------------

    def _let_strangers_go(self, now: float) -> None:
        for number in [number for number, came_s in self._strangers.items() if now - came_s > STRANGER_S]:
            del self._strangers[number]
            if number in self._streams:
                self._streams.pop(number).close()

    def _look(self) -> None:
        now = self._loop.clock.now()
        self._let_strangers_go(now)
        if self._register.complete:
            suspected, gone = self._silence.look(now)
            for number in suspected:  # telling one may find others gone: who is not here any more is passed over
                if number in self._register.here:
                    self._notice(f"{self._register.here[number].name} is silent")
            for number in gone:
                if number in self._streams:
                    self._streams.pop(number).close()
                    self._lost(number, f"its agent was silent for {GIVEN_AWAY_S:g} s")
            for message, rank in self._judge.look(now):
                self._send(self._ranks.get(rank, ""), {**message, "rank": rank})
            self._let_in()
        else:
            self._begin()
        self._end_if_deserted()
        self._loop.later(min(LOOK_S, BEAT_S), self._look)


def main(argv: list[str]) -> int:
    """Serve one job."""
    starter = Link.from_fd(int(argv[0]))
    door = socket.socket(fileno=int(argv[1]))
    detach()
    order, _ = starter.receive()
    starter.send({"kind": "hub.ready", "pid": os.getpid()})
    Hub(Loop(SYSTEM), order, door, starter).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
