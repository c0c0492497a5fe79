"""The worker's side: a fault hits inside the step it was planned for, at its place, on its rank.

Rule 1: hooks stand only during the step that is to be hit, on the injured rank (and, for a fault at the optimizer, on
        its peers): every other step runs as without an injector. Nothing draws random numbers, nothing touches values,
        no thread is started (FI-03).
Rule 2: a place inside the step is where a real fault of a peer hurts most: the middle of forward (an inner module), of
        backward (the gradient of that module's output: peers are then in the collective), or between this rank's
        optimizer.step() and its peers'.
Rule 3: a fault whose place is not passed (no model given, a module not called, a skipped optimizer step) hits at the
        next boundary: a plan of five means five.
Rule 4: torch is met only through the objects that are handed in; an in-place compiled model gets no inner hooks, since
        tracing them would change its graph.
Rule 5: handles are removed at the next boundary, never inside a hook (torch's optimizers iterate over the live dict).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from everstep.errors import UsageError
from everstep.events import Event, Notice
from everstep.faults import flags
from everstep.faults.calls import Call, Message
from everstep.faults.core import codec
from everstep.faults.core.plan import BACKWARD, BOUNDARY, FORWARD, OPTIMIZER, PlannedFault
from everstep.faults.injectors import inject

ANSWER_S = 10.0  # for the agent's word; it answers in milliseconds
PEER_S = 2.0  # at most, that a peer waits before its optimizer step


class Handle(Protocol):
    """What registering a hook returns."""

    def remove(self) -> None:
        """Take the hook away."""
        ...


class Module(Protocol):
    """As much of a torch module as is used here."""

    def modules(self) -> Iterable[Any]:
        """All modules, this one first."""
        ...

    def register_forward_pre_hook(self, hook: Callable[..., None]) -> Handle:
        """`hook(module, args)` before forward."""
        ...

    def register_forward_hook(self, hook: Callable[..., None]) -> Handle:
        """`hook(module, args, output)` after forward."""
        ...


class Optimizer(Protocol):
    """As much of a torch optimizer as is used here."""

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Handle:
        """`hook(optimizer, args, kwargs)` before step."""
        ...

    def register_step_post_hook(self, hook: Callable[..., None]) -> Handle:
        """`hook(optimizer, args, kwargs)` after step."""
        ...


class FaultHooks:
    """One rank's faults in one generation. All methods are called on the thread of the user's function."""

    def __init__(
        self, link_call: Call, rank: int, plan: Sequence[PlannedFault], emit: Callable[[Event], object]
    ) -> None:  # fmt: skip
        self._call = link_call
        self._rank = rank
        self._emit = emit
        self._mine = [f for f in plan if f.rank == rank]
        self._peers = [f for f in plan if f.rank != rank and f.position == OPTIMIZER]
        self._models: list[Module] = []
        self._optimizers: list[Optimizer] = []
        self._handles: list[Handle] = []
        self._armed: list[PlannedFault] = []

    def attach(self, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        """Say whose steps are to be hit. What lacks torch's hooks is left out (rule 3)."""
        self._models = [m for m in models if hasattr(m, "register_forward_hook") and not _compiled_in_place(m)]
        self._optimizers = [o for o in optimizers if hasattr(o, "register_step_post_hook")]

    def at_boundary(self, step: int) -> None:
        """`step` is about to begin: hit what is planned between steps, and make ready for what comes inside it."""
        self._remove()
        missed, self._armed = self._armed, []
        for fault in missed:
            text = f"fault {fault.index}: step {fault.step} passed no {fault.position} hook; it hits between steps"
            self._emit(Notice(text=text, level="warning"))
            self._hit(fault, BOUNDARY)
        for fault in [f for f in self._mine if f.step == step]:
            self._mine.remove(fault)
            self._arm(fault)
        for fault in [f for f in self._peers if f.step == step]:
            self._peers.remove(fault)
            self._await(fault)

    def detach(self) -> None:
        """Leave nothing behind on models and optimizers, and let go of them."""
        self._remove()
        self._armed, self._models, self._optimizers = [], [], []

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _arm(self, fault: PlannedFault) -> None:
        arm = {FORWARD: self._arm_forward, BACKWARD: self._arm_backward, OPTIMIZER: self._arm_optimizer}
        if fault.position == BOUNDARY or not (self._optimizers if fault.position == OPTIMIZER else self._models):
            self._hit(fault, BOUNDARY)
            return
        self._armed.append(fault)
        arm[fault.position](fault)

    def _once(self, fault: PlannedFault) -> None:
        """Called by hooks: the first one that is passed does the harm."""
        if fault in self._armed:
            self._armed.remove(fault)
            self._hit(fault, fault.position)

    def _arm_forward(self, fault: PlannedFault) -> None:
        for model in self._models:
            inner = _inner(model)
            self._handles.append(inner.register_forward_pre_hook(lambda *_: self._once(fault)))
            self._handles.append(model.register_forward_hook(lambda *_: self._once(fault)))

    def _arm_backward(self, fault: PlannedFault) -> None:
        def watch(_module: Any, _args: Any, output: Any) -> None:
            """Of the first output that has a gradient, be told when that gradient is there."""
            tensor = _graded(output)
            if tensor is not None and not watched:
                watched.append(True)
                self._handles.append(tensor.register_hook(lambda _grad: self._once(fault)))  # pyright: ignore[reportUnknownLambdaType]

        watched: list[bool] = []
        for model in self._models:
            self._handles.append(_inner(model).register_forward_hook(watch))
            self._handles.append(model.register_forward_hook(watch))

    def _arm_optimizer(self, fault: PlannedFault) -> None:
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._once(fault)))

    def _await(self, fault: PlannedFault) -> None:
        """Before our own step, wait until the injured rank's is done and the harm with it."""
        waited: list[bool] = []

        def wait(*_: Any) -> None:
            if not waited:
                waited.append(True)
                self._call({"kind": "fault.await", "index": fault.index}, PEER_S)

        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(wait))

    def _hit(self, fault: PlannedFault, position: str) -> None:
        reply = self._call({"kind": "fault.fire", "index": fault.index, "position": position}, ANSWER_S)
        if reply is None:
            text = f"fault {fault.index} is not injected: no word from the agent within {ANSWER_S:g} s"
            self._emit(Notice(text=text, level="warning"))
        elif reply["kind"] == "fault.go":
            where = "between steps" if position == BOUNDARY else f"at {position}"
            inject(fault.type, f"injected fault {fault.index}: {fault.type} at step {fault.step} {where}")


def arm(
    told: Mapping[str, Any], link_call: Call, rank: int, total: int | None, emit: Callable[[Event], object]
) -> FaultHooks | None:  # fmt: skip
    """Return the hooks for a loop of `total` steps (None: it does not say), or None where nothing is planned.

    `told` is what this rank's roster message carries under `fault`. Raises UsageError where the plan that was asked for
    cannot be made for this many steps.
    """
    rows, spec = told.get("rows"), flags.script_spec()
    if rows is None:
        if "rows" not in told and spec is None:
            return None
        asked = {} if spec is None else {"asked": codec.spec_to_json(spec)}
        reply = link_call({"kind": "fault.total", "steps": total, **asked}, ANSWER_S)
        rows = _rows_of(reply)
    faults = codec.from_rows(rows)
    return FaultHooks(link_call, rank, faults, emit) if faults else None


def _rows_of(reply: Message | None) -> list[list[Any]]:
    if reply is None:
        raise UsageError(
            f"the fault plan did not come from the agent within {ANSWER_S:g} s, so no fault could be injected"
        )
    if reply["kind"] == "fault.bad":
        raise UsageError(reply["text"])
    return cast("list[list[Any]]", reply["rows"])


def _compiled_in_place(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _inner(model: Module) -> Module:
    """Return the middle one of the model's leaves; the model itself where compiled parts must not be looked into."""
    modules = list(model.modules())
    if any(_compiled_in_place(m) or hasattr(m, "_orig_mod") for m in modules):
        return model
    leaves = [m for m in modules if not list(m.children())]
    return cast("Module", leaves[len(leaves) // 2])


def _graded(output: Any) -> Any:
    """Return the first tensor in `output` that will have a gradient, or None."""
    if hasattr(output, "register_hook"):
        return output if output.requires_grad else None
    if isinstance(output, Mapping):
        output = list(output.values())  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(output, list | tuple):
        found = (_graded(item) for item in cast("Sequence[Any]", output))
        return next((tensor for tensor in found if tensor is not None), None)
    return None
