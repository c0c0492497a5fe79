"""An optimizer's state by the names of its parameters, read from and set into `optimizer.state` directly.

Under FSDP1 a parameter of the optimizer is a flat one, or a range of one of the model's: what lies beside it is told as
rectangles of the model's parameters, as the module's own are.

Its own `state_dict` numbers parameters by position, and its `load_state_dict` casts and replaces tensors; DCP's helper
steps it. None of them is called. State that does not exist yet is not made; state that was not saved is taken away.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from everstep.checkpoint.beside import made as made_beside
from everstep.checkpoint.beside import shaped_as, takes
from everstep.checkpoint.core.estimate import state_bytes, state_tensors
from everstep.checkpoint.core.items import leaves_of
from everstep.checkpoint.core.layout import ALIGNMENT, Leaf, Pieces, Ref, Section
from everstep.checkpoint.core.ranges import Parts, Place, Wanted
from everstep.checkpoint.core.rectangles import Rectangle
from everstep.checkpoint.core.reshard import Wish
from everstep.checkpoint.fitting import Fitting, Undo, other_class
from everstep.checkpoint.flat import Ranged
from everstep.checkpoint.modules import Cut, Names, copy_pieces, cuts_differ, differences
from everstep.checkpoint.param_groups import Groups
from everstep.checkpoint.remake import fresh, value_of
from everstep.checkpoint.sharded import local_of
from everstep.checkpoint.tensors import Collector, Part, Payload, stored
from everstep.checkpoint.watch import Watch

_SCALAR_LEAVES = 1


class OptimizerSource:
    """One optimizer."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        names: Names,
        world_size: int,
    ) -> None:
        self._state_name = f"{name}/state"
        self._groups_name = f"{name}/param_groups"
        self._optimizer = optimizer
        self._naming = names
        self._known = names.look()
        self._own = world_size > 1
        self._part: Part | None = None
        self._watch = Watch()
        self._plain = True
        self._names: list[list[str]] = []  # of each group's parameters, as last walked
        self._groups = Groups(self._groups_name, own=self._own)
        self.gated = gated(optimizer)

    def stable(self) -> list[Part]:
        """See `walk.Source`."""
        known = self._naming.look()
        if self._part is None or known is not self._known or not self._watch.holds():
            self._known = known
            self._part = self._walk()
        return [self._part] if self._plain else []

    def changing(self) -> list[Part]:
        """See `walk.Source`."""
        state = [] if self._plain else [self._walk()]
        return [*state, self._groups.part(self._optimizer.param_groups, self._names)]

    def names(self) -> tuple[str, ...]:
        """See `walk.Source`."""
        return self._state_name, self._groups_name

    def mismatches(self, saved: Mapping[str, Section]) -> list[str]:
        """See `walk.Source`."""
        groups = saved[self._groups_name].tree
        mine = self._group_names(self._parameters())
        theirs = [group["params"] for group in groups]
        found = other_class(saved[self._state_name], type(self._optimizer).__name__)
        if len(mine) != len(theirs):
            found.append(f"{self._groups_name}: saved with {len(theirs)} groups, here are {len(mine)}")
        for n, (here, there) in enumerate(zip(mine, theirs, strict=False)):
            if here == there:
                continue
            known, saved_too = set(here), set(there)
            found += [
                f"{self._groups_name}/{n}: {fqn} is missing in the saved state" for fqn in here if fqn not in saved_too
            ]
            found += [f"{self._groups_name}/{n}: {fqn} was saved and is not here" for fqn in there if fqn not in known]
            if not found:
                found.append(f"{self._groups_name}/{n}: the same parameters in another order")
        return found or self._misfits(saved[self._state_name])

    def wishes(self, saved: Mapping[str, Section]) -> Mapping[str, Wish]:
        """See `walk.Source`: what has its parameter's shape is divided as its parameter is."""
        section = saved.get(self._state_name)
        if section is None:
            return {}
        like: dict[int, Leaf] = {}
        wanted: dict[Place, Wanted] = {}
        for parameter, names in self._parameters():
            cut = self._naming.cut.get(parameter)
            if cut is not None:
                wanted |= {(name,): _parts(each, cut) for name, each in zip(names, cut.ranged, strict=True)}
                continue
            live = wanted[names[0],] = self._leaf(parameter, names[0])
            for node in section.tree.get(names[0], {}).values():
                leaf = section.leaves[node.leaf] if isinstance(node, Ref) else None
                if leaf is not None and leaf.whole_shape == tuple(parameter.shape) and (leaf.shape or leaf.placements):
                    like[node.leaf] = live
        return {self._state_name: Wish(like, by_leaf=True, wanted=wanted), self._groups_name: Wish()}

    def _leaf(self, parameter: Tensor, fqn: str) -> Leaf:
        collector = Collector(self._state_name)
        same = not self._own or parameter in self._naming.replicated
        collector.tensor(f"{self._state_name}/{fqn}", parameter, replicated=same, per_rank=not same)
        return collector.leaves[0]

    def fitting(self, saved: Mapping[str, Section], refused: Mapping[str, str]) -> Fitting:
        """See `walk.Source`. A parameter's state is taken whole or not at all."""
        section, groups = saved.get(self._state_name), saved.get(self._groups_name)
        if section is None or groups is None:
            return Fitting(missing=[name for name in self.names() if name not in saved])
        if other := other_class(section, type(self._optimizer).__name__):
            return Fitting(differing=other)
        mine, theirs = self._group_names(self._parameters()), [group["params"] for group in groups.tree]
        live, there = {fqn for names in mine for fqn in names}, {fqn for names in theirs for fqn in names}
        made = Fitting(
            missing=[f"{self._state_name}/{fqn}" for fqn in sorted(live - there)],
            left_over=[f"{self._state_name}/{fqn}" for fqn in sorted(there - live)],
        )
        kept: dict[str, Any] = {}
        for _, names in self._parameters():
            entries = {fqn: section.tree[fqn] for fqn in names if fqn in section.tree}
            wrong = self._refusals(entries, section, refused) or self._misfits(
                Section(self._state_name, entries, section.leaves)
            )
            made.differing.extend(wrong)
            kept |= {} if wrong else entries
        made.taken[self._state_name] = Section(self._state_name, kept, section.leaves)
        if len(mine) == len(theirs):
            unfit = set(section.tree) - set(kept)
            tree = [g | {"params": [fqn for fqn in g["params"] if fqn not in unfit]} for g in groups.tree]
            for n, (here, stored_names) in enumerate(zip(mine, theirs, strict=True)):
                if not _same_group({*here} & there, {*stored_names} & live, new=here != stored_names):
                    tree[n] = {"params": tree[n]["params"]}  # its numbers were for other parameters
                    made.differing.append(f"{self._groups_name}/{n} was saved of other parameters")
            made.taken[self._groups_name] = Section(groups.name, tree, groups.leaves, groups.per_rank)
        else:
            made.differing.append(f"{self._groups_name}: saved with {len(theirs)} groups, here are {len(mine)}")
        return made

    def _refusals(self, entries: Mapping[str, Any], section: Section, refused: Mapping[str, str]) -> list[str]:
        numbers = [n for entry in entries.values() for node in entry.values() for n in leaves_of(node) or ()]
        return [refused[section.leaves[n].path] for n in numbers if section.leaves[n].path in refused]

    def attempt(self, saved: Mapping[str, Section], payload: Payload) -> Undo:
        """See `walk.Source`: nothing here can refuse what fits."""
        del saved, payload
        return lambda: None

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """See `walk.Source`. The state of a parameter that was saved without any is taken away (CL-09)."""
        section, groups = saved[self._state_name], saved.get(self._groups_name)
        known = set() if groups is None else {fqn for group in groups.tree for fqn in group["params"]}
        with torch.no_grad():
            for parameter, names in self._parameters():
                cut = self._naming.cut.get(parameter)
                if names[0] not in section.tree:
                    if names[0] in known:
                        self._optimizer.state.pop(parameter, None)
                elif cut is not None:
                    self._restore_cut(parameter, cut, section, payload)
                else:
                    self._restore_one(parameter, section.tree[names[0]], section, payload)
            if groups is not None:
                self._restore_groups(groups, payload)

    def future_bytes(self) -> tuple[int, int]:
        """See `walk.Source`."""
        payload = leaves = 0
        classes = [kind.__name__ for kind in type(self._optimizer).__mro__]
        for group in self._optimizer.param_groups:
            tensors = state_tensors(classes, group)
            for parameter in group["params"]:
                if not self._optimizer.state.get(parameter):
                    local = local_of(parameter)
                    cut = self._naming.cut.get(parameter)
                    parts = sum(max(1, len(each.pieces)) for each in cut.ranged) if cut else 1
                    payload += state_bytes(tensors, local.numel() * local.element_size()) + parts * tensors * ALIGNMENT
                    leaves += (tensors + _SCALAR_LEAVES) * parts
        return payload, leaves

    def _parameters(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        """All parameters with their names: one, or under FSDP1 those of all that a flat parameter is made of."""
        cut = self._naming.cut
        return [
            (parameter, cut[parameter].names if parameter in cut else (self._known.get(parameter) or f"group{n}.{k}",))
            for n, group in enumerate(self._optimizer.param_groups)
            for k, parameter in enumerate(group["params"])
        ]

    def _walk(self) -> Part:
        collector, watch = Collector(self._state_name), Watch()
        state, tree = self._optimizer.state, dict[str, Any]()
        self._plain = True
        named = self._parameters()
        self._names = self._group_names(named)
        for parameter, names in named:
            if parameter not in state:
                continue
            cut = self._naming.cut.get(parameter)
            same = not self._own or parameter in self._naming.replicated
            tree |= {name: dict[str, Any]() for name in names}
            for key, value in state[parameter].items():
                for n, name in enumerate(names):
                    path = f"{self._state_name}/{name}/{key}"
                    tree[name][key] = (
                        self._value(collector, path, parameter, value, same)
                        if cut is None
                        else self._cut_value(collector, path, cut, n, value)
                    )
                watch.place(state[parameter], key, value)
                if isinstance(value, Tensor):
                    watch.tensor(value, collector.local if cut is None else value.detach())
                else:
                    self._plain = False
        self._refuse_others(named)
        _watch(watch, self._optimizer)
        self._watch = watch
        return collector.part(tree, kind=type(self._optimizer).__name__)

    def _value(self, collector: Collector, path: str, parameter: Tensor, value: Any, same: bool) -> Any:
        if not isinstance(value, Tensor):
            collector.replicated, collector.per_rank = same, not same
            return collector.node(path, value)
        # A counter beside a sharded parameter counts steps, which all ranks do together.
        counter = isinstance(parameter, DTensor) and value.dim() == 0
        same, late = same or counter, bool(self.gated)
        return collector.tensor(path, value, replicated=same, per_rank=not same, late=late)

    def _cut_value(self, collector: Collector, path: str, cut: Cut, n: int, value: Any) -> Any:
        """A value beside a flat parameter, as far as it is its n-th parameter's."""
        if not isinstance(value, Tensor):
            collector.replicated, collector.per_rank = cut.everywhere, not cut.everywhere
            return collector.node(path, value)
        if value.dim() == 0:  # a counter: alike on all ranks that hold a part of the parameter, which not all need do
            return collector.tensor(path, value, replicated=cut.everywhere, per_rank=False, late=bool(self.gated))
        views = _beside(cut, n, value)
        if views is None:
            raise TypeError(
                f"{path} has the shape {list(value.shape)} beside an FSDP1 parameter whose part here has "
                f"{_size(cut)} elements: what it stands for cannot be told. Use fully_shard (FSDP2) instead."
            )
        return collector.pieces(
            path, views, cut.ranged[n].shape, value.dtype, replicated=cut.everywhere, late=bool(self.gated)
        )

    def _refuse_others(self, named: list[tuple[Tensor, tuple[str, ...]]]) -> None:
        known = {id(parameter) for parameter, _ in named}
        for key in self._optimizer.state:
            if id(key) not in known:
                told = repr(key) if isinstance(key, str | int) else f"a {type(key).__qualname__}"
                raise TypeError(
                    f"{self._state_name} has an entry for {told}, which is none of its parameters. A snapshot knows "
                    "state by parameter; keep other state in an object with state_dict and load_state_dict."
                )

    def _group_names(self, named: list[tuple[Tensor, tuple[str, ...]]]) -> list[list[str]]:
        names = iter([each for _, each in named])
        return [[name for _ in group["params"] for name in next(names)] for group in self._optimizer.param_groups]

    def _misfits(self, section: Section) -> list[str]:
        found: list[str] = []
        for parameter, names in self._parameters():
            cut = self._naming.cut.get(parameter)
            if cut is not None:
                found += _cut_misfits(self._state_name, cut, section)
                continue
            fqn, held = names[0], self._optimizer.state.get(parameter, {})
            for key, node in section.tree.get(fqn, {}).items():
                if isinstance(node, Pieces):
                    found.append(f"{self._state_name}/{fqn}/{key} was saved as ranges of FSDP1; DCP reshards")
                live = held.get(key)
                leaf = section.leaves[node.leaf] if isinstance(node, Ref) else None
                if leaf is not None and leaf.placements and not shaped_as(leaf, parameter):
                    found += differences(leaf, parameter)
                elif leaf is not None and isinstance(live, Tensor) and leaf.kind != "tensor":
                    found.append(f"{leaf.path} was saved as a numpy {leaf.kind} and is a tensor")
        known = {fqn for _, names in self._parameters() for fqn in names}
        return found + [
            f"{self._state_name}/{fqn} was saved and is not here" for fqn in section.tree if fqn not in known
        ]

    def _restore_one(self, parameter: Tensor, entry: Mapping[str, Any], section: Section, payload: Payload) -> None:
        live = self._optimizer.state.get(parameter, {})
        made: dict[str, Any] = {}
        for key, node in entry.items():
            leaf = section.leaves[node.leaf] if isinstance(node, Ref) else None
            if leaf is None or leaf.kind != "tensor":
                made[key] = value_of(node, section.leaves, payload)
                continue
            held = live.get(key)
            if isinstance(held, Tensor) and takes(held, leaf):
                local_of(held).copy_(stored(leaf, payload))
                made[key] = held
            else:
                made[key] = made_beside(leaf, parameter, payload)
        self._optimizer.state[parameter] = made

    def _restore_cut(self, parameter: Tensor, cut: Cut, section: Section, payload: Payload) -> None:
        """Write what lies beside a flat parameter, or a range of one; padding keeps what it holds, zero where new."""
        live, made = self._optimizer.state.get(parameter, {}), dict[str, Any]()
        alike = cut.flat.part() if cut.whole else local_of(parameter)
        for key, first in section.tree[cut.names[0]].items():
            held = live.get(key)
            if not isinstance(first, Pieces):
                leaf = section.leaves[first.leaf] if isinstance(first, Ref) else None
                if leaf is not None and leaf.kind == "tensor":
                    taken = isinstance(held, Tensor) and takes(held, leaf)
                    made[key] = held.copy_(stored(leaf, payload)) if taken else fresh(leaf, payload)
                else:
                    made[key] = value_of(first, section.leaves, payload)
                continue
            dtype = getattr(torch, first.dtype)
            fits = isinstance(held, Tensor) and (held.dtype, tuple(held.shape)) == (dtype, tuple(alike.shape))
            beside = held if fits else torch.zeros_like(alike, dtype=dtype)
            for n, name in enumerate(cut.names):
                copy_pieces(_beside(cut, n, beside) or [], section.tree[name][key], section, payload)
            made[key] = beside
        self._optimizer.state[parameter] = made

    def _restore_groups(self, section: Section, payload: Payload) -> None:
        for live, node in zip(self._optimizer.param_groups, section.tree, strict=True):
            for key, child in node.items():
                if key == "params":
                    continue
                held = live.get(key)
                leaf = section.leaves[child.leaf] if isinstance(child, Ref) else None
                if leaf is not None and isinstance(held, Tensor) and takes(held, leaf):
                    held.copy_(stored(leaf, payload))
                else:
                    live[key] = value_of(child, section.leaves, payload)


def _parts(ranged: Ranged, cut: Cut) -> Parts:
    """What this rank wants of a tensor beside one of FSDP1's parameters."""
    boxes = [piece.rectangle for piece in ranged.pieces]
    told: dict[str, Any] = {"global_shape": ranged.shape, "replicated": cut.everywhere}
    device = cut.flat.parameter.device.type
    return Parts(
        ranged.shape,
        tuple(
            Leaf("", "", box.sizes, 0, offsets=box.offsets if any(box.offsets) else None, device=device, **told)
            for box in boxes
        ),
        nothing=not cut.whole and not ranged.count,  # no step makes a state for a parameter without elements
    )


def _same_group(here: set[str], there: set[str], *, new: bool) -> bool:
    """True where a group's numbers belong to what it holds: of the parameters known on both sides it has the same."""
    return here == there and (bool(here) or not new)


def _size(cut: Cut) -> int:
    return cut.flat.part().numel() if cut.whole else cut.ranged[0].count


def _beside(cut: Cut, n: int, value: Tensor) -> list[tuple[Rectangle, Tensor]] | None:
    """Return the rectangles of the n-th parameter in a tensor beside its flat one; None where it has another shape."""
    ranged = cut.ranged[n]
    if not cut.whole:
        return ranged.beside(value)
    if tuple(value.shape) != tuple(cut.flat.part().shape) or not value.is_contiguous():
        return None
    return [(piece.rectangle, piece.of(value)) for piece in ranged.pieces]


def _cut_misfits(where: str, cut: Cut, section: Section) -> list[str]:
    """Say what of the saved state does not fit beside a flat parameter, or a range of one."""
    saved = [name for name in cut.names if name in section.tree]
    if saved and len(saved) != len(cut.names):
        return [f"{where}: the saved state has {saved[0]} and not {cut.names[-1]}, which are one parameter here"]
    found: list[str] = []
    for name, ranged in zip(cut.names, cut.ranged, strict=True):
        for key, node in section.tree.get(name, {}).items():
            leaf = section.leaves[node.leaf] if isinstance(node, Ref) else None
            if isinstance(node, Pieces):
                dtype = getattr(torch, node.dtype)  # an optimizer's own: made anew where it differs
                found += cuts_differ(f"{where}/{name}/{key}", node, section, ranged, dtype)
            elif leaf is not None and leaf.kind == "tensor" and leaf.whole_shape:
                found.append(f"{leaf.path} was saved as one tensor and is a range of FSDP1 here; DCP reshards")
    return found


def _watch(watch: Watch, optimizer: torch.optim.Optimizer) -> None:
    """Everything by which `_walk` finds its way."""
    state, groups = optimizer.state, optimizer.param_groups
    watch.place(vars(optimizer), "state", state)
    watch.place(vars(optimizer), "param_groups", groups)
    watch.order(state)
    watch.order(state.values())
    watch.order(groups)
    for entry in state.values():
        watch.size(entry)
    for group in groups:
        watch.place(group, "params", group["params"])
        watch.order(group["params"])


def gated(optimizer: torch.optim.Optimizer) -> frozenset[Tensor]:
    """Return the parameters that nothing but this optimizer's step writes; none where it steps inside backward."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stepped_in_backward = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)
    return frozenset() if stepped_in_backward else frozenset(parameters)
