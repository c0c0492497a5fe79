"""An optimizer's state by the names of its parameters, read from and set into `optimizer.state` directly.

Its own `state_dict` numbers parameters by position, and its `load_state_dict` casts and replaces tensors; DCP's helper
steps it. None of them is called. State that does not exist yet is not made; state that was not saved is taken away.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from everstep.checkpoint.core.estimate import state_bytes, state_tensors
from everstep.checkpoint.core.layout import Leaf, Node, Ref, Section, printed
from everstep.checkpoint.core.plain import plain
from everstep.checkpoint.modules import Names, differences
from everstep.checkpoint.tensors import Collector, Part, Payload, Reading, fresh, local_of, stored, value_of
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
        found: list[str] = []
        if len(mine) != len(theirs):
            found.append(f"{self._groups_name}: saved with {len(theirs)} groups, here are {len(mine)}")
        for n, (here, there) in enumerate(zip(mine, theirs, strict=False)):
            found += [
                f"{self._groups_name}/{n}: {fqn} is missing in the saved state" for fqn in here if fqn not in there
            ]
            found += [f"{self._groups_name}/{n}: {fqn} was saved and is not here" for fqn in there if fqn not in here]
            if not found and here != there:
                found.append(f"{self._groups_name}/{n}: the same parameters in another order")
        return found or self._misfits(saved[self._state_name])

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """See `walk.Source`."""
        section = saved[self._state_name]
        with torch.no_grad():
            for parameter, fqn in self._parameters():
                entry = section.tree.get(fqn)
                if entry is None:
                    self._optimizer.state.pop(parameter, None)
                else:
                    self._restore_one(parameter, entry, section, payload)
            self._restore_groups(saved[self._groups_name], payload)

    def future_bytes(self) -> tuple[int, int]:
        """See `walk.Source`."""
        payload = leaves = 0
        classes = [kind.__name__ for kind in type(self._optimizer).__mro__]
        for group in self._optimizer.param_groups:
            tensors = state_tensors(classes, group)
            for parameter in group["params"]:
                if not self._optimizer.state.get(parameter):
                    local = local_of(parameter)
                    payload += state_bytes(tensors, local.numel() * local.element_size())
                    leaves += tensors + _SCALAR_LEAVES
        return payload, leaves

    def _parameters(self) -> list[tuple[Tensor, str]]:
        return [
            (parameter, self._known.get(parameter) or f"group{n}.{k}")
            for n, group in enumerate(self._optimizer.param_groups)
            for k, parameter in enumerate(group["params"])
        ]

    def _walk(self) -> Part:
        collector, watch = Collector(self._state_name), Watch()
        state, tree = self._optimizer.state, dict[str, Any]()
        self._plain = True
        named = self._parameters()
        self._names = self._group_names(named)
        for parameter, fqn in named:
            if parameter not in state:
                continue
            same = not self._own or parameter in self._naming.replicated
            entry: dict[str, Any] = {}
            for key, value in state[parameter].items():
                entry[key] = self._value(collector, f"{self._state_name}/{fqn}/{key}", parameter, value, same)
                watch.place(state[parameter], key, value)
                if isinstance(value, Tensor):
                    watch.tensor(value, collector.local)
                else:
                    self._plain = False
            tree[fqn] = entry
        self._refuse_others(named)
        _watch(watch, self._optimizer)
        self._watch = watch
        return collector.part(tree)

    def _value(self, collector: Collector, path: str, parameter: Tensor, value: Any, same: bool) -> Any:
        if not isinstance(value, Tensor):
            collector.replicated, collector.per_rank = same, not same
            return collector.node(path, value)
        # A counter beside a sharded parameter counts steps, which all ranks do together.
        counter = isinstance(parameter, DTensor) and value.dim() == 0
        same, late = same or counter, bool(self.gated)
        return collector.tensor(path, value, replicated=same, per_rank=not same, late=late)

    def _refuse_others(self, named: list[tuple[Tensor, str]]) -> None:
        known = {id(parameter) for parameter, _ in named}
        for key in self._optimizer.state:
            if id(key) not in known:
                told = repr(key) if isinstance(key, str | int) else f"a {type(key).__qualname__}"
                raise TypeError(
                    f"{self._state_name} has an entry for {told}, which is none of its parameters. A snapshot knows "
                    "state by parameter; keep other state in an object with state_dict and load_state_dict."
                )

    def _group_names(self, named: list[tuple[Tensor, str]]) -> list[list[str]]:
        names = iter([fqn for _, fqn in named])
        return [[next(names) for _ in group["params"]] for group in self._optimizer.param_groups]

    def _misfits(self, section: Section) -> list[str]:
        found: list[str] = []
        for parameter, fqn in self._parameters():
            for key, node in section.tree.get(fqn, {}).items():
                live = self._optimizer.state.get(parameter, {}).get(key)
                leaf = section.leaves[node.leaf] if isinstance(node, Ref) else None
                if leaf is not None and leaf.placements and not _shaped_as(leaf, parameter):
                    found += differences(leaf, parameter)
                elif leaf is not None and isinstance(live, Tensor) and leaf.kind != "tensor":
                    found.append(f"{leaf.path} was saved as a numpy {leaf.kind} and is a tensor")
        known = {fqn for _, fqn in self._parameters()}
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
            if isinstance(held, Tensor) and _takes(held, leaf):
                local_of(held).copy_(stored(leaf, payload))
                made[key] = held
            else:
                made[key] = _made(leaf, parameter, payload)
        self._optimizer.state[parameter] = made

    def _restore_groups(self, section: Section, payload: Payload) -> None:
        for live, node in zip(self._optimizer.param_groups, section.tree, strict=True):
            for key, child in node.items():
                if key == "params":
                    continue
                held = live.get(key)
                leaf = section.leaves[child.leaf] if isinstance(child, Ref) else None
                if leaf is not None and isinstance(held, Tensor) and _takes(held, leaf):
                    held.copy_(stored(leaf, payload))
                else:
                    live[key] = value_of(child, section.leaves, payload)


class Groups:
    """The values of an optimizer's parameter groups, with names for its parameters, which come first."""

    def __init__(self, name: str, *, own: bool) -> None:
        self._name, self._own = name, own
        self._long = Reading(name, replicated=not own, per_rank=own)
        self._names: list[list[str]] = []
        self._known: list[_Group] = []
        self._texts: list[str | None] = []
        self._part: Part | None = None

    def part(self, groups: list[dict[str, Any]], names: list[list[str]]) -> Part:
        """Read the groups anew; `names` are another object whenever they were looked up again."""
        if names is not self._names:
            self._names, self._known, self._part = names, [_Group(each) for each in names], None
        texts = [known.text(group) for known, group in zip(self._known, groups, strict=True)]
        if None in texts:
            self._part = None
            plain_values = ({k: v for k, v in group.items() if k != "params"} for group in groups)
            return self._long.part([{"params": n, **v} for n, v in zip(names, plain_values, strict=True)])
        if self._part is None or texts != self._texts:
            tree = [known.tree() for known in self._known]
            self._texts = texts
            self._part = Part(Section(self._name, tree, (), self._own, f"[{','.join(map(str, texts))}]"), ())
        return self._part


_SCALARS = frozenset({type(None), bool, int, float, str})


class _Group:
    """One group as JSON. A value that cannot change is printed again only when another object has taken its place."""

    def __init__(self, names: list[str]) -> None:
        self._names = plain(names)
        self._keys: list[str] = []
        self._given: list[Any] = []
        self._frozen: list[bool] = []
        self._nodes: list[Node] = []
        self._texts: list[str] = []

    def text(self, group: Mapping[str, Any]) -> str | None:
        """Return the JSON of `group`; None where it holds what only the long way can tell."""
        keys, given, frozen = [*group], self._given, self._frozen
        if keys != self._keys:
            self._keys, given, frozen = keys, [None] * len(keys), [False] * len(keys)
            self._given, self._frozen, self._nodes, self._texts = given, frozen, [None] * len(keys), [""] * len(keys)
        for n, value in enumerate(group.values()):
            if (value is not given[n] or not frozen[n]) and keys[n] != "params" and not self._put(n, value):
                frozen[n] = False
                return None
        return None if self._names is None else f'{{"params":{self._names.text}{"".join(self._texts)}}}'

    def tree(self) -> Node:
        """Return the group that was printed last."""
        names = self._names.value if self._names is not None else []
        values = zip(self._keys, self._nodes, strict=True)
        return {"params": names} | {key: node for key, node in values if key != "params"}

    def _put(self, n: int, value: Any) -> bool:
        frozen = type(value) in _SCALARS or (type(value) is tuple and all(type(x) in _SCALARS for x in value))
        made = plain({self._keys[n]: None if frozen else value})
        if made is None:
            return False
        text = f"{made.text[1:-5]}{printed(value)}" if frozen else made.text[1:-1]
        node = value if frozen else made.value[self._keys[n]]
        self._given[n], self._frozen[n], self._nodes[n], self._texts[n] = value, frozen, node, f",{text}"
        return True


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


def _shaped_as(leaf: Leaf, parameter: Tensor) -> bool:
    return tuple(parameter.shape) == leaf.whole_shape and tuple(local_of(parameter).shape) == leaf.shape


def _takes(held: Tensor, leaf: Leaf) -> bool:
    """True where a live tensor can take the bytes in place: same kind, shape, dtype and kind of device."""
    local = local_of(held)
    alike = isinstance(held, DTensor) == bool(leaf.placements) and local.device.type == leaf.device
    return alike and not differences(leaf, held)


def _made(leaf: Leaf, parameter: Tensor, payload: Payload) -> Tensor:
    """A new state tensor: beside its parameter where it lived on that kind of device; sharded as its parameter is."""
    beside = local_of(parameter).device
    local = fresh(leaf, payload, beside if beside.type == leaf.device else None)
    if not leaf.placements or not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
