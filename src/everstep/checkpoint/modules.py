"""A module's parameters and persistent buffers, named as its `state_dict` would name the model inside its wrappers.

Wrappers are looked through: DDP's `module`, torch.compile's `_orig_mod`, activation checkpointing's
`_checkpoint_wrapped_module`, FSDP1's `_fsdp_wrapped_module` are no part of a name, so a state fits with and without
them. FSDP1's state dicts gather (EXPERIMENTS M5, C7) and are never called: `flat` reads its flat parameters.
"""

# nn.Module shows where a tensor stands, and a DTensor its local part without a dispatch, only in underscored names.
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from everstep.checkpoint.core.items import leaves_of
from everstep.checkpoint.core.layout import Leaf, Node, Pieces, Ref, Section
from everstep.checkpoint.core.ranges import tensors_of
from everstep.checkpoint.core.rectangles import Rectangle
from everstep.checkpoint.core.reshard import Wish
from everstep.checkpoint.fitting import Fitting, Undo, taken_back
from everstep.checkpoint.flat import Flat, Ranged, flats, is_flat
from everstep.checkpoint.remake import value_of
from everstep.checkpoint.sharded import local_of
from everstep.checkpoint.tensors import Collector, Part, Payload, Reading, as_saved, check, dtype_name, stored
from everstep.checkpoint.watch import Watch

EXTRA = "extra_state"
_TRANSPARENT = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

Entry = tuple[str, Tensor, bool]
"""Name, tensor, and whether it is a parameter."""


class ModuleSource:
    """One model."""

    def __init__(self, name: str, module: nn.Module, world_size: int, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle  # of its extra state
        self._name = name
        self._module = module
        self._world_size = world_size
        self.part: Part | None = None  # as last walked
        self._watch = Watch()
        self._extra = False
        self._reading = Reading(f"{name}/{EXTRA}", per_rank=world_size > 1, allow_pickle=allow_pickle)
        self.gated: frozenset[Tensor] = frozenset()  # parameters that an optimizer's step alone writes
        ddp = [(prefix, inner) for prefix, inner in walk_modules(module) if _is_ddp(inner)]
        self._ddp = [prefix for prefix, _ in ddp]
        self._led = [prefix for prefix, inner in ddp if getattr(inner, "broadcast_buffers", False)]
        self.flats = self._flats()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters with their names, FSDP1's apart; a tied one comes once, under its first name."""
        seen: set[int] = set()
        for fqn, value, is_parameter in self._entries():
            if is_parameter and id(value) not in seen:
                seen.add(id(value))
                yield fqn, value

    def replicated_parameters(self) -> list[Tensor]:
        """Parameters that DDP keeps equal on all ranks."""
        return [v for fqn, v, is_parameter in self._entries() if is_parameter and self._same(fqn)]

    def stable(self) -> list[Part]:
        """See `walk.Source`."""
        if self.part is None or not self._watch.holds():
            _reshard(self._module)
            self.part = self._walk()
        return [self.part]

    def changing(self) -> list[Part]:
        """See `walk.Source`."""
        if not self._extra:
            return []
        return [self._reading.part({fqn: module.get_extra_state() for fqn, module in _with_extra(self._module)})]

    def names(self) -> tuple[str, ...]:
        """See `walk.Source`."""
        self.stable()
        return (self._name, f"{self._name}/{EXTRA}") if self._extra else (self._name,)

    def mismatches(self, saved: Mapping[str, Section]) -> list[str]:
        """See `walk.Source`."""
        return [text for texts in self._tensor_mismatches(saved[self._name]).values() for text in texts]

    def _tensor_mismatches(self, section: Section) -> dict[str, list[str]]:
        """By name: why a tensor cannot be taken, or is not there."""
        live = {fqn: value for fqn, value, _ in self._entries()}
        ranged = {fqn: (flat, each) for flat in self.flats for fqn, each in _names(flat)}
        found = {
            fqn: [f"{self._name}/{fqn} is missing in the saved state"]
            for fqn in (*live, *ranged)
            if fqn not in section.tree
        }
        for fqn, node in section.tree.items():
            path = f"{self._name}/{fqn}"
            if fqn in ranged:
                flat, each = ranged[fqn]
                found[fqn] = cuts_differ(path, node, section, each, flat.parameter.dtype)
            elif fqn not in live:
                found[fqn] = [f"{path} was saved and is not in the model"]
            else:
                found[fqn] = node_differs(path, node, section, live[fqn])
        return {fqn: texts for fqn, texts in found.items() if texts}

    def wishes(self, saved: Mapping[str, Section]) -> Mapping[str, Wish]:
        """See `walk.Source`."""
        section, (part,) = saved.get(self._name), self.stable()
        if section is None:
            return {}
        like: dict[int, Leaf] = {}
        for fqn, live in part.section.tree.items():
            there = section.tree.get(fqn)
            if isinstance(there, Ref) and isinstance(live, Ref):
                like[there.leaf] = part.section.leaves[live.leaf]
        return {self._name: Wish(like, by_leaf=True, wanted=tensors_of(part.section))}

    def fitting(self, saved: Mapping[str, Section], refused: Mapping[str, str]) -> Fitting:
        """See `walk.Source`."""
        section = saved.get(self._name)
        section = Section(self._name, {}) if section is None else section
        wrong = self._tensor_mismatches(section)
        live = [*(fqn for fqn, _, _ in self._entries()), *(fqn for flat in self.flats for fqn, _ in _names(flat))]
        missing = [f"{self._name}/{fqn}" for fqn in live if fqn not in section.tree]
        left_over = [f"{self._name}/{fqn}" for fqn in section.tree if fqn not in live]
        for fqn, node in section.tree.items():
            paths = [section.leaves[n].path for n in leaves_of(node) or ()]
            if fqn in live and any(path in refused for path in paths):
                wrong[fqn] = [refused[path] for path in paths if path in refused]
        fits = {fqn: node for fqn, node in section.tree.items() if fqn in live and fqn not in wrong}
        differing = [text for fqn, texts in wrong.items() if fqn in live and fqn in section.tree for text in texts]
        taken = {self._name: Section(self._name, fits, section.leaves)} if self._name in saved else {}
        return self._with_fitting_extra(saved, Fitting(taken, missing, left_over, differing))

    def _with_fitting_extra(self, saved: Mapping[str, Section], fitting: Fitting) -> Fitting:
        name = f"{self._name}/{EXTRA}"
        live, extra = {fqn for fqn, _ in _with_extra(self._module)}, saved.get(name)
        there: dict[str, Any] = {} if extra is None else extra.tree
        if extra is not None:
            kept = {fqn: node for fqn, node in there.items() if fqn in live}
            fitting.taken[name] = Section(name, kept, extra.leaves, extra.per_rank)
        fitting.missing.extend(f"{name}/{fqn}" for fqn in sorted(live - set(there)))
        fitting.left_over.extend(f"{name}/{fqn}" for fqn in there if fqn not in live)
        return fitting

    def attempt(self, saved: Mapping[str, Section], payload: Payload) -> Undo:
        """See `walk.Source`: what `set_extra_state` refuses is known before a tensor is written."""
        before = [(module, copy.deepcopy(module.get_extra_state())) for _, module in _with_extra(self._module)]

        def undo() -> None:
            for module, state in before:
                module.set_extra_state(state)

        try:
            self._set_extra(saved, payload)
        except BaseException as error:
            taken_back(undo, error)
            raise
        return undo

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """See `walk.Source`."""
        _reshard(self._module)
        section = saved.get(self._name)
        tree: Mapping[str, Node] = {} if section is None else section.tree
        with torch.no_grad():
            for fqn, value, _ in self._entries():
                if section is not None and fqn in tree:
                    local_of(value).copy_(stored(section.leaves[tree[fqn].leaf], payload))
            for flat in self.flats:
                flat.reshard()
                originals = {each: original for original, each in flat.originals.items()}
                for each in flat.ranged:
                    if section is not None and each.fqn in tree:
                        copy_pieces(flat.views(each, originals.get(each)), tree[each.fqn], section, payload)
        self._set_extra(saved, payload)

    def _set_extra(self, saved: Mapping[str, Section], payload: Payload) -> None:
        extra = saved.get(f"{self._name}/{EXTRA}")
        if extra is None:
            return
        states = value_of(extra.tree, extra.leaves, payload, allow_pickle=self._allow_pickle)
        for fqn, module in _with_extra(self._module):
            if fqn in states:
                module.set_extra_state(states[fqn])

    def future_bytes(self) -> tuple[int, int]:
        """See `walk.Source`."""
        return 0, 0

    def _flats(self) -> list[Flat]:
        return flats(f"run.steps({self._name}=…)", walk_modules(self._module))

    def _same(self, fqn: str) -> bool:
        return self._world_size == 1 or any(fqn.startswith(prefix) for prefix in self._ddp)

    def _walk(self) -> Part:
        collector, watch = Collector(self._name), Watch()
        self.flats = self._flats()
        tree: dict[str, Node] = {}
        own = self._world_size > 1
        for fqn, value, is_parameter in self._entries():
            same = not own or (is_parameter and self._same(fqn))
            path, late = f"{self._name}/{fqn}", value in self.gated
            leads = not same and not is_parameter and any(fqn.startswith(prefix) for prefix in self._led)
            tree[fqn] = collector.tensor(path, value, replicated=same, per_rank=not same, late=late, leads=leads)
            watch.tensor(value, collector.local)
        for flat in self.flats:
            self._collect_flat(flat, collector, tree, watch)
        for module in self._module.modules():
            _watch(watch, module)
        self._watch = watch
        self._extra = any(True for _ in _with_extra(self._module))
        return collector.part(tree)

    def _collect_flat(self, flat: Flat, collector: Collector, tree: dict[str, Node], watch: Watch) -> None:
        originals = {each: original for original, each in flat.originals.items()}
        everywhere = flat.replicated and flat.group_size == self._world_size
        for fqn, each in _names(flat):
            original = originals.get(each)
            late = (flat.parameter if original is None else original) in self.gated
            tree[fqn] = collector.pieces(
                f"{self._name}/{fqn}", flat.views(each, original), each.shape, flat.parameter.dtype,
                replicated=everywhere, late=late,
            )  # fmt: skip
            if original is not None:
                watch.tensor(original, original.detach())
        place = flat.attributes.get("_local_shard")
        watch.place(flat.attributes, "_local_shard", place)
        watch.tensor(flat.parameter if place is None else place, flat.part())

    def _entries(self) -> Iterator[Entry]:
        cut = {fqn for flat in self.flats for fqn, _ in _names(flat)}
        for prefix, module in walk_modules(self._module):
            for key, value in module._parameters.items():
                if value is not None and not is_flat(value) and prefix + key not in cut:
                    yield prefix + key, value, True
            skipped = module._non_persistent_buffers_set
            for key, value in module._buffers.items():
                if value is not None and key not in skipped:
                    yield prefix + key, value, False


class Cut(NamedTuple):
    """What stands behind one of an optimizer's parameters under FSDP1."""

    names: tuple[str, ...]
    ranged: tuple[Ranged, ...]
    everywhere: bool  # every rank holds all of it
    flat: Flat
    whole: bool  # the flat parameter itself, not one of the parameters in it


class Names:
    """What an optimizer calls its parameters: the models' names for them, looked up anew when a model has changed."""

    def __init__(self, models: Mapping[str, ModuleSource], world_size: int = 1) -> None:
        self._models = models
        self._world_size = world_size
        self._parts: list[Part | None] | None = None
        self.known: Mapping[Tensor, str] = {}
        self.cut: Mapping[Tensor, Cut] = {}
        self.replicated: frozenset[Tensor] = frozenset()

    def look(self) -> Mapping[Tensor, str]:
        """Return the names, another object whenever one may differ; call it after `stable` of the models."""
        parts = [source.part for source in self._models.values()]
        if parts != self._parts:
            self._parts, known, cut = parts, dict[Tensor, str](), dict[Tensor, Cut]()
            for name, source in self._models.items():
                prefix = f"{name}." if len(self._models) > 1 else ""
                for fqn, parameter in source.parameters():
                    known.setdefault(parameter, prefix + fqn)
                for flat in source.flats:
                    cut |= self._cuts(prefix, flat)
            self.known, self.cut = known, cut
            self.replicated = frozenset(p for s in self._models.values() for p in s.replicated_parameters())
        return self.known

    def _cuts(self, prefix: str, flat: Flat) -> dict[Tensor, Cut]:
        everywhere = flat.replicated and flat.group_size == self._world_size
        names = tuple(prefix + each.fqn for each in flat.ranged)
        cuts = {
            original: Cut((prefix + each.fqn,), (each,), everywhere, flat, whole=False)
            for original, each in flat.originals.items()
        }
        return cuts or {flat.parameter: Cut(names, flat.ranged, everywhere, flat, whole=True)}


def _names(flat: Flat) -> Iterator[tuple[str, Ranged]]:
    """All names of a flat parameter's parameters; tied ones twice."""
    yield from ((each.fqn, each) for each in flat.ranged)
    yield from flat.tied


def _watch(watch: Watch, module: nn.Module) -> None:
    """Everything by which `walk_modules` and `_entries` find their way."""
    for name in ("_parameters", "_buffers", "_modules"):
        held = getattr(module, name)
        watch.place(vars(module), name, held)
        watch.size(held)
        for key, value in held.items():
            watch.place(held, key, value)
    if module._buffers:
        watch.contents(module._non_persistent_buffers_set)


def walk_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules with the prefix of their tensors' names; wrappers have that of what they wrap.

    A module that stands in two places comes twice, as in `state_dict`: its tensors become aliases.
    """
    yield prefix, module
    for key, child in module._modules.items():
        if child is not None:
            hidden = key in _TRANSPARENT or (key == "module" and _is_ddp(module))
            yield from walk_modules(child, prefix if hidden else f"{prefix}{key}.")


def differences(leaf: Leaf, live: Tensor) -> list[str]:
    """Say in what a saved tensor and the live one that is to take it differ."""
    if as_saved(leaf, live):
        return []
    check(live, leaf.path)
    local = local_of(live)
    saved_facts = (leaf.dtype, leaf.shape, leaf.whole_shape)
    live_facts = (dtype_name(local.dtype), tuple(local.shape), tuple(live.shape))
    if saved_facts == live_facts:
        return []
    return [f"{leaf.path} was saved as {_told(*saved_facts)} and is {_told(*live_facts)}"]


def node_differs(path: str, node: Node, section: Section, live: Tensor) -> list[str]:
    """The same for a node of a tree, which may stand for something else than one tensor."""
    if isinstance(node, Ref):
        return differences(section.leaves[node.leaf], live)
    return [
        f"{path} was saved as the pieces of an FSDP1 shard and is a tensor here; DCP reshards (docs/checkpoints.md)"
    ]


def cuts_differ(path: str, node: Node, section: Section, each: Ranged, dtype: torch.dtype) -> list[str]:
    """Say in what the saved pieces of a parameter and the live ones of FSDP1 differ."""
    here = [(p.rectangle.offsets, p.rectangle.sizes) for p in each.pieces]
    if not isinstance(node, Pieces):
        return [f"{path} was saved as one tensor and is a range of FSDP1 here; DCP reshards (docs/checkpoints.md)"]
    there = [(section.leaves[n].starts, section.leaves[n].shape) for n in node.leaves]
    saved, mine = (node.dtype, node.shape, there), (dtype_name(dtype), each.shape, here)
    if saved == mine:
        return []
    return [f"{path} was saved as {_cut_told(*saved)} and is {_cut_told(*mine)}"]


def _cut_told(dtype: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    return f"{dtype}{list(shape)}, of it " + (", ".join(f"{list(s)} at {list(o)}" for o, s in boxes) or "nothing")


def copy_pieces(views: list[tuple[Rectangle, Tensor]], node: Pieces, section: Section, payload: Payload) -> None:
    """Write the saved pieces into live memory; `cuts_differ` has found nothing."""
    for (_, view), number in zip(views, node.leaves, strict=True):
        view.copy_(stored(section.leaves[number], payload))


def _told(dtype: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}" + ("" if shape == whole else f" of {list(whole)}")


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


def _with_extra(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    for prefix, inner in walk_modules(module):
        if type(inner).get_extra_state is not plain:
            yield prefix + "_extra_state", inner


def _reshard(module: nn.Module) -> None:
    """An FSDP2 module whose last forward was not followed by a backward still holds whole parameters."""
    for inner in module.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(inner).__mro__):
            inner.reshard()  # pyright: ignore[reportCallIssue]
