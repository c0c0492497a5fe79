"""Objects that say their own state: schedulers, loaders, scalers, a user's own."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.checkpoint.core.layout import Section
from everstep.checkpoint.core.ranges import tensors_of
from everstep.checkpoint.core.reshard import POSITION, Wish
from everstep.checkpoint.fitting import Fitting, Undo, other_class, taken_back
from everstep.checkpoint.remake import spread_in, value_of
from everstep.checkpoint.tensors import Part, Payload, Reading, payload_of
from everstep.data import position_of
from everstep.errors import StateMismatch

_REFUSED = (
    "{name}: the position of {who} in the data counts for each rank alone, so a world of another size would repeat or "
    "skip samples. Sample with everstep.data.GlobalSampler; or, if its state means the same in a world of any size, "
    "say `counts_whole_world = True` in its class (docs/data.md)"
)


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say its state and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain values, containers, tensors and arrays."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take such a state."""
        ...


class ObjectSource:
    """A scheduler, a data loader, a scaler: through its own state_dict, each rank its own."""

    def __init__(
        self, name: str, thing: Stateful, *, allow_pickle: bool = False, lenders: Callable[[], list[DTensor]] = list
    ) -> None:
        self._name = name
        self._thing = thing
        self._allow_pickle, self._lenders = allow_pickle, lenders
        # Both load what any other of their kind has saved, without a word: a StepLR's into an ExponentialLR.
        self._kind = type(thing).__name__ if isinstance(thing, Optimizer | LRScheduler) else ""
        self._reading = Reading(name, per_rank=True, allow_pickle=allow_pickle, kind=self._kind)

    def stable(self) -> list[Part]:
        """See `Source.stable`."""
        return []

    def changing(self) -> list[Part]:
        """See `Source.changing`."""
        return [self._reading.part(self._thing.state_dict())]

    def names(self) -> tuple[str, ...]:
        """See `Source.names`."""
        return (self._name,)

    def mismatches(self, saved: Mapping[str, Section]) -> list[str]:
        """See `Source.mismatches`; but for its class, the object judges its own state when it loads it."""
        return other_class(saved[self._name], self._kind)

    def wishes(self, saved: Mapping[str, Section]) -> Mapping[str, Wish]:
        """See `Source.wishes`: a position must count for the whole world; else a shard's like is a live shard."""
        position = position_of(self._thing)
        if position.counts_whole_world:
            return {self._name: Wish(counts=True, holds=POSITION if position.ours else frozenset())}
        if position.who:
            return {self._name: Wish(refusal=_REFUSED.format(name=self._name, who=position.who))}
        there = saved.get(self._name)
        (part,) = self.changing()
        live = {leaf.path: leaf for leaf in part.section.leaves if leaf.placements}
        leaves = enumerate(() if there is None else there.leaves)
        like = {n: live[leaf.path] for n, leaf in leaves if leaf.path in live}
        return {self._name: Wish(like, wanted=tensors_of(part.section))}

    def fitting(self, saved: Mapping[str, Section], refused: Mapping[str, str]) -> Fitting:
        """See `Source.fitting`: all or nothing, which the object decides."""
        wrong = [why for name, why in refused.items() if name == self._name or name.startswith(f"{self._name}/")]
        wrong += other_class(saved[self._name], self._kind) if self._name in saved else []
        if wrong:
            return Fitting(differing=wrong)
        return Fitting({self._name: saved[self._name]}) if self._name in saved else Fitting(missing=[self._name])

    def attempt(self, saved: Mapping[str, Section], payload: Payload) -> Undo:
        """See `Source.attempt`."""
        (part,) = self.changing()
        before = self._value(part.section, payload_of(part))
        try:
            self.restore(saved, payload)
        except BaseException as error:
            taken_back(lambda: self._thing.load_state_dict(before), error)
            raise
        return lambda: self._thing.load_state_dict(before)

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """See `Source.restore`."""
        value = self._value(saved[self._name], payload)
        try:
            self._thing.load_state_dict(value)
        except (KeyError, ValueError, TypeError, AttributeError) as error:  # all else may pass by itself: a fault
            kind = type(self._thing).__qualname__
            raise StateMismatch(
                f"{self._name}: {kind}.load_state_dict refused the state that {kind}.state_dict gave before: "
                f"{type(error).__name__}: {error}. Build the object as it was built when the state was saved."
            ) from error

    def _value(self, section: Section, payload: Payload) -> Any:
        spread = spread_in(section)
        live = self._thing.state_dict() if spread else None
        lenders = self._lenders() if spread else ()
        return value_of(
            section.tree, section.leaves, payload, allow_pickle=self._allow_pickle, live=live, lenders=lenders
        )

    def future_bytes(self) -> tuple[int, int]:
        """See `Source.future_bytes`."""
        return 0, 0
