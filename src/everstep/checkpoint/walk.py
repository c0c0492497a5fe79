"""Our own walk over what a training step changes: modules, optimizers, anything with a state dict, random generators.

Rule 1: reading is free of side effects. No `get_state_dict` of DCP (it steps a fresh optimizer, EXPERIMENTS E23), no
    `state_dict()` of modules or optimizers, no collective, no write into the training process. (One exception, which
    communicates nothing: an FSDP2 module left unsharded by an evaluation is told to reshard, as its own hook does.)
Rule 2: what rarely changes is walked once. Parts made of tensors alone are kept and revalidated by identity and
    storage pointer; parts with plain values are read anew each time.
Rule 3: restoring writes into the live tensors where they are; what the saved state lacks is taken away, so an
    optimizer saved before its first step comes back empty (CL-09). All is compared before anything is written.
Rule 4: random generators last, by a call of their own: whatever draws at construction must have drawn (B3, E24).
Rule 5: restoring and walking again gives the same bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from everstep.checkpoint.core.estimate import buffer_bytes
from everstep.checkpoint.core.layout import Encoder, Layout, Section, align
from everstep.checkpoint.core.segment import HEADER_BYTES
from everstep.checkpoint.generators import Generators, GeneratorSource
from everstep.checkpoint.modules import ModuleSource, Names
from everstep.checkpoint.optimizers import OptimizerSource
from everstep.checkpoint.tensors import Part, Payload, Reading, total_bytes, value_of
from everstep.errors import StateMismatch

RNG = "rng"
SHOWN = 12  # mismatches in one message


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say its state and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain values, containers, tensors and arrays."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take such a state."""
        ...


class Source(Protocol):
    """One object of the state: one or more sections."""

    def stable(self) -> list[Part]:
        """Return parts of tensors alone: the same objects as long as nothing but their bytes changes."""
        ...

    def changing(self) -> list[Part]:
        """Return the other parts, read anew."""
        ...

    def names(self) -> tuple[str, ...]:
        """Names of the sections that `restore` wants."""
        ...

    def mismatches(self, saved: Mapping[str, Section]) -> list[str]:
        """Say what does not fit; empty where all does. Writes nothing."""
        ...

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """Write the saved state into the live object."""
        ...

    def future_bytes(self) -> tuple[int, int]:
        """Return (payload bytes, leaves) that will come and do not exist yet."""
        ...


class ObjectSource:
    """A scheduler, a data loader, a scaler: through its own state_dict, each rank its own."""

    def __init__(self, name: str, thing: Stateful) -> None:
        self._name = name
        self._thing = thing
        self._reading = Reading(name, per_rank=True)

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
        """See `Source.mismatches`; the object judges its own state when it loads it."""
        del saved
        return []

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """See `Source.restore`."""
        section = saved[self._name]
        try:
            self._thing.load_state_dict(value_of(section.tree, section.leaves, payload))
        except (KeyError, ValueError, TypeError, AttributeError) as error:  # all else may pass by itself: a fault
            kind = type(self._thing).__qualname__
            raise StateMismatch(
                f"{self._name}: {kind}.load_state_dict refused the state that {kind}.state_dict gave before: "
                f"{type(error).__name__}: {error}. Build the object as it was built when the state was saved."
            ) from error

    def future_bytes(self) -> tuple[int, int]:
        """See `Source.future_bytes`."""
        return 0, 0


class StateWalk:
    """The state of one rank: what `run.steps` was given, and the random generators."""

    def __init__(self, state: Mapping[str, object], *, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self._generators = Generators(RNG)
        self._sources = _sources(state, world_size)
        self.optimizers = [thing for thing in state.values() if isinstance(thing, torch.optim.Optimizer)]
        self._encoder = Encoder()
        self.payload_bytes = 0  # of what was last collected
        self.stable = 0  # of the parts last collected, so many first ones are usually kept between walks
        self._placed: list[_Placed] = []

    def collect(self) -> tuple[Layout, list[Part]]:
        """Walk: return the layout and its parts. Parts that did not change are the objects of the last walk."""
        lasting = [part for source in self._sources for part in source.stable()]
        lasting.append(self._generators.part())
        if [placed.given for placed in self._placed] != lasting:
            self._place(lasting)
        parts, end = [placed.part for placed in self._placed], self._placed[-1].end
        self.stable = len(parts)
        for source in self._sources:
            for part in source.changing():
                placed, end = part.placed(end)
                parts.append(placed)
        self.payload_bytes = end
        return Layout(self.rank, self.world_size, tuple([p.section for p in parts])), parts

    def on_device(self) -> bool:
        """True where a part of the state lives on an accelerator."""
        return any(leaf.device != "cpu" for leaf in self.collect()[0].leaves())

    def encode(self, layout: Layout) -> bytes:
        """Return the JSON of a layout of this walk; text of what did not change is reused."""
        return self._encoder.encode(layout)

    def estimate(self) -> int:
        """Return the bytes of one buffer that holds this state, with what the first steps will add."""
        layout, _ = self.collect()
        future = [source.future_bytes() for source in self._sources]
        leaves = sum(1 for _ in layout.leaves()) + sum(count for _, count in future)
        payload = align(self.payload_bytes) + sum(size for size, _ in future)
        return buffer_bytes(payload, leaves, HEADER_BYTES)

    def restore(self, layout: Layout, payload: Payload) -> int:
        """Write a saved state into the live objects, random generators excepted; return its bytes.

        Raises StateMismatch, naming keys and shapes, before anything is written.
        """
        saved = {section.name: section for section in layout.sections}
        problems = list(self._mismatches(saved))
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            shown = "; ".join(problems[:SHOWN]) + more
            raise StateMismatch(
                f"rank {self.rank}: the saved state does not fit what run.steps was given: {shown}. Give it the same "
                "objects, built the same way; or start a new run to train something else."
            )
        for source in self._sources:
            source.restore(saved, payload)
        return total_bytes(layout.leaves())

    def restore_generators(self, layout: Layout, payload: Payload) -> None:
        """Set the random generators as they were: the very last thing before the next step."""
        section = layout.section(RNG)
        if section is not None:
            self._generators.restore(section, payload)

    def _mismatches(self, saved: Mapping[str, Section]) -> Iterator[str]:
        wanted = {name for source in self._sources for name in source.names()} | {RNG}
        for name in sorted(wanted - set(saved)):
            yield f"{name} is not in the saved state"
        for name in sorted(set(saved) - wanted):
            yield f"{name} was saved, but run.steps was not given it"
        for source in self._sources:
            if all(name in saved for name in source.names()):
                yield from source.mismatches(saved)

    def _place(self, parts: list[Part]) -> None:
        """Lay lasting parts out one after another; leaves that lay there before are the same objects again."""
        end, placed = 0, list[_Placed]()
        for n, part in enumerate(parts):
            known = self._placed[n] if n < len(self._placed) else None
            if known is None or known.start != end or known.given.section.leaves is not part.section.leaves:
                known = _Placed(part, end, *part.placed(end))
            elif known.given is not part:
                known = _Placed(part, end, part.having(known.part.section.leaves), known.end)
            placed.append(known)
            end = known.end
        self._placed = placed


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part as it was given and as it was laid out."""

    given: Part
    start: int
    part: Part
    end: int


def _sources(state: Mapping[str, object], world_size: int) -> list[Source]:
    modules = {name: thing for name, thing in state.items() if isinstance(thing, nn.Module)}
    walked = {name: ModuleSource(name, module, world_size) for name, module in modules.items()}
    names = Names(walked)
    made = [_source(name, thing, walked, names, world_size) for name, thing in state.items()]
    for source in walked.values():
        source.gated = frozenset(p for s in made if isinstance(s, OptimizerSource) for p in s.gated)
    order = (ModuleSource, OptimizerSource)
    return [s for s in made if isinstance(s, order)] + [s for s in made if not isinstance(s, order)]


def _source(
    name: str,
    thing: object,
    walked: Mapping[str, ModuleSource],
    names: Names,
    world_size: int,
) -> Source:
    if not name or name == RNG or "/" in name:
        raise TypeError(f"run.steps({name}=…): this name is taken or not allowed; choose another keyword.")
    if name in walked:
        return walked[name]
    if isinstance(thing, torch.optim.Optimizer) and type(thing).state_dict is torch.optim.Optimizer.state_dict:
        return OptimizerSource(name, thing, names, world_size)
    if type(thing).__name__ == "ZeroRedundancyOptimizer":
        raise TypeError(
            f"run.steps({name}=…): ZeroRedundancyOptimizer gathers its state over all ranks when it is asked for it. "
            "Use fully_shard (FSDP2), whose optimizer state is sharded as it stands."
        )
    if isinstance(thing, torch.Generator):
        return GeneratorSource(name, thing)
    if isinstance(thing, Stateful):
        return ObjectSource(name, thing)
    raise TypeError(
        f"run.steps({name}=…) was given a {type(thing).__module__}.{type(thing).__qualname__}, which has no state_dict "
        "and load_state_dict. Give it an object that has both (torchdata's StatefulDataLoader for a loader)."
    )
