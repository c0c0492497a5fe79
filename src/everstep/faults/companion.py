"""The agent's side of fault injection: the plan, and which of its faults have been let go.

Rule 1: a worker asks before it does harm (`fault.fire`), and does none without `fault.go`.
Rule 2: a fault is recorded, on disk and synced, before `fault.go` is said. Whatever dies then, it is never let go
        again: not after a restart in process, of a process, or of the whole job in the same run folder (FI-01).
Rule 3: the ledger hears of a fault before it happens.
Rule 4: peers that wait before their own optimizer step (`fault.await`) are let on RELEASE_S after the injured rank has
        been told to go, so that the harm comes first. They wait by their own deadline, never for us alone.

Rule 5: on several nodes each companion makes the same plan; one that lets a fault go tells the others before it says
        `fault.go`, so that they record it too, for the rank may be theirs one day, and let their own ranks on. Who
        comes later hears of those that were let go before it has ranks (`telling`).

Answers carry the question's `call` number (`faults.calls`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import UsageError
from everstep.events import FaultInjected, Notice
from everstep.faults.core import codec
from everstep.faults.core.plan import Plan, PlannedFault, Spec, plan_of
from everstep.faults.flags import Request
from everstep.recovery.api import Child, Host, Message, NodeHost
from everstep.recovery.core.words import Roster
from everstep.telemetry import say

RELEASE_S = 0.05
FILE = "faults.json"


@dataclass
class _Peers:
    """Ranks that wait before their optimizer step for one fault. `due_s`: when they are let on."""

    waiting: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (rank, call)
    due_s: float | None = None


class FaultCompanion:
    """Rides on the agent. `request` is None where `everstep run` has no fault flags: a script may have its own."""

    prefix = "fault"

    def __init__(self, request: Request | None = None, show: Callable[[str], None] = say) -> None:
        self._request = request
        self._show = show
        self._spec: Spec | None = request.spec if request else None
        self._plan: Plan | None = None
        self._fired: dict[int, float] = {}
        self._peers: dict[int, _Peers] = {}
        self._told_unfired = False
        self._refusal: str | None = None
        self._others: list[str] = []

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """See `NodeCompanion.on_nodes`."""
        self._others = [node for node in nodes if node != self._among_nodes.node]

    def on_node_message(self, node: str, message: Message) -> None:
        """See `NodeCompanion.on_node_message`: a fault is let go on `node`."""
        index = int(message["index"])
        self._fired[index] = float(message["wall_s"])
        fault = self._find(index)
        if fault is not None:
            self._save_fired(fault)
        self._let_on(index)

    def telling(self) -> Message:
        """See `TellingCompanion.telling`: what has been let go."""
        return {"fired": {str(index): wall_s for index, wall_s in self._fired.items()}}

    def told(self, node: str, message: Message) -> None:
        """See `TellingCompanion.told`."""
        for index, wall_s in dict(message["fired"]).items():
            fault = self._find(int(index))
            if int(index) not in self._fired:
                self._fired[int(index)] = float(wall_s)
                if fault is not None:
                    self._save_fired(fault)

    def start(self, host: Host) -> None:
        """Take up the run folder's plan, or make one where all of it is known already."""
        self._host = host
        self._path = Path(host.run_dir) / FILE
        if self._request is None:
            return
        self._adopt_stored(self._request.spec, self._request.plan)
        if self._plan is None and self._request.plan is not None:
            codec.check_world(self._request.plan, host.world_size)
            self._take(self._request.plan)
        elif self._plan is None and self._spec is not None and self._spec.steps is not None:
            self._take(plan_of(self._spec, host.world_size, self._spec.steps))

    def _adopt_stored(self, spec: Spec | None, plan: Plan | None) -> None:
        if not self._path.exists():
            return
        stored, fired = codec.loads(self._path.read_text(), str(self._path))
        same = stored.spec == spec if spec is not None else plan is not None and stored.faults == plan.faults
        if not same:
            raise UsageError(
                f"{self._path} holds another fault plan than the flags ask for, and its faults may have been let go "
                "already; give the same flags again, or take a new --run-dir"
            )
        self._plan, self._fired = stored, fired
        self._show(codec.table(stored, fired))

    def _take(self, plan: Plan) -> None:
        """Make `plan` the job's: write it down, and show it."""
        self._write(self._path, codec.dumps(plan))
        if self._request and self._request.save_to:
            self._save_copy(self._request.save_to, plan)
        self._plan = plan
        self._show(codec.table(plan))

    @property
    def _among_nodes(self) -> NodeHost:
        host: NodeHost = self._host  # type: ignore[assignment]  # on_nodes comes from one
        return host

    def _save_copy(self, path: Path, plan: Plan) -> None:
        try:
            self._write(path, codec.dumps(plan))
        except OSError as error:
            raise UsageError(f"--save-fault-plan {path}: {error.strerror}; name a file in a writable folder") from error

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Replace the file by a whole, synced one, or leave it as it is."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """Answer a worker's question."""
        for fd in fds:
            os.close(fd)
        match message["kind"]:
            case "fault.total":
                self._on_total(rank, message)
            case "fault.fire":
                self._on_fire(rank, message)
            case "fault.await":
                self._on_await(rank, message)
            case other:
                self._host.emit(
                    Notice(text=f"fault injection: rank {rank} said {other!r}, unknown here", level="warning")
                )

    def _answer(self, rank: int, call: int, kind: str, **body: Any) -> None:
        self._host.send(rank, {"kind": f"fault.{kind}", "call": call, **body})

    def _on_total(self, rank: int, message: Message) -> None:
        """A loop says how many steps it has: make the plan at the first word, hand it to each that asks."""
        try:
            if message.get("asked"):
                self._ask_for(codec.spec_from_json(message["asked"]))
            if self._plan is None and self._spec is not None and self._refusal is None:
                self._take(plan_of(self._spec, self._host.world_size, self._steps(message)))
        except (UsageError, OSError) as error:
            self._refusal = str(error)
        if self._refusal is not None:
            self._answer(rank, message["call"], "bad", text=self._refusal)
        else:
            self._answer(rank, message["call"], "plan", rows=self._rows())

    def _steps(self, message: Message) -> int:
        assert self._spec is not None
        steps = self._spec.steps or message["steps"]
        if steps is None:
            raise UsageError("a fault plan needs the number of steps, which this loop does not say; add --fault-steps")
        return int(steps)

    def _ask_for(self, spec: Spec) -> None:
        """A script has fault flags of its own."""
        if self._spec == spec:
            return
        if self._request is not None or self._spec is not None:
            raise UsageError("the script's fault flags differ between ranks, or `everstep run` has a plan of its own")
        self._adopt_stored(spec, None)
        self._spec = spec

    def _rows(self) -> list[list[int | str]]:
        return codec.rows([f for f in self._plan.faults if f.index not in self._fired]) if self._plan else []

    def _find(self, index: int) -> PlannedFault | None:
        return next((f for f in self._plan.faults if f.index == index), None) if self._plan else None

    def _on_fire(self, rank: int, message: Message) -> None:
        fault = self._find(message["index"])
        allowed = fault is not None and fault.rank == rank and fault.index not in self._fired
        if fault is None or not allowed or not self._record(fault):
            self._answer(rank, message["call"], "no")
            return
        self._host.emit(
            FaultInjected(
                fault=fault.index, type=fault.type, step=fault.step, injured_rank=rank, position=message["position"]
            )
        )
        fired = {"kind": "fault.fired", "index": fault.index, "wall_s": self._fired[fault.index]}
        for node in self._others:
            self._among_nodes.tell(node, fired)
        self._answer(rank, message["call"], "go")
        self._let_on(fault.index)

    def _let_on(self, index: int) -> None:
        """Ranks that wait for this fault go on a moment later."""
        self._peers.setdefault(index, _Peers()).due_s = self._host.clock.now() + RELEASE_S
        self._host.later(RELEASE_S)

    def _record(self, fault: PlannedFault) -> bool:
        self._fired[fault.index] = self._host.clock.wall()
        why = self._save_fired(fault)
        if why:
            del self._fired[fault.index]
            text = f"fault {fault.index} is not injected: {self._path} cannot be written ({why})"
            self._host.emit(Notice(text=text, level="error"))
        return not why

    def _save_fired(self, fault: PlannedFault) -> str:
        """Write down what has been let go; return why that cannot be, or nothing."""
        assert self._plan is not None, f"{fault} is of a plan"
        try:
            self._write(self._path, codec.dumps(self._plan, self._fired))
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _on_await(self, rank: int, message: Message) -> None:
        index = message["index"]
        peers = self._peers.get(index)
        over = index in self._fired and (peers is None or peers.due_s is None)
        if over or self._find(index) is None:
            self._answer(rank, message["call"], "pass")
        else:
            self._peers.setdefault(index, _Peers()).waiting.append((rank, message["call"]))

    def on_tick(self, now: float) -> None:
        """Let peers on whose time has come."""
        for index in [i for i, peers in self._peers.items() if peers.due_s is not None and peers.due_s <= now]:
            for rank, call in self._peers.pop(index).waiting:
                self._answer(rank, call, "pass")

    def on_stopped(self, generation: int) -> None:
        """Nobody of that generation waits any more."""
        del generation
        self._peers.clear()

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """Tell each rank what is still to come, or that it must ask once it knows its number of steps."""
        if self._plan is not None:
            told: Message = {"rows": self._rows()}
        elif self._spec is not None:
            told = {"rows": None}
        else:
            return {}
        return {member.rank: told for member in roster.members}

    def drained(self, completed: bool) -> bool:
        """Nothing is outstanding here; a plan that was not carried out whole is told once."""
        if completed and not self._told_unfired and self._rows():
            self._told_unfired = True
            left = ", ".join(f"step {row[1]} rank {row[2]}" for row in self._rows())
            self._host.emit(Notice(text=f"faults that were planned but not reached: {left}", level="warning"))
        return True

    def problems(self) -> Sequence[str]:
        """Injection never spoils an exit status by itself."""
        return ()

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """We have no helpers."""

    def on_child_exit(self, child: Child, status: int) -> None:
        """We have no helpers."""

    def close(self) -> None:
        """Nothing is held."""
