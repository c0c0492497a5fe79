"""How an agent comes to the others: the hub is started where the end point is ours, found where it is not.

Rule 1: everything here has an end: `connect_s` to reach the hub, `ANSWER_S` for its first word, `join_s` until all
        nodes are here. What went wrong is said with the end point, and what to look at.
Rule 2: the address that the others are told is the one from which we reach the hub, unless `--local-addr` names
        another.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep import environ
from everstep.errors import ConfigurationError, EverstepError, ExitCode
from everstep.launcher.nodes.addresses import is_loopback, meant_for_one_machine, outward
from everstep.launcher.nodes.core.endpoint import Endpoint
from everstep.launcher.peers.stream import Stream
from everstep.process import detach, kernel, mark
from everstep.process.loop import Loop
from everstep.recovery.link import Link, LinkClosed
from everstep.telemetry import say

ANSWER_S = 10.0
RETRY_S = 0.2
TRY_S = 5.0
REAP_S = 0.5
SAY_S = 15.0
LINGER_S = 10.0
_ENTRY = "everstep.launcher.nodes.hub"


class JobOver(EverstepError):
    """We have come too late to be of use: there is nothing to do, and nothing is wrong."""

    exit_code = ExitCode.DONE


class _NobodysError(ConfigurationError):
    """Whoever listens at the end point is not of this job."""


@dataclass
class Joined:
    """All are here, and this is our connection."""

    name: str
    present: Mapping[str, str]
    stream: "Arrival"
    at_work: tuple[str, ...] = ()
    """Nodes that begin with ranks; the others are spare."""
    ordinal: int = 0
    """How many had been let in before this one, of all that ever came."""
    late: bool = False
    """The job runs: what is to be known of it comes when we are ready."""


@dataclass
class Arrival:
    """The connection to the hub while we join; afterwards its messages and its end go to whoever takes it over."""

    loop: Loop
    line: socket.socket
    said: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    ended: bool = False

    def __post_init__(self) -> None:
        self.stream = Stream(self.loop, self.line, self._heard, self._end)
        self.on_message: Callable[[Mapping[str, Any]], None] = self.said.append
        self.on_end: Callable[[], None] = _nothing

    def _heard(self, message: Mapping[str, Any]) -> None:
        self.on_message(message)

    def _end(self) -> None:
        self.ended = True
        self.on_end()


class Meeting:
    """This agent's way to the others, and its hold of the hub where it has started that."""

    def __init__(
        self, loop: Loop, endpoint: Endpoint, reap: Callable[[], None], started: Callable[[int], None]
    ) -> None:
        """`reap` buries what dies while we wait; `started` is told the process id of our hub, which outlives us."""
        self._loop, self._endpoint, self._reap, self._started = loop, endpoint, reap, started
        self._starter: Link | None = None
        self._taken: ConfigurationError | None = None  # why we could not open the end point
        self.hub_pid = 0
        """Of the hub that this agent has started: its child, and not its own."""

    def join(self, terms: Mapping[str, Any], limits: Mapping[str, Any], local_addr: str | None) -> Joined:
        """Meet all other agents, or as many as come in time. Raises ConfigurationError, with what to look at."""
        self._open_hub(terms, limits)
        line = self._connect()
        address = local_addr or outward(line.getsockname()[0], self._endpoint.host)
        arrival = Arrival(self._loop, line)
        who = f"{socket.gethostname()}, pid {os.getpid()}, from {line.getsockname()[0]}"
        told = {"terms": dict(terms), "node_rank": self._endpoint.node_rank, "address": address, "who": who}
        arrival.stream.send({"kind": "join", **told})
        try:
            return self._wait(arrival)
        except _NobodysError as error:
            arrival.stream.close()
            raise self._taken or error from None
        except BaseException:
            arrival.stream.close()
            raise

    # -- the hub -------------------------------------------------------------------------------------------------

    def _open_hub(self, terms: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
        """Start it where the end point is ours to open. Where that is only likely, somebody else here may have."""
        endpoint = self._endpoint
        address = _own_address(endpoint.host)
        if endpoint.hosts is False or (endpoint.hosts is None and address is None):
            return
        try:
            door = socket.create_server((_listens(endpoint.host, address), endpoint.port), backlog=2048)
        except OSError as error:
            self._taken = _unopened(endpoint, error.strerror or str(error))
            if error.errno == errno.EADDRINUSE:  # by the hub of this job, perhaps: its agent's end is not its own
                return
            raise self._taken from None
        ours, theirs = Link.pair()
        fds = (theirs.fileno(), door.fileno())
        detach.start(_ENTRY, fds=fds, env={k: v for k, v in environ.snapshot().items() if k not in mark.words("")})
        theirs.close()
        door.close()
        ours.send({"terms": dict(terms), "limits": dict(limits), "last_call_s": endpoint.last_call_s})
        try:
            self.hub_pid = int(ours.receive()[0]["pid"])
        except LinkClosed:
            raise ConfigurationError("the hub's process ended before it began; see what it printed") from None
        self._starter = ours
        self._started(self.hub_pid)

    def linger(self) -> None:
        """Our part is done: let the hub serve those that are a moment behind. It ends with the last of them."""
        if self._starter is not None:
            self._starter.close()
        until = self._loop.clock.now() + LINGER_S
        while self.hub_pid and self._loop.clock.now() < until:
            stat = kernel.status(self.hub_pid)
            if stat is None or stat.ending:
                return
            if stat.state == "T":  # stopped: it serves nobody, and would never end
                kernel.kill(self.hub_pid)
            self._loop.clock.sleep(0.01)

    # -- the way there -------------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        """Reach whoever listens there; a node may be up before the one that opens the end point, or its name."""
        endpoint = self._endpoint
        until, why = self._loop.clock.now() + endpoint.connect_s, ""
        while (left := until - self._loop.clock.now()) > 0:
            try:
                line = socket.create_connection((endpoint.host, endpoint.port), min(TRY_S, left))
                if line.getsockname() != line.getpeername():
                    return line
                line.close()  # two ends of one socket: nobody listens, and the kernel has dealt us that very port
                why = "nobody listens there"
            except socket.gaierror as error:
                why = f"the name {endpoint.host!r} does not resolve ({error.strerror})"
            except OSError as error:
                why = error.strerror or str(error)
            self._loop.clock.sleep(RETRY_S)
        raise ConfigurationError(
            f"nobody was reached at the end point {endpoint} within {endpoint.connect_s:g} s: {why}. Is the node that "
            "opens it up, is the name right, and does nothing between the nodes block the port? "
            "(--rdzv-conf read_timeout=SECONDS waits for longer.)"
        )

    def _wait(self, arrival: Arrival) -> Joined:
        """Serve until the hub says that all are here."""
        clock = self._loop.clock
        wait = _Wait(self._endpoint, clock.now())
        while True:
            while arrival.said:
                joined = wait.hear(arrival.said.pop(0), arrival)
                if joined is not None:
                    return joined
            wait.look(clock.now(), ended=arrival.ended)
            self._loop.later(REAP_S, self._reap)
            self._loop.turn()


@dataclass
class _Wait:
    """What has become of our coming so far."""

    endpoint: Endpoint
    began_s: float
    lacking: str = ""  # whom the hub has said that it waits for
    said_s: float = 0.0

    def hear(self, message: Mapping[str, Any], arrival: Arrival) -> Joined | None:
        """Take a word of the hub; return how we have joined, when all are here."""
        match message.get("kind"):
            case "complete":
                at_work = tuple(map(str, message["at_work"]))
                place = int(message["ordinal"]), bool(message["late"])
                return Joined(str(message["you"]), dict(message["nodes"]), arrival, at_work, *place)
            case "over":
                raise JobOver(f"the job at {self.endpoint} has ended without this node")
            case "refused":
                raise ConfigurationError(f"the job at {self.endpoint} refuses this node: {message['text']}")
            case "waiting":
                self.lacking = str(message["lacking"])
            case "notice":
                say(str(message["text"]))
            case _:
                raise _nobodys(self.endpoint, "answered with words that are not ours")
        return None

    def look(self, now: float, *, ended: bool) -> None:
        """Raise what the wait has come to; say now and then whom we wait for."""
        waited = now - self.began_s
        if ended:
            raise _nobodys(self.endpoint, "hung up" if self.lacking else "hung up without a word of ours")
        answer_s = min(ANSWER_S, self.endpoint.join_s)
        if not self.lacking and waited > answer_s:
            raise _nobodys(self.endpoint, f"said nothing for {answer_s:g} s")
        if waited > self.endpoint.join_s:
            raise ConfigurationError(
                f"{self.lacking} have not come to {self.endpoint} within {self.endpoint.join_s:g} s. Start them all, "
                "with the same --nnodes and end point (--rdzv-conf join_timeout=SECONDS waits for longer)."
            )
        if self.lacking and waited - self.said_s > SAY_S:
            self.said_s = waited
            say(f"still waiting at {self.endpoint} for {self.lacking}")


def _nothing() -> None:
    return


def _unopened(endpoint: Endpoint, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the end point {endpoint} cannot be opened: {why}. This node opens it (node rank 0, or the node whose address "
        "it is); choose a port that is free, the same on all nodes."
    )


def _nobodys(endpoint: Endpoint, what: str) -> _NobodysError:
    return _NobodysError(
        f"what listens at {endpoint} {what}: it is not the meeting place of this `everstep run`. Look at the host and "
        "the port of --rdzv-endpoint (--master-addr, --master-port), and whether another program has the port."
    )


def _listens(host: str, address: str | None) -> str:
    """Return where the end point is opened: at its address, unless that is a name which only this machine reaches."""
    return address if address and (meant_for_one_machine(host) or not is_loopback(address)) else ""


def _own_address(host: str) -> str | None:
    """Return the address that `host` names, if it is one of this machine; what does not resolve yet is not."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)]
    for address in found:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((address, 0))
            return address
    return None
