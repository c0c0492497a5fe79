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

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from everstep.checkpoint.core.estimate import buffer_bytes
from everstep.checkpoint.core.layout import Encoder, Layout, Leaf, Section, align
from everstep.checkpoint.core.ranges import cut_otherwise
from everstep.checkpoint.core.reshard import Digest, Resharded, Wish, reshard
from everstep.checkpoint.core.segment import HEADER_BYTES
from everstep.checkpoint.fitting import Fitting, Partial, Undo, merged, shown, taken_back
from everstep.checkpoint.generators import Generators, GeneratorSource, is_generator
from everstep.checkpoint.modules import ModuleSource, Names
from everstep.checkpoint.objects import ObjectSource, Stateful
from everstep.checkpoint.optimizers import OptimizerSource
from everstep.checkpoint.remake import numbers_in, pickled_in, refusal
from everstep.checkpoint.tensors import Part, Payload, total_bytes
from everstep.checkpoint.values import ValueSource
from everstep.errors import StateMismatch

RNG = "rng"
_TAKEN = (RNG, "ranks")  # the second stands before names of what belongs to one rank (core/items.py)
NOTHING: Mapping[str, str] = {}


def may_be_called(name: str) -> bool:
    """True where an object of the state can have this name."""
    return bool(name) and name not in _TAKEN and "/" not in name


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

    def wishes(self, saved: Mapping[str, Section]) -> Mapping[str, Wish]:
        """Say how its sections are to look here, where another world saved them; one that is left out is plain."""
        ...

    def fitting(self, saved: Mapping[str, Section], refused: Mapping[str, str]) -> Fitting:
        """Return what of the saved state would be taken, and what not. `refused`: see `Resharded`. Writes nothing."""
        ...

    def attempt(self, saved: Mapping[str, Section], payload: Payload) -> Undo:
        """Set what the user's own code may refuse; return how to take it back. What raises has left nothing set."""
        ...

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """Write the saved state into the live object; what `saved` lacks stays as it is."""
        ...

    def future_bytes(self) -> tuple[int, int]:
        """Return (payload bytes, leaves) that will come and do not exist yet."""
        ...


class StateWalk:
    """The state of one rank: what `run.steps` was given, and the random generators.

    With `values`, plain tensors and values may stand in `state`, in containers of any depth, beside objects that have
    a state; those that cannot be changed in place (a number) are set in `state` itself, a mutable mapping then.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        *,
        rank: int = 0,
        world_size: int = 1,
        allow_pickle: bool = False,
        values: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._allow_pickle = allow_pickle
        self._generators = Generators(RNG)
        self._sources = _sources(state, world_size, allow_pickle=allow_pickle, values=values)
        self.optimizers = [thing for thing in state.values() if isinstance(thing, torch.optim.Optimizer)]
        self._encoder = Encoder()
        self.payload_bytes = 0  # of what was last collected
        self.stable = 0  # of the parts last collected, so many first ones are usually kept between walks
        self._placed: list[_Placed] = []
        self._changing: list[_Placed] = []

    def collect(self) -> tuple[Layout, list[Part]]:
        """Walk: return the layout and its parts. Parts that did not change are the objects of the last walk."""
        lasting = [part for source in self._sources for part in source.stable()]
        lasting.append(self._generators.part())
        if [placed.given for placed in self._placed] != lasting:
            self._placed = _laid_out(lasting, 0, self._placed)
        self.stable = len(lasting)
        changing = [part for source in self._sources for part in source.changing()]
        self._changing = _laid_out(changing, self._placed[-1].end, self._changing)
        parts = [placed.part for placed in (*self._placed, *self._changing)]
        self.payload_bytes = self._changing[-1].end if self._changing else self._placed[-1].end
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

    def divided_as(self, layout: Layout) -> bool:
        """True where no tensor of a model is another rectangle of the same whole than the one that was saved."""
        saved = {section.name: section for section in layout.sections}
        for source in self._sources:
            for name, wish in source.wishes(saved).items():
                if wish.by_leaf and any(_divides(saved[name].leaves[n], live) for n, live in wish.like.items()):
                    return False
                if name in saved and cut_otherwise(saved[name], wish.wanted):
                    return False
        return True

    def reshard(self, saved: Sequence[Layout], digest: Digest) -> Resharded:
        """Return what this rank takes up of a state that a world of another size saved, all of its ranks' layouts."""
        first = {section.name: section for section in saved[0].sections}
        wishes = {name: wish for source in self._sources for name, wish in source.wishes(first).items()}
        return reshard(saved, self.rank, self.world_size, {RNG: Wish(draws=True)} | wishes, digest)

    def restore(self, layout: Layout, payload: Payload, refused: Mapping[str, str] = NOTHING) -> int:
        """Write a saved state into the live objects, random generators excepted; return its bytes.

        `refused`: what `Resharded` says of a state from another world. Raises StateMismatch, naming keys and shapes,
        with the live objects as they were; so does a payload that raises, where it was asked before (`State.prepare`).
        """
        saved = {section.name: section for section in layout.sections}
        problems = self.problems(layout, refused)
        if problems:
            raise StateMismatch(
                f"rank {self.rank}: the saved state does not fit what run.steps was given: {shown(problems, '; ')}. "
                "Give it the same objects, built the same way; or another --checkpoint-dir to train something else."
            )
        self._write(dict.fromkeys(range(len(self._sources)), saved), payload)
        return total_bytes(layout.leaves())

    def problems(self, layout: Layout, refused: Mapping[str, str] = NOTHING) -> list[str]:
        """Say what of a saved state does not fit; empty where all does. Writes nothing."""
        return [*refused.values(), *self._mismatches({section.name: section for section in layout.sections}, refused)]

    def restore_what_fits(self, layout: Layout, payload: Payload, refused: Mapping[str, str] = NOTHING) -> Partial:
        """The same with `strict=False`: what does not fit stays as it is, and is listed. Generators come back whole."""
        saved = {section.name: section for section in layout.sections}
        if not self._allow_pickle:
            refused = {**refused, **{name: refusal(paths) for name, s in saved.items() if (paths := [*pickled_in(s)])}}
        fittings = [source.fitting(saved, refused) for source in self._sources]
        all_of_it = merged(fittings)
        self._write({n: fitting.taken for n, fitting in enumerate(fittings) if fitting.taken}, payload)
        known = {name for source in self._sources for name in source.names()} | {RNG}
        unknown = [name for name in saved if name not in known]
        taken = {id(s.leaves[n]): s.leaves[n] for s in all_of_it.taken.values() for n in numbers_in(s.tree)}
        return Partial(
            total_bytes(taken.values()), tuple(all_of_it.missing), (*all_of_it.left_over, *unknown),
            tuple(all_of_it.differing),
        )  # fmt: skip

    def _write(self, taken: Mapping[int, Mapping[str, Section]], payload: Payload) -> None:
        """Write, by number of the source. What a user's object may refuse comes first, and is taken back if one does.

        It comes again in its turn: a scheduler may set what its optimizer has just been given.
        """
        undone: list[Undo] = []
        written = ""
        try:
            for n, saved in taken.items():
                undone.append(self._sources[n].attempt(saved, payload))
            for n, saved in taken.items():
                self._sources[n].restore(saved, payload)
                written = written or self._sources[n].names()[0]
        except BaseException as error:
            for undo in reversed(undone):
                taken_back(undo, error)
            if written:
                error.add_note(f"{written} had been written by then: restore again, from another copy, before going on")
            raise

    def restore_generators(self, layout: Layout, payload: Payload) -> None:
        """Set the random generators as they were: the very last thing before the next step."""
        section = layout.section(RNG)
        if section is not None:
            self._generators.restore(section, payload)

    def _mismatches(self, saved: Mapping[str, Section], refused: Mapping[str, str]) -> Iterator[str]:
        wanted = {name for source in self._sources for name in source.names()} | {RNG}
        told = {name for name in wanted if any(key == name or key.startswith(f"{name}/") for key in refused)}
        for name in sorted(wanted - set(saved) - told):
            yield f"{name} is not in the saved state"
        for name in sorted(set(saved) - wanted):
            yield f"{name} was saved, but run.steps was not given it"
        if not self._allow_pickle:
            pickled = [path for name in sorted(wanted & set(saved)) for path in pickled_in(saved[name])]
            yield from [refusal(pickled)] if pickled else []
        for source in self._sources:
            if all(name in saved for name in source.names()):
                yield from source.mismatches(saved)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part as it was given and as it was laid out."""

    given: Part
    start: int
    part: Part
    end: int


def _laid_out(parts: list[Part], start: int, before: list[_Placed]) -> list[_Placed]:
    """Lay parts out one after another from `start` on; leaves that lay there before are the same objects again."""
    end, placed = start, list[_Placed]()
    for n, part in enumerate(parts):
        known = before[n] if n < len(before) else None
        if known is None or known.start != end or known.given.section.leaves is not part.section.leaves:
            known = _Placed(part, end, *part.placed(end))
        elif known.given is not part:
            known = _Placed(part, end, part.having(known.part.section.leaves), known.end)
        placed.append(known)
        end = known.end
    return placed


@dataclass(frozen=True, slots=True)
class _Manner:
    """How objects are taken."""

    allow_pickle: bool
    values: bool
    lenders: Callable[[], list[DTensor]]


def _divides(saved: Leaf, live: Leaf) -> bool:
    there = saved.shape, saved.starts, bool(saved.placements)
    return saved.whole_shape == live.whole_shape and there != (live.shape, live.starts, bool(live.placements))


def _lenders(modules: Iterable[ModuleSource]) -> list[DTensor]:
    """Return the live DTensors of the models: they lend their meshes to what is made anew."""
    return [value for source in modules for _, value in source.parameters() if isinstance(value, DTensor)]


def _sources(state: Mapping[str, object], world_size: int, *, allow_pickle: bool, values: bool) -> list[Source]:
    modules = {name: thing for name, thing in state.items() if isinstance(thing, nn.Module)}
    walked = {
        name: ModuleSource(name, module, world_size, allow_pickle=allow_pickle) for name, module in modules.items()
    }
    names = Names(walked, world_size)
    # No way back from a source to the walk: a cycle would keep a failed attempt's model until the next collection.
    manner = _Manner(allow_pickle, values, functools.partial(_lenders, walked.values()))
    made = [_source(name, state, walked, names, world_size, manner) for name in state]
    for source in walked.values():
        source.gated = frozenset(p for s in made if isinstance(s, OptimizerSource) for p in s.gated)
    order = (ModuleSource, OptimizerSource)
    return [s for s in made if isinstance(s, order)] + [s for s in made if not isinstance(s, order)]


def _source(
    name: str,
    state: Mapping[str, object],
    walked: Mapping[str, ModuleSource],
    names: Names,
    world_size: int,
    manner: _Manner,
) -> Source:
    thing = state[name]
    if not may_be_called(name):
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
    if is_generator(thing):
        return GeneratorSource(name, thing)
    if isinstance(thing, Stateful) and not isinstance(thing, type):
        return ObjectSource(name, thing, allow_pickle=manner.allow_pickle, lenders=manner.lenders)
    if manner.values:
        return ValueSource(name, state, world_size, allow_pickle=manner.allow_pickle, lenders=manner.lenders)
    raise TypeError(
        f"run.steps({name}=…) was given a {type(thing).__module__}.{type(thing).__qualname__}, which has no state_dict "
        "and load_state_dict. Give it an object that has both (torchdata's StatefulDataLoader for a loader)."
    )
