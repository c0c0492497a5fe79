"""The small agent of one worker: drives the world machine for it, and looks after it without its help.

A process of its own that imports no torch, started by the worker's first wrapped call. It holds the worker's pidfd and
progress page and one connection to the hub; the worker speaks to it as to an agent (`recovery.session`).

Rule 1: every rank's watcher steps the same machine with the same facts in the same order, so all decide alike.
Rule 2: cut off from the hub for `WATCHERS_LEASE_S`, or by its end, it ends its worker's generation with a story: nobody
        goes on with a rank that others count as lost.
Rule 3: it ends with its worker, whatever that dies of, and says so to the others first.

usage: python -m everstep.launcher.peers.watcher LINK_FD PAGE_FD WORKER_PID (then packets: begin)
"""

import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.clock import SYSTEM
from everstep.errors import ExitCode
from everstep.launcher.peers.core import ending, facts
from everstep.launcher.peers.core.books import BEAT_S, WATCHERS_LEASE_S
from everstep.launcher.peers.eyes import LOOK_S, Eyes
from everstep.launcher.peers.riding import Riding
from everstep.launcher.peers.stream import Stream
from everstep.process import kernel
from everstep.process.detach import detach
from everstep.process.loop import Loop
from everstep.process.page import Page
from everstep.recovery.core import words, world
from everstep.recovery.core.words import Incarnation
from everstep.recovery.line import Line
from everstep.recovery.link import Link
from everstep.telemetry import say

CONNECT_S = 10.0
VICTIM_S = 0.2
"""A rank that has only lost its connection speaks so much later: what it lost it to is the better story. Nothing waits
for it where that comes."""
WORDS = ("attached", "fault", "arrived", "completed", "heard", "replace", "asked", "refused", "left")
"""What a worker says to its agent, as far as it concerns us; see `launcher.agent.worker.WORDS`."""


class Watcher:
    """One worker's watcher, from its `begin` to its end."""

    def __init__(self, loop: Loop, link: Link, page: Page, pid: int) -> None:
        self._loop, self._clock = loop, loop.clock
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._eyes = Eyes(page, pid)
        self._link = Line(loop, link, self._said)
        self._hub: Stream | None = None
        self._hub_pidfd = -1  # where its process is one of this machine that our worker has started
        self._heard_hub_s = self._looked_s = self._clock.now()
        self._order: Mapping[str, Any] = {}
        self._me = Incarnation("", 0, 0)
        self._settings: Mapping[str, Any] = {}
        self._world: world.World | None = None
        self._stores: dict[int, Any] = {}
        self._riding = Riding(loop, self._link.send)
        self._inbox: deque[words.Event] = deque()
        self._due: float | None = None
        self._lost: list[int] = []  # ranks of the last roster that the present one has not
        self._over = False  # the end is decided: the worker is told, and has until its deadline
        self._orders: dict[type, Callable[[Any], None]] = {
            words.Spawn: lambda command: None,  # nobody can be started here; see core.ending
            words.Stop: self._stop,
            words.Kill: self._kill,
            words.Report: self._report,
            words.Publish: self._publish,
            words.Enter: lambda command: self._enter(command.roster),
            words.Drain: lambda command: self._tell(words.Drained(command.generation)),
            words.Finish: lambda command: self._finish(command.generation),
            words.End: lambda command: self._end(command.code, command.reason),
        }
        loop.watch(self._pidfd, self._gone)

    # -- the world -----------------------------------------------------------------------------------------------

    def _tell(self, event: words.Event) -> None:
        """Hand one event to the world machine, and do what it commands. What follows meanwhile waits its turn."""
        self._inbox.append(event)
        if len(self._inbox) > 1:
            return
        while self._inbox:
            if self._world is not None and not self._over:
                self._world, commands = world.step(self._world, self._inbox[0], self._clock.now())
                for command in commands:
                    self._orders[type(command)](command)
                self._look_for_the_end(self._world)
            self._inbox.popleft()
        due = world.wake_at(self._world) if self._world is not None else None
        if due is not None and not self._over and due != self._due:
            self._due = due
            self._loop.later(max(0.0, due - self._clock.now()) + 0.001, lambda: self._tell(words.Ticked()))

    def _look_for_the_end(self, view: world.World) -> None:
        reason = "" if self._over else ending.beyond_mending(view)
        if reason:
            self._end(int(ExitCode.FAILED), reason)

    def _say(self, event: words.Event, key: str | None = None, **riding: Any) -> None:
        """Tell everybody; it counts, for us too, when it comes back."""
        if self._hub is not None:
            self._hub.send({"kind": "fact", "fact": facts.encode(event) | riding, "key": key})

    # -- the hub -------------------------------------------------------------------------------------------------

    def _begin(self, order: Mapping[str, Any]) -> None:
        """The worker says who it is and where the hub is."""
        self._order, self._me = order, Incarnation.parse(order["incarnation"])
        self._riding.start(order["rider"], order["world_size"])
        try:
            line = socket.create_connection(tuple(order["hub"]), CONNECT_S)
        except OSError as error:
            host, port = order["hub"]
            self._fail(f"the hub at {host}:{port} cannot be reached: {error.strerror or error}")
            return
        self._heard_hub_s = self._clock.now()
        if order["hub_pid"]:
            with contextlib.suppress(ProcessLookupError):
                self._hub_pidfd = os.pidfd_open(order["hub_pid"])
        self._hub = Stream(self._loop, line, self._from_hub, self._cut_off)
        told = {name: order[name] for name in ("job", "rank", "world_size", "incarnation")}
        self._hub.send({"kind": "join", **told})

    def _from_hub(self, message: Mapping[str, Any]) -> None:
        self._heard_hub_s = self._clock.now()
        match message.get("kind"):
            case "joined":
                self._joined(message["settings"])
            case "refused":
                self._fail(str(message["text"]))
            case "fact":
                self._hear(message["fact"])
            case "probe":
                if self._eyes.ask(self._clock.now()):
                    self._link.send({"kind": "world.probe"})
            case "condemn":
                self._condemn(str(message["action"]), str(message["text"]))
            case _:
                pass

    def _joined(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        policy = words.Policy(
            world_size=self._order["world_size"],
            local_world_size=1,
            max_restarts=settings["max_restarts"],
            same_step_limit=settings["same_step_limit"],
            patience=settings["patience"],
            min_world_size=settings["min_world_size"],  # at once: nobody can be started here
            stop_deadline_s=settings["stop_deadline_s"],
            start_deadline_s=settings["start_deadline_s"],
        )
        self._world = world.begin(self._node, policy)
        self._say(words.Announced(self._me, words.Facts(self._node, 0, fresh=True)))
        self._tell(words.Ticked())
        self._view()

    @property
    def _node(self) -> str:
        """Every worker is a node of its own; sorted by name they stand in the launcher's order."""
        return f"rank-{self._order['rank']:07d}"

    def _hear(self, fact: Mapping[str, Any]) -> None:
        if self._world is None:
            return
        if fact["is"] == "gone":
            self._tell(self._world.death_of(Incarnation.parse(fact["incarnation"]), words.UNKNOWN_STATUS))
            return
        if "store" in fact:
            self._stores[fact["roster"]["generation"]] = fact["store"]
        if "told" in fact:
            self._riding.told(fact["facts"]["former_rank"], fact["told"])
        self._tell(facts.decode(fact))

    def _cut_off(self) -> None:
        self._hub = None
        self._fail("the connection to the hub, which rank 0's process started, has ended")

    def _fail(self, text: str) -> None:
        """There is nobody to go on with."""
        if self._world is None:
            self._link.send({"kind": "peers.failed", "text": text})
            self._leave()
        else:
            self._end(int(ExitCode.FAILED), text)

    # -- commands ------------------------------------------------------------------------------------------------

    def _stop(self, command: words.Stop) -> None:
        if command.incarnation == self._me:
            self._link.send({"kind": "world.stop", "generation": command.generation})

    def _kill(self, command: words.Kill) -> None:
        if command.incarnation == self._me:
            say(f"rank {self._rank} (pid {self._pid}) is killed: {command.reason}")
            kernel.kill(self._pid)

    def _report(self, command: words.Report) -> None:
        """The first of those that live says it once for all."""
        view, fault = self._world, command.fault
        if view is None or view.roster is None:
            return
        living = [m.incarnation for m in view.members if m.incarnation not in view.lost]
        if living[:1] == [self._me]:
            who = "" if fault.rank is None else f" of rank {fault.rank}"
            text = fault.text if fault.kind in ("stall", "wedged") else fault.text.partition("\n")[0][:300]
            say(f"generation {fault.generation} ended: {fault.kind}{who}: {text}")

    def _publish(self, command: words.Publish) -> None:
        self._say(words.Published(command.roster), key=f"roster/{command.roster.generation}")

    def _enter(self, roster: words.Roster) -> None:
        rank = roster.rank_of(self._me)
        if rank is None:
            return
        self._rank, first = rank, roster.generation == 0
        companions = {"peers": self._peers(roster), **self._riding.enter(roster, rank)}
        self._eyes.enter(roster.generation, rank)
        told = {
            "generation": roster.generation, "epoch": roster.epoch, "rank": rank, "world_size": roster.world_size,
            "store": self._stores.pop(roster.generation), "wrapped": True, "companions": companions,
            "master": self._order["master"], "watcher": os.getpid(),
        }  # fmt: skip
        self._link.send({"kind": "peers.assigned" if first else "world.assigned", **told})
        self._nodes = [m.node for m in roster.members]

    _rank: int = -1
    _nodes: Sequence[str] = ()

    def _peers(self, roster: words.Roster) -> Mapping[str, Any]:
        """What a rank assignment of the user's own needs: who was who, and who is lost."""
        now = {m.node: m.rank for m in roster.members}
        return {
            "former": {str(rank): now[node] for rank, node in enumerate(self._nodes) if node in now},
            "lost": [rank for rank, node in enumerate(self._nodes) if node not in now],
        }

    def _finish(self, generation: int) -> None:
        self._link.send({"kind": "world.finish", "generation": generation})
        self._leave()

    def _end(self, code: int, reason: str) -> None:
        """Have the worker leave its call with the story; one that does not is killed."""
        if self._over:
            return
        self._over = True
        self._link.send({"kind": "world.ended", "code": code, "text": reason})
        self._loop.later(self._settings.get("stop_deadline_s", 10.0), self._too_late)

    def _too_late(self) -> None:
        say(f"rank {self._rank} (pid {self._pid}) is killed: it has not left its function after the end of the job")
        kernel.kill(self._pid)

    def _leave(self) -> None:
        """Nothing is left to be watched."""
        self._over = True
        self._riding.close()
        self._link.send({"kind": "peers.over"})
        if self._hub is not None:
            self._hub.send({"kind": "bye"})
            self._hub.close()
        self._loop.stop()

    # -- the worker ----------------------------------------------------------------------------------------------

    def _said(self, message: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        prefix, _, verb = str(message["kind"]).partition(".")
        if prefix == "peers":
            self._begin(message)
        elif prefix == "world" and verb in WORDS:
            getattr(self, f"_on_{verb}")(message)
        else:
            self._riding.said(prefix, message)

    def _on_attached(self, message: Mapping[str, Any]) -> None:
        del message
        self._eyes.attached = True

    def _on_fault(self, message: Mapping[str, Any]) -> None:
        generation, text = message["generation"], message["text"]
        if message.get("victim"):  # whoever closed the connection has more to say, and is about to
            self._loop.later(VICTIM_S, lambda: self._fault(generation, "exception", "worker", text, victim=True))
        else:
            self._fault(generation, "exception", "worker", text)

    def _fault(self, generation: int, kind: str, noticed_by: str, text: str, *, victim: bool = False) -> None:
        fault = words.Fault(generation, kind, noticed_by, self._me, self._rank, self._eyes.step, text, victim=victim)
        self._say(words.Faulted(fault))

    def _on_arrived(self, message: Mapping[str, Any]) -> None:
        brought = words.Facts(self._node, 0, fresh=False, former_rank=self._rank, dirt=tuple(message["dirt"]))
        self._say(
            words.Arrived(message["generation"], self._me, brought), told=self._riding.left(message["generation"])
        )

    def _on_completed(self, message: Mapping[str, Any]) -> None:
        self._say(words.Completed(message["generation"], self._me))

    def _on_heard(self, message: Mapping[str, Any]) -> None:
        told = {"waiting": bool(message["waiting"]), "inside": bool(message["inside"])}
        self._eyes.answered(self._clock.now(), stack=str(message["stack"]), **told)
        self._view()

    def _on_replace(self, message: Mapping[str, Any]) -> None:
        self._say(words.Wedged(self._me, str(message["text"]), self._eyes.step))

    def _on_asked(self, message: Mapping[str, Any]) -> None:
        text = f"rank {self._rank}: {message['text']}, code {message['code']}"
        self._say(words.EndRequested(int(ExitCode.FAILED), text))

    def _on_refused(self, message: Mapping[str, Any]) -> None:
        self._say(words.EndRequested(int(message["code"]), f"rank {self._rank}: {message['text']}"))

    def _on_left(self, message: Mapping[str, Any]) -> None:
        """The call is over in this process, whatever the others do: it cannot come back."""
        del message
        if not self._over and self._world is not None:
            self._say(self._world.death_of(self._me, words.UNKNOWN_STATUS, self._eyes.step))
        self._leave()

    def _gone(self) -> None:
        """The kernel says that the worker has ended. How, only its parent is told."""
        self._loop.unwatch(self._pidfd)
        self._link.close()  # what it still said comes first
        if self._world is not None and not self._over:
            self._say(self._world.death_of(self._me, words.UNKNOWN_STATUS, self._eyes.step))
        self._leave()

    # -- time ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Watch until there is nothing to be watched."""
        self._tick()
        self._loop.run()

    def _tick(self) -> None:
        now = self._clock.now()
        gap, self._looked_s = now - self._looked_s, now
        runs = self._world is not None and self._world.phase is world.Phase.RUNNING
        jumped = self._eyes.look(now, gap, runs=runs)
        if jumped:
            self._heard_hub_s = now
        if self._hub is not None and now - self._heard_hub_s > WATCHERS_LEASE_S:
            self._hub.close()
            self._hub = None
            if self._hub_pidfd >= 0:  # a stopped one would stay for ever
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._hub_pidfd, signal.SIGKILL)
            self._fail(f"the hub, which rank 0's process started, has not been heard for {WATCHERS_LEASE_S:g} s")
        self._check_hard(now)
        if now - self._viewed_s >= BEAT_S:
            self._view()
        self._loop.later(LOOK_S, self._tick)

    _viewed_s: float = 0.0

    def _view(self) -> None:
        """Let the hub see our page, and both sides that we live."""
        self._viewed_s = self._clock.now()
        if self._hub is not None and self._world is not None:
            self._hub.send({"kind": "view", **self._eyes.view(self._viewed_s)})
        self._link.send({"kind": "peers.beat"})

    def _check_hard(self, now: float) -> None:
        limit = self._settings.get("hard_s")
        silent = self._eyes.deaf_s(now)
        if limit is not None and silent > limit and not self._over:
            text = f"its interpreter has not run for {silent:.1f} s, --hard-timeout {limit:g}"
            self._say(words.Wedged(self._me, text, self._eyes.step))
            kernel.kill(self._pid)

    def _condemn(self, action: str, text: str) -> None:
        """The hub's verdict on our worker's silence."""
        if action == "kill" or not self._eyes.attached:
            self._say(words.Wedged(self._me, text, self._eyes.step))
        else:
            self._fault(self._eyes.generation, "stall", "page", f"{text}\n{self._eyes.stack}".rstrip())


def main(argv: list[str]) -> int:
    """Watch one worker."""
    detach()
    link, page, pid = Link.from_fd(int(argv[0])), Page(int(argv[1])), int(argv[2])
    kernel.name_process("everstep-watcher")
    try:
        watcher = Watcher(Loop(SYSTEM), link, page, pid)
    except ProcessLookupError:  # it has ended before we began
        return 0
    watcher.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
