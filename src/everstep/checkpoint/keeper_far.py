"""What stands on other hosts, as the leading keeper sees it: their keepers, and through these ranks, buffers, helpers.

One keeper decides, that of the host of rank 0, as if all ranks were its own. The keeper of another host (deputy.py)
decides nothing: it holds the buffers of its ranks, forks their writers and readers, and carries words.

    leading ─▶ say {rank, message}, plan {rank, message}          to a rank; a plan comes with one who reads for it
            ─▶ enter {}, void, hold, release {rank, buffer, offer}    what is done with buffers, in the order of orders
            ─▶ spawn {child, name, entry, arguments}, helper {child, message, rank, buffer}, kill {child}
            ─▶ look {places}, end {}
    other   ─▶ hello {rank, pid}, said {rank, message, sealed}, away {rank, why, sealed}
            ─▶ helper.said {child, message} + bytes, helper.exit {child, status}, seen {text}

Rule 1: what a host has told of its ranks' buffers is true when it tells: with a rank's end, its close, and its wish to
restore, after each of which the rank writes nothing more before it is answered.
Rule 2: a host that is lost is lost for good, with its ranks, buffers and helpers: nothing of it is waited for.
"""

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from everstep.checkpoint.core.hosts import Hosts
from everstep.checkpoint.host_line import Greeting, HostLine, Message
from everstep.checkpoint.keeper_hands import Owner
from everstep.process.loop import Loop

MEET_S = 90.0
"""All ranks have met when the first keeper starts: a keeper that has not come after so long is kept away."""
STRANGERS = 256
"""Connections at a time that have proved nothing yet; more are turned away."""


class Leading(Protocol):
    """The leading keeper."""

    def far_came(self, rank: int, line: "FarLine") -> None:
        """A rank of another host has made its Checkpointer."""
        ...

    def far_said(self, rank: int, message: Mapping[str, Any]) -> None:
        """It says something."""
        ...

    def far_sealed(self, rank: int, rows: Sequence[Sequence[int]]) -> None:
        """So its buffers are now: rows of what `Sealed` holds, oldest first."""
        ...

    def far_away(self, rank: int, why: str) -> None:
        """It has ended."""
        ...

    def far_lost(self, host: int, why: str) -> None:
        """A host is gone with all that it held."""
        ...

    def far_missing(self, text: str) -> None:
        """Not all have come, or one cannot serve."""
        ...


class FarHost:
    """Another host: the line to its keeper, once that has come."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.line: HostLine | None = None
        self.lost = False
        self.children: dict[int, tuple[FarChild, Owner]] = {}

    def order(self, verb: str, **facts: Any) -> None:
        """Tell it to do something; one that is gone is told nothing."""
        if self.line is not None:
            self.line.send({"kind": verb, **facts})


class FarLine:
    """A rank of another host; a `keeper_hands.Speaker`."""

    def __init__(self, host: FarHost, rank: int) -> None:
        self._host, self._rank = host, rank

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Speaker.send`: descriptors do not travel."""
        assert not fds, "descriptors stay on their host"
        self._host.order("say", rank=self._rank, message=dict(message))

    def plan(self, message: Message) -> None:
        """Say it, with a line to one who reads there."""
        self._host.order("plan", rank=self._rank, message=dict(message))

    def close(self) -> None:
        """See `Speaker.close`: its own keeper has its line."""


class FarChild:
    """A helper of another host; implements `recovery.api.Child`."""

    def __init__(self, host: FarHost, number: int, name: str) -> None:
        self.name, self.pid = name, 0
        self._host, self._number = host, number

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """See `Child.send`. What is to be read of a buffer is said by its number."""
        assert not fds, "descriptors stay on their host"
        self._host.order("helper", child=self._number, message=dict(message))

    def kill(self) -> None:
        """See `Child.kill`."""
        self._host.order("kill", child=self._number)


class Far:
    """All other hosts of one world. `door`: where their keepers come, closed when all have."""

    def __init__(self, loop: Loop, hosts: Hosts, token: str, door: socket.socket, keeper: Leading) -> None:
        self._loop, self.hosts, self._token, self._keeper = loop, hosts, token, keeper
        self._door: socket.socket | None = door
        self._far = {number: FarHost(number) for number in range(1, len(hosts.names))}
        self._greetings: list[Greeting] = []
        self._children = 0
        self._unseen: set[int] = set()
        self._seen: Callable[[], None] = lambda: None
        door.setblocking(False)
        loop.watch(door.fileno(), self._accept)
        loop.later(MEET_S, self._too_late)

    def at(self, rank: int) -> FarHost | None:
        """The host of a rank; None for ours."""
        return self._far.get(self.hosts.home[rank])

    @property
    def ours(self) -> tuple[int, ...]:
        """The ranks of the leading host."""
        return self.hosts.ranks(0)

    # -- keepers come --------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._door is not None
        with contextlib.suppress(OSError):  # whoever came has gone already
            end, _ = self._door.accept()
            self._greetings = [one for one in self._greetings if one.line.open and not one.done]
            if len(self._greetings) >= STRANGERS:
                end.close()
                return
            self._greetings.append(Greeting(self._loop, end, self._token, self._known))

    def _known(self, number: int, line: HostLine) -> None:
        host = self._far.get(number)
        if host is None or host.line is not None:
            line.drop()
            return
        host.line = line
        line.on_message = functools.partial(self._heard, host)
        line.on_end = functools.partial(self._ended, host)
        if all(one.line is not None for one in self._far.values()):
            self._shut()

    def _shut(self) -> None:
        if self._door is not None:
            self._loop.unwatch(self._door.fileno())
            self._door.close()
            self._door = None
        for greeting in self._greetings:
            if not greeting.done:
                greeting.line.drop()
        self._greetings.clear()

    def _too_late(self) -> None:
        if self._door is None:
            return
        port = self._door.getsockname()[1]
        lacking = ", ".join(self.hosts.told(one.number) for one in self._far.values() if one.line is None)
        self._keeper.far_missing(
            f"the keeper of {lacking} has not come to that of {self.hosts.names[0]} within {MEET_S:.0f} s: does "
            f"anything between these hosts keep TCP connections from its port {port}?"
        )

    # -- they speak ----------------------------------------------------------------------------------------------

    def _heard(self, host: FarHost, message: Message, content: bytes) -> None:
        try:
            self._take(host, message, content)
        except (LookupError, TypeError, ValueError) as error:
            if host.line is not None:
                host.line.drop()
            self._ended(host, f"it said {message['kind']!r} in a form that is unknown here ({error!r})")

    def _take(self, host: FarHost, message: Message, content: bytes) -> None:
        kind = str(message["kind"])
        if kind in ("helper.said", "helper.exit"):
            self._of_a_helper(host, kind, message, content)
            return
        if kind == "seen":
            self._has_looked(host, str(message["text"]))
            return
        rank = int(message["rank"])
        if self.at(rank) is not host:
            raise ValueError(f"rank {rank} stands elsewhere")
        if "sealed" in message:
            self._keeper.far_sealed(rank, [[int(number) for number in row] for row in message["sealed"]])
        match kind:
            case "hello":
                self._keeper.far_came(rank, FarLine(host, rank))
            case "said":
                self._keeper.far_said(rank, dict(message["message"]))
            case "away":
                self._keeper.far_away(rank, str(message["why"]))
            case _:
                raise ValueError("no word of ours")

    def _of_a_helper(self, host: FarHost, kind: str, message: Message, content: bytes) -> None:
        known = host.children.get(int(message["child"]))
        if known is None:
            return
        child, owner = known
        if kind == "helper.exit":
            del host.children[int(message["child"])]
            owner.on_child_exit(child, int(message["status"]))
            return
        fds: list[int] = []
        if content:
            fd = os.memfd_create("everstep-fragment", os.MFD_CLOEXEC)
            fds.append(fd)
            with open(fd, "wb", closefd=False) as file:
                file.write(content)
        owner.on_child_message(child, dict(message["message"]), fds)

    def _ended(self, host: FarHost, why: str) -> None:
        if host.lost:
            return
        host.line, host.lost = None, True
        host.children.clear()
        self._keeper.far_lost(host.number, why)

    # -- what they are told --------------------------------------------------------------------------------------

    def order(self, rank: int, verb: str, **facts: Any) -> None:
        """Have something done where a rank stands."""
        host = self.at(rank)
        assert host is not None, "ours is done here"
        host.order(verb, rank=rank, **facts)

    def enter(self) -> None:
        """A generation begins: what ranks kept for a tier that did not take it is free."""
        for host in self._far.values():
            host.order("enter")

    def spawn(self, rank: int, name: str, entry: str, arguments: Mapping[str, Any], owner: Owner) -> FarChild:
        """Have a helper forked where a rank stands; one of a host that is gone says nothing, and never ends."""
        host = self.at(rank)
        assert host is not None, "ours are forked here"
        self._children += 1
        child = FarChild(host, self._children, name)
        if not host.lost:
            host.children[self._children] = child, owner
            host.order("spawn", child=self._children, name=name, entry=entry, arguments=dict(arguments))
        return child

    def look(self, places: Sequence[tuple[str, str]], seen: Callable[[], None]) -> None:
        """Have each host see that these directories, with their owner files, are there the same; then `seen`."""
        self._unseen, self._seen = {number for number, host in self._far.items() if not host.lost}, seen
        for host in self._far.values():
            host.order("look", places=[list(place) for place in places])
        if not self._unseen:
            seen()

    def _has_looked(self, host: FarHost, text: str) -> None:
        if host.number not in self._unseen:
            return
        if text:
            self._unseen.clear()
            self._keeper.far_missing(f"on {self.hosts.told(host.number)} {text}")
            return
        self._unseen.discard(host.number)
        if not self._unseen:
            self._seen()

    def close(self) -> None:
        """The leading keeper ends: so do the others, when what was said to their ranks has come."""
        self._shut()
        for host in self._far.values():
            host.order("end")
        for host in self._far.values():
            if host.line is not None:
                host.line.close()
                host.line = None
