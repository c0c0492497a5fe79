"""What an operator sees of this node: its processes, how far each rank is, its tiers, its last faults. Plain values.

Reads pages and /proc (some 50 us a process); asks nobody and changes nothing.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from everstep.launcher.agent.crew import Crew
from everstep.launcher.agent.host import AgentHost
from everstep.launcher.agent.nursery import Nursery
from everstep.launcher.agent.watch import Watch
from everstep.launcher.agent.worker import Worker
from everstep.launcher.config import LaunchConfig
from everstep.launcher.control.core.recent import Recent
from everstep.launcher.nodes.api import Nodes
from everstep.process import kernel
from everstep.process.page import Phase
from everstep.recovery.core import words
from everstep.recovery.core.world import World


class Seen(Protocol):
    """As much of the agent as is looked at."""

    config: LaunchConfig
    nursery: Nursery
    crew: Crew
    nodes: Nodes
    world: World
    watch: Watch
    roster: words.Roster | None
    run_dir: Path
    host: AgentHost


def node_view(agent: Seen, recent: Recent, now: float) -> dict[str, Any]:
    """Look at this node. Times are seconds, ages count back from now; None: not known, or not there yet."""
    roster, world = agent.roster, agent.world
    return {
        "node": agent.nodes.name,
        "number": agent.nodes.number,
        "host": socket.gethostname(),
        "run_dir": str(agent.run_dir),
        "job": agent.nursery.job,
        "script": agent.config.script,
        "wrapped": agent.config.wrapped,
        "phase": world.phase.value,
        "generation": None if roster is None else roster.generation,
        "world_size": agent.config.world_size if roster is None else roster.world_size,
        "restarts": len(world.causes),
        "step": agent.crew.step(),
        "typical_step_s": agent.watch.memory.learned.typical_s or None,
        "processes": list(_processes(agent, now)),
        "tiers": [*agent.host.shown(), *recent.tiers(now)],
        "faults": recent.faults(now),
        "notices": recent.notices(now),
    }


def _processes(agent: Seen, now: float) -> Iterator[dict[str, Any]]:
    yield _process("agent", "agent", os.getpid())
    if agent.nursery.zygotes.pid:
        yield _process("zygote", "zygote", agent.nursery.zygotes.pid)
    for pid in sorted(agent.nursery.spared):
        if kernel.status(pid) is not None:
            yield _process("hub", "hub", pid)
    for process in list(agent.nursery.processes.values()):
        worker = process.extra.get("worker")
        if not isinstance(worker, Worker):
            yield _process(process.name, process.name.partition("-")[0], process.pid)
        elif not worker.begun:
            yield _process(process.name, "spare", process.pid)
        else:
            yield rank_view(agent, worker, now)


def _process(name: str, role: str, pid: int) -> dict[str, Any]:
    known = kernel.status(pid)
    return {
        "name": name,
        "role": role,
        "pid": pid,
        "state": "gone" if known is None else known.state,
        "cpu_s": None if known is None else known.cpu_s,
        "resident_bytes": kernel.resident_bytes(pid),
        "rank": None,
    }


def rank_view(agent: Seen, worker: Worker, now: float) -> dict[str, Any]:
    """Look at one rank. One of a script without the wrapper tells nothing of its steps."""
    return _process(worker.process.name, "rank", worker.process.pid) | _progress(agent, worker, now)


def _progress(agent: Seen, worker: Worker, now: float) -> dict[str, Any]:
    told: dict[str, Any] = {"rank": worker.rank, "attempt": worker.attempt}
    if not agent.config.wrapped:
        return told | {"phase": "script", "step": None, "mark_age_s": None}
    page = worker.look()
    phase = "done" if worker.done else Phase.NAMES[page.phase] if 0 <= page.phase < len(Phase.NAMES) else "?"
    if page.phase == Phase.DECLARED and page.name:
        phase = f"phase {page.name}"
    return told | {
        "phase": phase if worker.attached else "before the wrapped call",
        "step": page.step if worker.attached else None,
        "generation": page.generation,
        "mark_age_s": now - page.mark_s if page.mark_s else None,
    }
