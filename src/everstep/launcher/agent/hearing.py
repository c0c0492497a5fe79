"""What workers say, and what becomes of it: words for the world machine, wishes, answers to probes."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from everstep.clock import Clock
from everstep.errors import ExitCode
from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.host import AgentHost
from everstep.launcher.agent.nursery import Nursery
from everstep.launcher.agent.stores import Stores
from everstep.launcher.agent.watch import Watch
from everstep.launcher.agent.worker import Worker, positive, well_formed
from everstep.launcher.config import LaunchConfig
from everstep.launcher.nodes.api import Nodes
from everstep.process.loop import Loop
from everstep.recovery.core import words
from everstep.recovery.core.world import World

VICTIM_S = 0.2
"""A rank that has only lost its connection is heard so much later: what it lost it to is the better story. Nothing
waits for it where that is heard, and a death or an exception is."""


class Hearer(Protocol):
    """As much of the agent as is used here."""

    config: LaunchConfig
    loop: Loop
    nursery: Nursery
    crew: Crew
    clock: Clock
    nodes: Nodes
    host: AgentHost
    watch: Watch
    world: World
    stores: Stores

    def fault(
        self,
        worker: Worker,
        kind: str,
        noticed_by: str,
        text: str,
        generation: int | None = None,
        *,
        victim: bool = False,
    ) -> None:
        """A worker's function is at fault."""
        ...

    def recheck(self) -> None:
        """What was outstanding may be done."""
        ...

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger."""
        ...


class Hearing:
    """Hears the workers of one agent."""

    def __init__(self, agent: Hearer) -> None:
        self._agent = agent

    def heard(self, worker: Worker, kind: str, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Take one message of a worker; the descriptors that came with it are closed here, or a companion's."""
        prefix, _, verb = kind.partition(".")
        if prefix != "world":
            self._agent.host.message(worker, prefix, message, fds)
            return
        for fd in fds:
            os.close(fd)
        if well_formed(verb, message):
            getattr(self, f"_on_{verb}")(worker, message)
        else:
            self._agent.notice(
                f"{worker.process.name} said {kind!r} in a form that is unknown here; it is not heard", "warning"
            )

    def _on_hello(self, worker: Worker, message: Mapping[str, Any]) -> None:
        del message
        self._agent.nodes.say(words.Announced(worker.incarnation, worker.facts(self._agent.nodes.name, fresh=True)))

    def _on_left(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Its call is over, and it is on its way out; its death says the rest."""
        worker.left = True

    def _on_listens(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """From here on a signal has it write its stacks; one of another range would end it."""
        number = int(message["signal"])
        worker.dump_signal = number if signal.SIGRTMIN <= number <= signal.SIGRTMAX else 0

    def _on_attached(self, worker: Worker, message: Mapping[str, Any]) -> None:
        worker.attached = True
        worker.drains = message.get("drains") is True
        self._heed(message)
        worker.lasting = frozenset(self._agent.nursery.strays_of(worker.process))

    def _heed(self, wishes: Mapping[str, Any]) -> None:
        """The call has limits of its own; the operator's flags come before them."""
        own = self._agent.watch.own
        soft, hard = positive(wishes.get("soft_s")), positive(wishes.get("hard_s"))
        automatic = own.automatic or (wishes.get("automatic") is True and (own.soft_s, own.hard_s) == (None, None))
        self._agent.watch.own = replace(own, soft_s=own.soft_s or soft, hard_s=own.hard_s or hard, automatic=automatic)
        known = self._agent.world.policy
        known = replace(
            known,
            stop_deadline_s=positive(wishes.get("stop_s")) or known.stop_deadline_s,
            same_step_limit=int(positive(wishes.get("alike")) or known.same_step_limit),
            patience=int(positive(wishes.get("patience")) or known.patience),
        )
        least = int(positive(wishes.get("least")) or 1)
        if known.min_world_size is not None:  # whether the world may shrink at all is the operator's word
            known = replace(known, min_world_size=max(known.min_world_size, min(least, known.world_size)))
        self._agent.world = replace(self._agent.world, policy=known)

    def _on_fault(self, worker: Worker, message: Mapping[str, Any]) -> None:
        self._agent.stores.suspect(message["text"])
        text, generation = message["text"], message["generation"]
        if message.get("victim") is not True:
            self._agent.fault(worker, message["fault"], "worker", text, generation)
            return
        self._agent.nursery.reap()  # what it has lost may be dead, and says more; or it is about to speak for itself
        self._agent.loop.later(
            VICTIM_S, lambda: self._agent.fault(worker, "exception", "worker", text, generation, victim=True)
        )

    def _on_arrived(self, worker: Worker, message: Mapping[str, Any]) -> None:
        worker.done = False
        facts = worker.facts(self._agent.nodes.name, fresh=False, dirt=tuple(message["dirt"]))
        self._agent.nodes.say(words.Arrived(message["generation"], worker.incarnation, facts))

    def _on_completed(self, worker: Worker, message: Mapping[str, Any]) -> None:
        worker.done = True
        self._agent.nodes.say(words.Completed(message["generation"], worker.incarnation))

    def _on_heard(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """An answer to a probe: it hears us, and this is where it stands."""
        worker.probe_sent, worker.heard_s = None, self._agent.clock.now()
        worker.waiting, worker.stack = bool(message["waiting"]), str(message["stack"])
        worker.inside = bool(message["inside"])
        self._agent.recheck()

    def _on_replace(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """The worker itself says that it is not fit to go on (a swallowed interrupt, a thread that will not end)."""
        self._agent.nodes.say(words.Wedged(worker.incarnation, str(message["text"]), self._agent.crew.step()))

    def _on_asked(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """The wrapped function itself asked for the end."""
        text = f"rank {worker.rank}: {message['text']}, code {message['code']}"
        self._agent.nodes.say(words.EndRequested(int(ExitCode.FAILED), text))

    def _on_noticed(self, worker: Worker, message: Mapping[str, Any]) -> None:
        self._agent.notice(f"rank {worker.rank}: {message['text']}", "warning")

    def _on_refused(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """What the script asked for cannot be done here; a restart would meet the same."""
        who = f"rank {worker.rank}: "
        self._agent.nodes.say(words.EndRequested(int(message["code"]), who + str(message["text"]).removeprefix(who)))

    def _on_script_failed(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Its traceback stands on the console; a script that cannot even begin is not begun again."""
        if not self._agent.config.wrapped:
            self._agent.nursery.reap()  # a death may have caused it: those that a stop brings about explain nothing
        worker.raised = True
        hopeless = message["hopeless"] and worker.attempt == 0
        kind, victim = ("script", False) if hopeless else ("exception", message.get("victim") is True)
        self._agent.fault(worker, kind, "worker", str(message["text"]), victim=victim)
