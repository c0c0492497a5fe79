"""The operator's end point of one agent: it answers for all nodes, over the line that agents have with one another.

    GET /v1/ps ─▶ what each node sees of itself

    agent ─▶ control.ask {number, what, arguments}     to the companion of this prefix on each other node
    agent ◀─ control.answer {number, found}

Rule 1: it rides along: what goes wrong here is told, and ends no job. Without an end point a job runs as well.
Rule 2: a flood of questions costs what a few cost: an answer is kept for `FRESH_S`, and who asks while it is being
        found waits for it.
Rule 3: a node that does not answer in time is named, and not waited for.
"""

import itertools
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.errors import ConfigurationError
from everstep.launcher.agent.view import Seen, node_view
from everstep.launcher.control.core.http import Request, Response, answer
from everstep.launcher.control.core.recent import Recent
from everstep.launcher.control.core.rights import admit
from everstep.launcher.control.server import Answer, Server
from everstep.process.loop import Loop
from everstep.recovery import control_file
from everstep.recovery.api import Child, Host, Message, NodeHost
from everstep.recovery.core.words import Roster
from everstep.telemetry import Telemetry

FRESH_S = 0.2
LOOK_S = 2.0
"""For other nodes to answer; a frozen one is suspected after 3 s."""
Found = Mapping[str, Any]
Then = Callable[[Found], None]


class Owner(Seen, Protocol):
    """As much of the agent as is used here."""

    loop: Loop
    telemetry: Telemetry

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger."""
        ...


@dataclass(eq=False)
class _Round:
    """One question to some nodes."""

    awaited: set[str]
    then: Callable[[Mapping[str, Found]], None]
    found: dict[str, Found] = field(default_factory=dict[str, Found])


class Control:
    """Companion `control`. All calls come on the agent's one thread."""

    prefix = "control"

    def __init__(self, agent: Owner) -> None:
        self._agent = agent
        self._recent = Recent()
        agent.telemetry.sinks.append(self._recent)
        self._host: NodeHost | None = None
        self._server: Server | None = None
        self._token = secrets.token_urlsafe(32)
        self._numbers = itertools.count()
        self._rounds: dict[int, _Round] = {}
        self._kept: tuple[float, Response] | None = None
        self._waiting: list[Answer] = []
        self._view: tuple[float, Found] | None = None
        self._local: Mapping[str, Callable[[Mapping[str, Any], Then], None]] = {
            "ps": lambda _, then: then(self._look()),
        }
        self._routes: Mapping[str, Callable[[Request, Answer], None]] = {"/v1/ps": self._ps}

    # -- its life ------------------------------------------------------------------------------------------------

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._host = host  # type: ignore[assignment]  # an agent's host is one of nodes
        agent = self._agent
        place = agent.config.control
        if place is None:
            return
        try:
            self._server = Server(
                agent.loop, place.host, place.port, self._serve, lambda text: agent.notice(text, "warning")
            )
            self._tell_where(*self._server.address)
        except (ConfigurationError, OSError) as error:
            agent.notice(f"nobody can look at this job, which runs as well without: {error}", "warning")

    def _tell_where(self, address: str, port: int) -> None:
        agent = self._agent
        told = control_file.ControlFile(
            address, port, self._token, socket.gethostname(), agent.nodes.name, os.getpid(), agent.nursery.job
        )  # fmt: skip
        told.write(agent.run_dir)

    def close(self) -> None:
        """See `Companion.close`."""
        self._rounds.clear()
        if self._server is not None:
            self._server.close()
            control_file.remove(self._agent.run_dir)

    # -- questions of operators ----------------------------------------------------------------------------------

    def _serve(self, request: Request, reply: Answer) -> None:
        refused = admit(request, self._token)
        if refused is not None:
            reply(refused)
        else:
            self._routes[request.path](request, reply)

    def _ps(self, request: Request, reply: Answer) -> None:
        del request
        if self._kept is not None and self._agent.loop.clock.now() - self._kept[0] < FRESH_S:
            reply(self._kept[1])
            return
        self._waiting.append(reply)
        if len(self._waiting) == 1:
            self._gather("ps", {}, LOOK_S, self._seen)

    def _seen(self, found: Mapping[str, Found]) -> None:
        told = answer(self._whole(found))
        self._kept = self._agent.loop.clock.now(), told
        waiting, self._waiting = self._waiting, []
        for reply in waiting:
            reply(told)

    def _whole(self, found: Mapping[str, Found]) -> dict[str, Any]:
        nodes = self._agent.nodes
        return {
            "version": control_file.VERSION,
            "job": self._agent.nursery.job,
            "asked": nodes.name,
            "nodes": [found[name] for name in nodes.present if name in found],
            "silent": [name for name in nodes.present if name not in found],
        }

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _gather(
        self, what: str, arguments: Mapping[str, Any], limit_s: float, then: Callable[[Mapping[str, Found]], None]
    ) -> None:
        """Ask all nodes that are here; `then` comes once, with what those have found that answered in time."""
        own, number = self._agent.nodes.name, next(self._numbers)
        round_ = self._rounds[number] = _Round(set(self._agent.nodes.present), then)
        self._agent.loop.later(limit_s, lambda: self._conclude(number))
        for node in sorted(round_.awaited - {own}):
            ask = {"kind": "control.ask", "number": number, "what": what, "arguments": dict(arguments)}
            self._tell(node, ask)
        self._local[what](arguments, lambda found: self._heard(number, own, found))

    def _tell(self, node: str, message: Message) -> None:
        if self._host is not None:
            self._host.tell(node, message)

    def _heard(self, number: int, node: str, found: Found) -> None:
        round_ = self._rounds.get(number)
        if round_ is not None and node in round_.awaited:
            round_.awaited.discard(node)
            round_.found[node] = found
            if not round_.awaited:
                self._conclude(number)

    def _conclude(self, number: int) -> None:
        round_ = self._rounds.pop(number, None)
        if round_ is not None:
            round_.then(round_.found)

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """See `NodeCompanion.on_nodes`: who is gone is not waited for."""
        for number, round_ in list(self._rounds.items()):
            round_.awaited &= set(nodes)
            if not round_.awaited:
                self._conclude(number)

    def on_node_message(self, node: str, message: Message) -> None:
        """See `NodeCompanion.on_node_message`."""
        number = int(message["number"])
        if message["kind"] == "control.answer":
            self._heard(number, node, dict(message["found"]))
        elif message["kind"] == "control.ask":
            self._local[message["what"]](
                message["arguments"],
                lambda found: self._tell(node, {"kind": "control.answer", "number": number, "found": found}),
            )

    def _look(self) -> Found:
        now = self._agent.loop.clock.now()
        if self._view is None or now - self._view[0] >= FRESH_S:
            self._view = now, node_view(self._agent, self._recent, now)
        return self._view[1]

    # -- the rest of a companion ---------------------------------------------------------------------------------

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`."""

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""

    def on_stopped(self, generation: int) -> None:
        """See `Companion.on_stopped`."""

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`."""
        return {}

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`."""

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`."""
        return True

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`."""
        return ()
