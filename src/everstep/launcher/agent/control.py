"""The operator's end point of one agent: it answers for all nodes, over the line that agents have with one another.

    GET /v1/ps       what each node sees of itself
    GET /v1/stacks   where each rank stands
    POST /v1/kill    end a rank's process, or the job
    POST /v1/drain   end the job in order
    POST /v1/exclude leave a node out
    GET /metrics     this node, for Prometheus

    agent ─▶ control.ask {number, what, arguments}     to the companion of this prefix on each other node
    agent ◀─ control.answer {number, found}

Rule 1: it rides along: what goes wrong here is told, and ends no job. Without an end point a job runs as well.
Rule 2: a flood of questions costs what a few cost: an answer is kept for `FRESH_S`, and who asks while it is being
        found waits for it.
Rule 3: a node that does not answer in time is named, and not waited for.
"""

import functools
import itertools
import os
import secrets
import signal
import socket
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.errors import ConfigurationError, ExitCode
from everstep.launcher.agent.draining import Draining
from everstep.launcher.agent.ending import Ending
from everstep.launcher.agent.standing import Standing
from everstep.launcher.agent.view import Seen, node_view
from everstep.launcher.control.core import exposition
from everstep.launcher.control.core.http import Request, Response, answer, refusal
from everstep.launcher.control.core.recent import Recent
from everstep.launcher.control.core.rights import admit
from everstep.launcher.control.core.wishes import drains, node_of, wish_of
from everstep.launcher.control.server import Answer, Server
from everstep.process.loop import Loop
from everstep.recovery import control_file
from everstep.recovery.api import Child, Host, Message, NodeHost
from everstep.recovery.core import words
from everstep.recovery.core.words import Roster
from everstep.telemetry import Telemetry

FRESH_S = 0.2
LOOK_S, STAND_S = 2.0, 8.0
"""For all nodes to answer; for their ranks, and for who looks at those from outside."""
AT_ONCE, NEXT_S = 16, 0.3
"""So many other nodes are asked at once: their answers share a line with all that agents have to say."""
Found = Mapping[str, Any]
Then = Callable[[Found], None]


class Owner(Seen, Protocol):
    """As much of the agent as is used here."""

    loop: Loop
    telemetry: Telemetry
    ending: Ending | None
    draining: Draining

    def drain(self, *, why: str) -> None:
        """Ask the job to end in order, on all nodes."""
        ...

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger."""
        ...


@dataclass(eq=False)
class _Round:
    """One question to some nodes."""

    awaited: set[str]
    unasked: deque[str]
    message: Message
    then: Callable[[Mapping[str, Found]], None]
    found: dict[str, Found] = field(default_factory=dict[str, Found])


@dataclass(eq=False)
class _Question:
    """What operators ask again and again, its last answer, and who waits for the next."""

    what: str
    limit_s: float
    kept: tuple[float, Response] | None = None
    waiting: list[Answer] = field(default_factory=list[Answer])


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
        self._standing = Standing(agent, agent.loop)
        self._view: tuple[float, Found] | None = None
        self._local: Mapping[str, Callable[[Mapping[str, Any], Then], None]] = {
            "ps": lambda _, then: then(self._look()),
            "stacks": lambda _, then: self._standing.ask(then),
            "exclude": lambda _, then: self._leave(then),
            "kill": lambda arguments, then: then(self._kill_here(int(arguments["rank"]))),
        }
        self._questions = {what: _Question(what, limit_s) for what, limit_s in (("ps", LOOK_S), ("stacks", STAND_S))}
        self._routes: Mapping[str, Callable[[Request, Answer], None]] = {
            f"/v1/{what}": functools.partial(self._ask, question) for what, question in self._questions.items()
        } | {"/v1/kill": self._kill, "/v1/drain": self._drain, "/v1/exclude": self._exclude, "/metrics": self._metrics}

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

    def _ask(self, question: _Question, request: Request, reply: Answer) -> None:
        del request
        if question.kept is not None and self._agent.loop.clock.now() - question.kept[0] < FRESH_S:
            reply(question.kept[1])
            return
        question.waiting.append(reply)
        if len(question.waiting) == 1:
            self._gather(question.what, {}, question.limit_s, functools.partial(self._found, question))

    def _found(self, question: _Question, found: Mapping[str, Found]) -> None:
        told = answer(self._whole(found))
        question.kept = self._agent.loop.clock.now(), told
        waiting, question.waiting = question.waiting, []
        for reply in waiting:
            reply(told)

    def _kill(self, request: Request, reply: Answer) -> None:
        wish = wish_of(request)
        if isinstance(wish, Response):
            reply(wish)
        elif wish.rank is None:
            reply(answer({"ending": True}))
            told = words.EndRequested(int(ExitCode.DO_NOT_REQUEUE), "ended by an operator, with everstep kill --job")
            self._agent.nodes.say(told)
        else:
            self._kill_rank(wish.rank, reply)

    def _drain(self, request: Request, reply: Answer) -> None:
        agent, refused = self._agent, drains(request)
        if refused is not None:
            reply(refused)
        elif agent.ending is not None or agent.draining.begun:
            reply(refusal(409, "the job is ending already"))
        else:
            reply(answer({"draining": True, "grace_s": agent.config.grace_s}))
            agent.drain(why="an operator, with everstep drain")

    def _exclude(self, request: Request, reply: Answer) -> None:
        node, nodes = node_of(request), self._agent.nodes
        if isinstance(node, Response):
            reply(node)
        elif node not in nodes.present:
            reply(refusal(409, f"this job has no node {node}; it has {', '.join(nodes.present)}"))
        else:
            self._ask_one("exclude", {}, node, reply)

    def _leave(self, then: Then) -> None:
        left = {"node": self._agent.nodes.name, "host": socket.gethostname()}
        self._agent.nodes.leave(
            "an operator asked, with everstep exclude", lambda why: then({"why": why} if why else left)
        )

    def _kill_rank(self, rank: int, reply: Answer) -> None:
        """Whoever has it now is asked: the agent of its node."""
        roster = self._agent.roster
        home = next((m.node for m in roster.members if m.rank == rank), None) if roster is not None else None
        if roster is None or home is None:
            ranks = "it has no ranks yet" if roster is None else f"its ranks are 0 to {roster.world_size - 1}"
            reply(refusal(409, f"this job has no rank {rank}: {ranks}"))
            return
        self._ask_one("kill", {"rank": rank}, home, reply)

    def _ask_one(self, what: str, arguments: Mapping[str, Any], node: str, reply: Answer) -> None:
        """Have one node do something; what it says is the answer, or why not."""

        def heard(found: Mapping[str, Found]) -> None:
            told = found.get(node, {"why": f"{node} did not answer in {LOOK_S:g} s"})
            reply(refusal(409, str(told["why"])) if told.get("why") else answer(told))

        self._gather(what, arguments, LOOK_S, heard, [node])

    def _kill_here(self, rank: int) -> Found:
        """As from outside: its death is a fault like any other."""
        worker = self._agent.crew.ranks.get(rank)
        if worker is None or worker.last is not None or not worker.process.pid:
            return {"why": f"rank {rank} has no process now: its place is being filled, or it has ended"}
        pid = worker.process.pid
        self._agent.notice(f"rank {rank} (pid {pid}) is killed: an operator asked for it", "warning")
        worker.process.signal(signal.SIGKILL)
        return {"rank": rank, "node": self._agent.nodes.name, "pid": pid}

    def _metrics(self, request: Request, reply: Answer) -> None:
        del request
        body = exposition.text(self._look(), self._recent.fault_count, self._recent.failed_saves)
        reply(Response(200, body, exposition.KIND))

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
        self,
        what: str,
        arguments: Mapping[str, Any],
        limit_s: float,
        then: Callable[[Mapping[str, Found]], None],
        whom: Collection[str] | None = None,
    ) -> None:
        """Ask `whom`, else all nodes that are here; `then` comes once, with what those found that answered in time."""
        own, number = self._agent.nodes.name, next(self._numbers)
        asked = self._agent.nodes.present if whom is None else whom
        others = [node for node in asked if node != own]
        message = {"kind": "control.ask", "number": number, "what": what, "arguments": dict(arguments)}
        self._rounds[number] = _Round(set(asked), deque(others), message, then)
        self._agent.loop.later(limit_s, lambda: self._conclude(number))
        for _ in range(AT_ONCE):
            self._ask_next(number)
        if own in asked:
            self._local[what](arguments, lambda found: self._heard(number, own, found))

    def _ask_next(self, number: int) -> None:
        """Ask one more node; the next when it has answered, or does not in a while."""
        round_ = self._rounds.get(number)
        if round_ is not None and round_.unasked:
            node = round_.unasked.popleft()
            self._tell(node, round_.message)
            self._agent.loop.later(NEXT_S, lambda: self._ask_after(number, node))

    def _ask_after(self, number: int, node: str) -> None:
        if number in self._rounds and node in self._rounds[number].awaited:
            self._ask_next(number)

    def _tell(self, node: str, message: Message) -> None:
        if self._host is not None:
            self._host.tell(node, message)

    def _heard(self, number: int, node: str, found: Found) -> None:
        round_ = self._rounds.get(number)
        if round_ is not None and node in round_.awaited:
            round_.awaited.discard(node)
            round_.found[node] = found
            if node != self._agent.nodes.name:
                self._ask_next(number)
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
        for fd in fds:
            os.close(fd)
        if message["kind"] == "control.stand":
            self._standing.answered(rank, message)

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
