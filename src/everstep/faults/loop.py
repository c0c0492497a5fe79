"""`maybe_fail(step)`: the one line by which a loop without `run.steps` takes part in a fault plan.

Where an agent is on the other end of a line, it answers as it does for `run.steps`. Without one (plain torchrun, a
world of one, an unwrapped script) the run folder itself remembers: a fault is let go by whoever creates its file first,
so once is once there too. In such loops faults hit where `maybe_fail` is called, and nobody waits for a peer.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import environ
from everstep.errors import UsageError
from everstep.events import Event, FaultInjected
from everstep.faults import flags
from everstep.faults.calls import Call, Message
from everstep.faults.core import codec
from everstep.faults.core.plan import Plan, plan_of
from everstep.faults.hooks import FaultHooks, arm
from everstep.telemetry import JsonLines, Telemetry, say

PLAN, FIRED = "faults.json", "faults-fired"


@dataclass
class _Loop:
    """What this process's loop knows: at most one runs in it."""

    hooks: FaultHooks | None = None
    ready = False
    line: Callable[[], FaultHooks | None] | None = None


_loop = _Loop()


def connect(told: Mapping[str, Any], link_call: Call, rank: int, emit: Callable[[Event], object]) -> None:
    """Called by whoever holds the line to an agent, once a generation, before the user's function is entered."""
    _loop.hooks, _loop.ready = None, False
    _loop.line = lambda: arm(told, link_call, rank, None, emit)


def disconnect() -> None:
    """The generation is over."""
    _loop.hooks, _loop.ready, _loop.line = None, False, None


def maybe_fail(step: int) -> None:
    """Say that `step` (counted from 1) is about to begin; a fault that is planned for it on this rank hits now."""
    if not _loop.ready:
        _loop.hooks = (_loop.line or _alone)()
        _loop.ready = True
    if _loop.hooks is not None:
        _loop.hooks.at_boundary(step)


def _alone() -> FaultHooks | None:
    spec = flags.script_spec()
    folder = environ.get("EVERSTEP_RUN_DIR")
    if spec is None and not environ.get(flags.LAUNCHER_ASKED):
        return None
    if folder is None:
        raise UsageError(
            "faults without `everstep run`: set EVERSTEP_RUN_DIR to a folder that remembers which have been let go"
        )
    place = environ.placement()
    if spec is None:
        plan = _stored(Path(folder))
    elif spec.steps is None:
        raise UsageError("faults in a loop of your own: the plan needs the number of steps; add --fault-steps")
    else:
        plan = plan_of(spec, place.world_size, spec.steps)
        if place.rank == 0:
            say(codec.table(plan))
    telemetry = Telemetry("worker", rank=place.rank)
    return FaultHooks(_answers(Path(folder), plan, place.rank, telemetry), place.rank, plan.faults, telemetry.emit)


def _stored(folder: Path) -> Plan:
    try:
        text = (folder / PLAN).read_text()
    except FileNotFoundError:
        raise UsageError(
            "faults in a loop of your own: the plan needs the number of steps; add --fault-steps"
        ) from None
    return codec.loads(text, str(folder / PLAN))[0]


def _answers(folder: Path, plan: Plan, rank: int, telemetry: Telemetry) -> Call:
    """Return what stands in for the agent: same questions, same answers."""

    def answer(message: Message, timeout_s: float) -> Message | None:
        del timeout_s
        if message["kind"] != "fault.fire":
            return {"kind": "fault.pass"}
        fault = next(f for f in plan.faults if f.index == message["index"])
        if not _claim(folder / FIRED, fault.index):
            return {"kind": "fault.no"}
        if not telemetry.sinks:
            telemetry.sinks.append(JsonLines(folder / "events" / f"faults-{os.getpid()}.jsonl"))
        telemetry.emit(
            FaultInjected(
                fault=fault.index, type=fault.type, step=fault.step, injured_rank=rank, position=message["position"]
            )
        )
        return {"kind": "fault.go"}

    return answer


def _claim(folder: Path, index: int) -> bool:
    """Be the first, ever, to create this fault's file."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(folder / str(index), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    os.fsync(fd)
    os.close(fd)
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(above)
    os.close(above)
    return True
