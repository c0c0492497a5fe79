"""The keeper of a host on which rank 0 does not stand: holds and carries, and decides nothing (keeper_far.py).

It has the buffers of its ranks, forks their writers and readers, and is their line to the keeper that decides for all.

Rule 1: what ranks here say of their buffers is done here, at once; everything else goes on in the order in which it was
said, so what is decided of a buffer is decided after all that was said of it.
Rule 2: it ends when the leading keeper says so, or is lost: its ranks are told, its writers end. What was committed is
whole; what was being written here is nobody's, and is swept by the next start.
Rule 3: it outlives its ranks: what they left in memory may be wanted for the last save.
Rule 4: it makes no call to a directory itself: such a call may never return.

usage: python -m everstep.checkpoint.deputy LINK_FD LISTENING_FD (then packets: ckpt.begin)
"""

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.checkpoint import place_seen, writers
from everstep.checkpoint.core.hosts import Hosts
from everstep.checkpoint.deputy_way import REACH_S, Way
from everstep.checkpoint.far_shelf import DeputyShelf
from everstep.checkpoint.hashing import Hashing
from everstep.checkpoint.host_line import HostLine, Message
from everstep.checkpoint.keeper_hands import Hands, Owner
from everstep.checkpoint.keeper_ranks import Ranks
from everstep.checkpoint.ondemand_far import VISIBLE_S
from everstep.clock import SYSTEM
from everstep.errors import EverstepError, ExitCode
from everstep.events import Event, Notice
from everstep.process import kernel
from everstep.process.detach import detach
from everstep.process.loop import Loop
from everstep.recovery.api import Child, Companion
from everstep.recovery.line import Line
from everstep.recovery.link import Link
from everstep.telemetry import say

MEET_S = 300.0
PATROL_S = 2.0
SEEN_S = 30.0
"""How long the owner file may take to be seen: its name is new, so no file system has it from before."""
PATIENT = 0.8
"""This share of the grace time a reader waits for what another host has written; the rest is for the file system."""
ALL_TOLD = frozenset({"ckpt.close", "ckpt.restore"})
"""After these a rank's buffers stay as they are until it is answered."""


class Deputy:
    """From the first rank of its host to the end of the world."""

    def __init__(
        self,
        loop: Loop,
        first: Link,
        door: socket.socket,
        hands: Callable[[Loop, Mapping[str, str]], Hands] = Hands,
        way: type[Way] = Way,
    ) -> None:
        self._loop, self._made_hands, self._made_way = loop, hands, way
        self._line: HostLine | None = None
        self._way: Way | None = None
        self._unsent: list[Message] = []
        self._children: dict[int, Child] = {}
        self._mine: tuple[int, ...] = ()
        self._begun = self._welcomed = self._left = False
        self._ranks = Ranks(loop, first, door, self)
        loop.later(MEET_S, self._too_late)

    # -- ranks (`keeper_ranks.Keeping`) --------------------------------------------------------------------------

    def begin(self, settings: Mapping[str, Any]) -> None:
        """See `Keeping.begin`."""
        self._begun = True
        self._hosts, self._number = Hosts.from_json(settings["hosts"]), int(settings["host"])
        self._mine = self._hosts.ranks(self._number)
        self._grace_s = float(settings["grace"])
        self._hands = self._made_hands(self._loop, settings["training"])
        self.world_size, self.run_dir = int(settings["world_size"]), f"the keeper of {self._name}"
        self._shelf = DeputyShelf(self._mine, readers=len(settings["tiers"]))
        self._shelf.start(_OwnHost(self, self._shelf))
        hashing = Hashing(self._shelf)
        hashing.start(_OwnHost(self, hashing))
        where = [str(one) for one in settings["addresses"]], int(settings["port"])
        who = str(settings["token"]), self._number
        self._way = self._made_way(self._loop, where, who, self._reached, self._not_reached)
        self._loop.later(PATROL_S, self._patrol)

    @property
    def _name(self) -> str:
        return self._hosts.names[self._number]

    @property
    def _leader(self) -> str:
        return self._hosts.names[0]

    def hello(self, rank: int, pid: int, line: Line) -> bool:
        """See `Keeping.hello`."""
        del line
        if rank not in self._mine:
            return False
        self._tell({"kind": "hello", "rank": rank, "pid": pid})
        if len(self._ranks.lines) + 1 == len(self._mine):
            self._loop.later(0.0, self._ranks.shut)
        return True

    def said(self, rank: int, message: dict[str, Any]) -> None:
        """See `Keeping.said`."""
        kind = str(message["kind"])
        if kind.startswith("snapshot.") and kind != "snapshot.damaged":
            self._shelf.on_message(rank, message, ())
            return
        told = {"sealed": self._shelf.rows(rank)} if kind in ALL_TOLD else {}
        self._tell({"kind": "said", "rank": rank, "message": message, **told})

    def went(self, rank: int, why: str) -> None:
        """See `Keeping.went`."""
        if not self._left:
            self._tell({"kind": "away", "rank": rank, "why": why, "sealed": self._shelf.rows(rank)})

    def deserted(self) -> None:
        """See `Keeping.deserted`."""
        self._leave()

    def _tell_ranks(self, text: str) -> None:
        """Nothing comes of it, or nothing more."""
        kind = "ckpt.lost" if self._welcomed else "ckpt.refused"
        for line in self._ranks.lines.values():
            line.send({"kind": kind, "text": text, "code": int(ExitCode.CONFIGURATION)})

    # -- the leading keeper --------------------------------------------------------------------------------------

    def _tell(self, message: Message, content: bytes = b"") -> None:
        if self._line is None:
            self._unsent.append(message)
        else:
            self._line.send(message, content)

    def _reached(self, line: HostLine) -> None:
        self._line, self._way = line, None
        line.on_message, line.on_end = self._heard, self._lost
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self._tell(message)

    def _not_reached(self, whys: str) -> None:
        self._tell_ranks(
            f"the keeper of host {self._leader}, where rank 0 is, was not reached from {self._name} within "
            f"{REACH_S:.0f} s ({whys}): does anything between these hosts keep TCP connections from that port?"
        )
        self._leave()

    def _lost(self, why: str) -> None:
        if not self._left:
            self._tell_ranks(
                f"the keeper of host {self._leader}, which decides what is saved, is lost ({why}); what was committed "
                "is whole. Make another Checkpointer on every rank to go on saving"
            )
            self._leave()

    def _heard(self, message: Message, content: bytes) -> None:
        del content
        try:
            self._obey(message)
        except (LookupError, TypeError, ValueError, EverstepError) as error:
            self._lost(f"it said {message['kind']!r}, which cannot be done here: {error!r}")

    def _obey(self, message: Message) -> None:
        kind = str(message["kind"])
        if kind == "enter":
            self._shelf.enter()
        elif kind == "look":
            self._look(message["places"])
        elif kind == "end":
            self._leave()
        elif kind in ("spawn", "helper", "kill"):
            self._have_done(kind, int(message["child"]), message)
        else:
            self._of_a_rank(kind, int(message["rank"]), message)

    def _of_a_rank(self, kind: str, rank: int, message: Message) -> None:
        buffer = int(message.get("buffer", -1))
        match kind:
            case "say" if rank in self._ranks.lines:
                self._ranks.lines[rank].send(self._as_known_here(message["message"]))
            case "plan" if rank in self._ranks.lines:
                said = self._as_known_here(message["message"])
                visible_s = min(VISIBLE_S, PATIENT * self._grace_s)
                self._hands.reader(self._ranks.lines[rank], said, visible_s)
            case "void":
                self._shelf.void(rank, buffer)
            case "hold":
                self._shelf.hold(rank, buffer, int(message["offer"]))
            case "release":
                self._shelf.release(rank, buffer, int(message["offer"]))
            case _:
                raise ValueError("no word of ours")

    def _as_known_here(self, said: Message) -> Message:
        """What a rank is told of its keeper is so of that here."""
        if said["kind"] != "ckpt.welcome":
            return said
        self._welcomed = True
        return {**said, "pid": os.getpid()}

    # -- helpers -------------------------------------------------------------------------------------------------

    def _have_done(self, kind: str, number: int, message: Message) -> None:
        if kind == "spawn":
            if message["entry"] != writers.ENTRY:
                raise ValueError(f"{message['entry']} is no helper of another host")
            errand = _Errand(number, self._tell, self._ended)
            self._children[number] = self._hands.spawn(message["name"], writers.ENTRY, message["arguments"], errand)
            return
        child = self._children.get(number)
        if child is None:
            return  # its end is on its way
        if kind == "kill":
            child.kill()
            return
        order = dict(message["message"])
        fds = [self._shelf.fd(int(order["rank"]), int(order["buffer"]))] if order["kind"] == "write" else []
        child.send(order, fds)

    def _ended(self, number: int) -> None:
        self._children.pop(number, None)

    def _look(self, places: Sequence[Sequence[str]]) -> None:
        """Have somebody look who may stand in a call for ever."""
        looker = _Looker(self._tell)
        words = {"places": [list(place) for place in places], "limit_s": SEEN_S}
        self._hands.spawn("looker", place_seen.ENTRY, words, looker)
        self._loop.later(SEEN_S + self._grace_s, looker.too_late)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any], owner: Owner) -> Child:
        """Fork a helper of this host's own."""
        return self._hands.spawn(name, entry, arguments, owner)

    # -- inside --------------------------------------------------------------------------------------------------

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Host.send`."""
        line = self._ranks.lines.get(rank)
        if line is not None:
            line.send(message, fds)

    def later(self, delay_s: float) -> None:
        """See `Host.later`."""
        self._loop.later(delay_s, self._tick)

    def _tick(self) -> None:
        if not self._left:
            self._shelf.on_tick(self._loop.clock.now())

    def _patrol(self) -> None:
        if not self._left:
            self._hands.patrol()
            self._loop.later(PATROL_S, self._patrol)

    def _too_late(self) -> None:
        if not self._welcomed and self._line is None:
            self._leave()

    def _leave(self) -> None:
        if self._left:
            return
        self._left = self._ranks.over = True
        if self._way is not None:
            self._way.close()
        if self._begun:
            self._hands.close()
        if self._line is not None:
            self._line.drop()
        if self._begun:
            self._shelf.close()
        for line in self._ranks.lines.values():
            line.close()
        self._loop.stop()

    def run(self) -> None:
        """Serve until there is nobody to be served."""
        self._loop.run()


class _OwnHost:
    """Implements `recovery.api.Host` for what rides on a deputy."""

    def __init__(self, deputy: Deputy, owner: Companion) -> None:
        self._deputy, self._owner = deputy, owner
        self.clock, self.run_dir, self.world_size = SYSTEM, deputy.run_dir, deputy.world_size

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Host.send`."""
        self._deputy.send(rank, message, fds)

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any]) -> Child:
        """See `Host.spawn`."""
        return self._deputy.spawn(name, entry, arguments, self._owner)

    def emit(self, event: Event) -> None:
        """See `Host.emit`: what people should read is said."""
        if isinstance(event, Notice) and event.level != "info":
            say(event.text)

    def later(self, delay_s: float) -> None:
        """See `Host.later`."""
        self._deputy.later(delay_s)

    def recheck(self) -> None:
        """See `Host.recheck`: the leading keeper looks."""


class _Errand:
    """A helper that the leading keeper owns: its words and its end go there. A `keeper_hands.Owner`."""

    def __init__(self, number: int, tell: Callable[[Message, bytes], None], ended: Callable[[int], None]) -> None:
        self._number, self._tell, self._done = number, tell, ended

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`. What lies in a descriptor goes as bytes."""
        del child
        content = b""
        for fd in fds:
            content += os.pread(fd, os.fstat(fd).st_size, 0)
            os.close(fd)
        self._tell({"kind": "helper.said", "child": self._number, "message": dict(message)}, content)

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""
        del child
        self._done(self._number)
        self._tell({"kind": "helper.exit", "child": self._number, "status": status}, b"")


class _Looker:
    """One who looks whether the directories are there the same. A `keeper_hands.Owner`; what it says is said once."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._tell, self._told = tell, False

    def _say(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._tell({"kind": "seen", "text": text})

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""
        del child, fds
        self._say(str(message["text"]))

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""
        del child
        self._say(f"the process that was to look at the checkpoint directory ended by itself (status {status})")

    def too_late(self) -> None:
        """It stands in a call that does not return."""
        self._say("the checkpoint directory does not answer: see whether `ls` of it returns there, and mend the mount")


def main(argv: Sequence[str]) -> int:
    """Keep the snapshots of one host's ranks."""
    detach()
    kernel.name_process("everstep-keeper")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    first, door = Link.from_fd(int(argv[0])), socket.socket(fileno=int(argv[1]))
    Deputy(Loop(SYSTEM), first, door).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
