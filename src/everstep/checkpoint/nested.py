"""Containers of containers: what is in them, and the same again with other leaves.

Dicts (ordered and default ones too), lists, tuples, named tuples, deques and dataclasses are containers; whatever else
is met is a leaf. Containers are made anew, of the same type and in the same order; the given ones are never changed.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


def mapped(f: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `f(leaf)` in the place of each leaf."""
    if isinstance(value, dict):
        return _dict(f, value)
    if isinstance(value, tuple):
        parts = [mapped(f, one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = [mapped(f, one) for one in value]
        return made
    if isinstance(value, deque):
        return deque((mapped(f, one) for one in value), value.maxlen)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(f, value)
    return f(value)


def _dict(f: Callable[[Any], Any], value: dict[Any, Any]) -> Any:
    made = copy.copy(value)  # an OrderedDict, a defaultdict and a Counter stay what they are
    for key, one in value.items():
        dict.__setitem__(made, key, mapped(f, one))
    return made


def _dataclass(f: Callable[[Any], Any], value: Any) -> Any:
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(made, field.name, mapped(f, getattr(value, field.name)))
    return made


def leaves(value: Any) -> Iterator[Any]:
    """Return the leaves in the order in which `mapped` meets them."""
    if isinstance(value, dict):
        parts: Any = value.values()
    elif isinstance(value, tuple | list | deque):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name))
    else:
        yield value
        return
    for part in parts:
        yield from leaves(part)
