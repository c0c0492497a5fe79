"""What `Checkpointer.save` and `restore` are given, as names and objects: a mapping, anew each time, of any shape.

    {"model": model, "optimizer": optimizer, "epoch": 3, "ema": {"decay": 0.99, "shadow": tensors}, "nets": [a, b]}

A module, an optimizer, a generator and whatever has `state_dict` and `load_state_dict` are objects: they come back in
place. A container that holds one is looked through (`nets.0`, `nets.1`). All else is a value: saved as it is now, and
put back where it stood: into the very tensors, arrays, lists and dicts where they fit, else into the mapping.
"""

import re
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everstep.checkpoint.core.layout import Layout, Pickled, Pieces, Ref, Section
from everstep.checkpoint.generators import is_generator
from everstep.checkpoint.sharded import is_sharded_tensor, local_of, shards_of
from everstep.checkpoint.tensors import dtype_name
from everstep.checkpoint.unreachable import DEADLINE
from everstep.checkpoint.walk import may_be_called
from everstep.errors import UsageError

Holder = MutableMapping[Any, Any] | MutableSequence[Any] | Mapping[Any, Any] | tuple[Any, ...]
DEEPEST = 100
_VALUES = frozenset({Tensor, nn.Parameter, int, float, str, bool, type(None)})


class Value:
    """A place that holds a value; to a walk an object like others."""

    def __init__(self, holder: Holder, key: Any) -> None:
        self.holder, self.key = holder, key

    @property
    def live(self) -> Any:
        """What stands there now."""
        return self.holder[self.key]

    def state_dict(self) -> Any:
        """What is saved."""
        return self.live

    def load_state_dict(self, state: Any) -> None:
        """Put back what was saved."""
        made = _into(self.live, state)
        if made is not self.live:
            holder: Any = self.holder
            holder[self.key] = made


@dataclass(frozen=True, slots=True)
class Given:
    """One mapping, looked through."""

    objects: dict[str, Any]  # with a Value for each value
    shape: tuple[tuple[str, int], ...]  # equal where the same walk serves: the same objects under the same names

    @property
    def values(self) -> dict[str, Value]:
        """The places of values, by name."""
        return {name: thing for name, thing in self.objects.items() if isinstance(thing, Value)}


def given(state: Mapping[str, Any]) -> Given:
    """Look through what a caller gave. Raises TypeError that names what cannot be meant."""
    told: Any = state
    if not isinstance(told, Mapping):
        raise TypeError(
            f"the state is a {type(told).__qualname__}; give a mapping of names to objects, as {{'model': model}}"
        )
    objects: dict[str, Any] = {}
    for name, thing in _flat("", state, 0):
        if name in objects:
            raise TypeError(f"state: two things have the name {name!r}; rename one of them")
        if not may_be_called(name):
            raise TypeError(f"state[{name!r}]: this name is taken or not allowed; rename it")
        objects[name] = thing
    shape = tuple((name, 0 if isinstance(thing, Value) else id(thing)) for name, thing in objects.items())
    return Given(objects, shape)


def _flat(prefix: str, holder: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST:
        raise TypeError(f"state[{prefix[:100]!r}] is nested deeper than {DEEPEST} levels, or contains itself")
    items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)  # pyright: ignore[reportUnknownVariableType]
    for key, thing in items:  # pyright: ignore[reportUnknownVariableType]
        if isinstance(holder, Mapping) and not isinstance(key, str):
            raise TypeError(f"state: the key {key!r} of {prefix or 'the mapping'} is no string; name things by strings")
        name = f"{prefix}.{key}" if prefix else str(key)  # pyright: ignore[reportUnknownArgumentType]
        if _is_object(thing):
            yield name, thing
        elif isinstance(thing, Mapping | list | tuple) and _holds_object(thing, depth):
            yield from _flat(name, thing, depth + 1)
        else:
            yield name, Value(holder, key)


def _is_object(thing: Any) -> bool:
    if isinstance(thing, type | Tensor):
        return False
    if isinstance(thing, nn.Module | torch.optim.Optimizer) or is_generator(thing):
        return True
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _holds_object(container: Any, depth: int) -> bool:
    if depth > DEEPEST:
        return False
    inside = container.values() if isinstance(container, Mapping) else container  # pyright: ignore[reportUnknownVariableType]
    return any(
        _is_object(thing) or (isinstance(thing, Mapping | list | tuple) and _holds_object(thing, depth + 1))
        for thing in inside  # pyright: ignore[reportUnknownVariableType]
        if type(thing) not in _VALUES  # pyright: ignore[reportUnknownArgumentType] - most are, at every save
    )


# Back in place.


def _into(live: Any, value: Any) -> Any:
    """Put `value` into `live` where it fits; return what is to stand there."""
    if is_sharded_tensor(live) and is_sharded_tensor(value):
        return _into_shards(live, value)
    if isinstance(live, Tensor) and isinstance(value, Tensor) and _alike(live, value):
        with torch.no_grad():
            local_of(live).copy_(local_of(value))
        return live
    if isinstance(live, np.ndarray) and isinstance(value, np.ndarray) and _same_array(live, value):
        live[...] = value
        return live
    if isinstance(live, dict) and type(live) is type(value):  # pyright: ignore[reportUnknownArgumentType]
        made = {key: _into(live.get(key), each) for key, each in _children(value)}  # pyright: ignore[reportUnknownMemberType]
        live.clear()
        live.update(made)
        return live  # pyright: ignore[reportUnknownVariableType]
    if type(live) is list and type(value) is list:
        befores: list[Any] = [*live, *[None] * len(value)]  # pyright: ignore[reportUnknownVariableType]
        live[:] = [_into(before, each) for before, each in zip(befores, value, strict=False)]  # pyright: ignore[reportUnknownVariableType]
        return live  # pyright: ignore[reportUnknownVariableType]
    return value


def _into_shards(live: Any, value: Any) -> Any:
    """Of a ShardedTensor each of this rank's shards, where they lie alike."""
    here, there = shards_of(live, ""), shards_of(value, "")
    if [at for at, _ in here] != [at for at, _ in there] or not all(
        _alike(one, other) for (_, one), (_, other) in zip(here, there, strict=True)
    ):
        return value
    with torch.no_grad():
        for (_, one), (_, other) in zip(here, there, strict=True):
            local_of(one).copy_(other)
    return live


def _alike(live: Tensor, value: Tensor) -> bool:
    here, there = local_of(live), local_of(value)
    strided = live.layout is value.layout is torch.strided  # a sparse tensor has no memory that could be written to
    whole = live.shape == value.shape and isinstance(live, DTensor) == isinstance(value, DTensor)
    return bool(strided and whole and here.shape == there.shape and here.dtype == there.dtype)


def _same_array(live: Any, value: Any) -> bool:
    return bool(live.shape == value.shape and live.dtype == value.dtype and live.flags.writeable)


def unfit(made: Given, layout: Layout, among: Mapping[str, Any] | None = None) -> dict[str, list[str]]:
    """Say, by name, which live tensors of values the saved state does not have so, and what cannot be put back."""
    found: dict[str, list[str]] = {}
    for name, value in made.values.items():
        section = layout.section(name)
        if section is None or (among is not None and name not in among):
            continue
        wrong = _differences(value.live, section.tree, section, name)
        if not isinstance(value.holder, MutableMapping | MutableSequence) and not isinstance(value.live, Tensor):
            kind = type(value.holder).__qualname__
            wrong.append(f"{name} stands in a {kind}, which nothing can be put into: give a dict")
        if wrong:
            found[name] = wrong
    return found


def _differences(live: Any, node: Any, section: Section, path: str) -> list[str]:
    if isinstance(node, Pickled):  # it comes back as an object of its own
        return []
    if isinstance(live, Tensor):
        return _tensor_differs(live, node, section, path)
    found: list[str] = []
    there = dict(_children(node)) if isinstance(node, Mapping) == isinstance(live, Mapping) else {}
    for key, each in _children(live):
        if key in there:
            found += _differences(each, there[key], section, f"{path}.{key}")
        elif isinstance(each, Tensor) and isinstance(live, Mapping):
            found.append(f"{path}.{key} is missing in the saved state")
    return found


def _children(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        return list(container.items())  # pyright: ignore[reportUnknownArgumentType]
    return list(enumerate(container)) if isinstance(container, list) else []  # pyright: ignore[reportUnknownArgumentType]


def _tensor_differs(live: Tensor, node: Any, section: Section, path: str) -> list[str]:
    if is_sharded_tensor(live) and isinstance(node, Pieces):
        whole = tuple(live.size())
        return [] if whole == node.shape else [f"{path} was saved as {list(node.shape)} and is {list(whole)}"]
    if not isinstance(node, Ref) or section.leaves[node.leaf].kind != "tensor":
        return [f"{path} is a tensor here and none in the saved state"]
    leaf, local = section.leaves[node.leaf], local_of(live)
    here = dtype_name(local.dtype), tuple(local.shape)
    if (leaf.dtype, leaf.shape) == here:
        return []
    return [f"{path} was saved as {leaf.dtype}{list(leaf.shape)} and is {here[0]}{list(here[1])}"]


_RUN_STEPS = re.compile(r"run\.steps\(([^=()]+)=…\)")


def in_our_words(text: str) -> str:
    """Say of a Checkpointer's state what the walk says of `run.steps`'s."""
    text = _RUN_STEPS.sub(lambda found: f"state[{found[1]!r}]", text)
    text = text.replace("what run.steps was given", "what it was given").replace(
        "but run.steps was not given it", "and not given"
    )
    text = text.replace("another --checkpoint-dir", "another directory").replace("choose another keyword", "rename it")
    text = text.replace("ive --checkpoint-dir", "ive the Checkpointer")
    text = text.replace(f"{DEADLINE}, in seconds, is how long a read is tried", "grace= is how long a read is tried")
    text = text.replace("knowingly, give this one up:", "knowingly: restore(step=N); or give this one up:")
    return text.replace("--grace is how", "grace= is how")


def check_name(step: Any) -> int:
    """Return a step as a number; UsageError for anything else."""
    try:
        number = step.__index__()
    except AttributeError:
        number = None
    if number is None or isinstance(step, bool) or not 0 <= number < 10**18:
        raise UsageError(f"step {step!r}: give the number of the step that is done, a whole number from 0 on")
    return int(number)
