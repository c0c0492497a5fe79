"""Plain tensors and values as state, in containers of any depth: `{"weights": …, "history": […], "epoch": 3}`.

Rule 1: read anew at every snapshot: anything may have changed, also which keys there are.
Rule 2: a restore writes into what is there: a live tensor of the saved shape and dtype takes the bytes where it lies,
    a live dict or list becomes what was saved and stays the object that it was. What cannot be changed in place is
    replaced in the container around it, at the top in the mapping that was given.
Rule 3: tensors are compared before anything is written: one that is missing on either side, or of another shape or
    dtype, is named. Where no tensor is on either side the saved value simply takes the other's place, and an empty
    container, or None, takes whatever was saved.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from everstep.checkpoint.core.layout import Leaf, Node, Pieces, Ref, Section
from everstep.checkpoint.core.ranges import tensors_of
from everstep.checkpoint.core.reshard import Wish
from everstep.checkpoint.fitting import Fitting, Undo
from everstep.checkpoint.modules import differences
from everstep.checkpoint.remake import Remaking, at, numbers_in, spread_in
from everstep.checkpoint.sharded import is_sharded_tensor, local_of, shards_of
from everstep.checkpoint.tensors import Part, Payload, Reading, stored
from everstep.errors import StateMismatch

_MAPPINGS = (dict, OrderedDict)


class ValueSource:
    """One value of the state."""

    def __init__(
        self,
        name: str,
        state: Mapping[str, object],
        world_size: int,
        *,
        allow_pickle: bool = False,
        lenders: Callable[[], list[DTensor]] = list,
    ) -> None:
        self._name = name
        self._state = state
        self._allow_pickle, self._lenders = allow_pickle, lenders
        self._reading = Reading(name, per_rank=world_size > 1, allow_pickle=allow_pickle)

    def stable(self) -> list[Part]:
        """See `walk.Source`."""
        return []

    def changing(self) -> list[Part]:
        """See `walk.Source`."""
        return [self._reading.part(self._state[self._name])]

    def names(self) -> tuple[str, ...]:
        """See `walk.Source`."""
        return (self._name,)

    def mismatches(self, saved: Mapping[str, Section]) -> list[str]:
        """See `walk.Source`."""
        section = saved[self._name]
        found = list(_misfits(self._name, section.tree, section.leaves, self._state[self._name]))
        if not found and not self._in_place(section.tree) and not isinstance(self._state, MutableMapping):
            found.append(f"{self._name} cannot be set: give the state as a dict, in which it can be replaced")
        return found

    def wishes(self, saved: Mapping[str, Section]) -> Mapping[str, Wish]:
        """See `walk.Source`: a shard's like is a live shard."""
        there = saved.get(self._name)
        (part,) = self.changing()
        live = {leaf.path: leaf for leaf in part.section.leaves if leaf.placements}
        leaves = enumerate(() if there is None else there.leaves)
        like = {n: live[leaf.path] for n, leaf in leaves if leaf.path in live}
        return {self._name: Wish(like, wanted=tensors_of(part.section))}

    def fitting(self, saved: Mapping[str, Section], refused: Mapping[str, str]) -> Fitting:
        """See `walk.Source`: all or nothing."""
        wrong = [why for name, why in refused.items() if name == self._name or name.startswith(f"{self._name}/")]
        if not wrong and self._name not in saved:
            return Fitting(missing=[self._name])
        wrong = wrong or self.mismatches(saved)
        return Fitting(differing=wrong) if wrong else Fitting({self._name: saved[self._name]})

    def attempt(self, saved: Mapping[str, Section], payload: Payload) -> Undo:
        """See `walk.Source`: nothing here can refuse what fits."""
        del saved, payload
        return lambda: None

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """See `walk.Source`."""
        section = saved[self._name]
        lenders = self._lenders() if spread_in(section) else ()
        making = Remaking(section.leaves, payload, self._allow_pickle, lenders)
        live: Any = self._state[self._name]
        with torch.no_grad():
            value = _taken(making, section.tree, live)
        if value is not live:
            if not isinstance(self._state, MutableMapping):
                raise StateMismatch(
                    f"{self._name} cannot be set: give the state as a dict, in which it can be replaced"
                )
            self._state[self._name] = value

    def future_bytes(self) -> tuple[int, int]:
        """See `walk.Source`."""
        return 0, 0

    def _in_place(self, tree: Node) -> bool:
        live = self._state[self._name]
        return isinstance(live, Tensor) or (type(live) is type(tree) and isinstance(live, dict | list))


def _misfits(path: str, node: Node, leaves: tuple[Leaf, ...], live: Any) -> Iterator[str]:
    """Say which tensors do not fit (rule 3)."""
    if _takes_anything(live):
        return
    if isinstance(live, Tensor):
        yield from _tensor_misfits(path, node, leaves, live)
    elif isinstance(node, _MAPPINGS) and isinstance(live, _MAPPINGS):
        for key in [*node, *(key for key in live if key not in node)]:
            yield from _key_misfits(f"{path}/{key}", key, node, leaves, live)
    elif isinstance(node, list | tuple) and isinstance(live, list | tuple) and len(node) == len(live):
        for n, (child, held) in enumerate(zip(node, live, strict=True)):
            yield from _misfits(f"{path}/{n}", child, leaves, held)


def _tensor_misfits(path: str, node: Node, leaves: tuple[Leaf, ...], live: Tensor) -> Iterator[str]:
    if isinstance(node, Ref) and leaves[node.leaf].kind == "tensor" and not is_sharded_tensor(live):
        yield from differences(leaves[node.leaf], live)
    elif isinstance(node, Pieces) and is_sharded_tensor(live):
        yield from _shards_differ(path, node, leaves, live)
    else:
        yield f"{path} is a {type(live).__name__} and was saved as something else"


def _takes_anything(live: Any) -> bool:
    return live is None or (isinstance(live, dict | list) and not live)


def _key_misfits(
    path: str, key: Any, node: Mapping[Any, Node], leaves: tuple[Leaf, ...], live: Mapping[Any, Any]
) -> Iterator[str]:
    if key not in node:
        if _holds_tensor(live[key]):
            yield f"{path} is missing in the saved state"
    elif key not in live:
        if any(leaves[n].kind == "tensor" for n in numbers_in(node[key])):
            yield f"{path} was saved and is not here"
    else:
        yield from _misfits(path, node[key], leaves, live[key])


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))  # pyright: ignore[reportUnknownArgumentType]
    return isinstance(value, Tensor)


def _shards_differ(path: str, node: Pieces, leaves: tuple[Leaf, ...], live: Any) -> Iterator[str]:
    here = [(offsets, tuple(tensor.shape)) for offsets, tensor in shards_of(live, path)]
    there = [(leaves[n].starts, leaves[n].shape) for n in node.leaves]
    if here != there or tuple(live.metadata().size) != node.shape:
        yield (
            f"{path} was saved as shards {there} of {list(node.shape)} and has {here} of {list(live.metadata().size)}; "
            "DCP reshards (docs/checkpoints.md)"
        )


def _taken(making: Remaking, node: Node, live: Any) -> Any:
    """Return the saved value: `live` itself wherever it can take it in place (rule 2)."""
    leaf = making.leaves[node.leaf] if isinstance(node, Ref) else None
    if leaf is not None and leaf.kind == "tensor" and isinstance(live, Tensor) and not differences(leaf, live):
        local_of(live).copy_(stored(leaf, making.payload))
        return live
    if isinstance(node, Pieces) and is_sharded_tensor(live):
        for number, (_, tensor) in zip(node.leaves, shards_of(live, ""), strict=True):
            local_of(tensor).copy_(stored(making.leaves[number], making.payload))
        return live
    if isinstance(node, _MAPPINGS) and type(live) is type(node):
        filled = {key: _taken(making, child, at(live, key)) for key, child in node.items()}
        held: Any = live
        held.clear()
        held.update(filled)
        return held
    if type(node) is list and type(live) is list:
        live[:] = [_taken(making, child, at(live, n)) for n, child in enumerate(node)]
        return live
    if type(node) is tuple and type(live) is tuple and len(live) == len(node):
        return tuple(_taken(making, child, held) for child, held in zip(node, live, strict=True))
    return making.value(node, live)
