"""Whether two states are the same: to the bit, with dtype, shape, container types, order, and what shares memory."""

import dataclasses
import enum
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)


def differs(a: Any, b: Any, path: str = "") -> str:
    """Return where and in what `b` differs from `a`; empty where in nothing."""
    if type(a) is not type(b) and not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return f"{path}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        return _tensors(a, b, path)
    if isinstance(a, np.ndarray | np.generic):
        same = (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, np.asarray(b).tobytes())
        return "" if same else f"{path}: {a!r} and {b!r}"
    if type(a) in MAPPINGS:
        return _first(_keys(a, b, path), (differs(a[k], b[k], f"{path}/{k!r}") for k in a if k in b))
    if isinstance(a, list | tuple | deque):
        length = "" if len(a) == len(b) else f"{path}: {len(a)} and {len(b)} elements"
        bound = "" if getattr(a, "maxlen", None) == getattr(b, "maxlen", None) else f"{path}: maxlen"
        pairs = (differs(x, y, f"{path}/{n}") for n, (x, y) in enumerate(zip(a, b, strict=False)))
        return _first(length or bound, pairs)
    if dataclasses.is_dataclass(a) and not isinstance(a, enum.Enum):
        return differs(vars(a), vars(b), path)
    return "" if bits(a) == bits(b) else f"{path}: {a!r} and {b!r}"


def bits(value: Any) -> Any:
    """A plain value in which nan equals itself and -0.0 is not 0.0."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, complex):
        return struct.pack(">dd", value.real, value.imag)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, map(bits, value)))
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    return value


def _first(found: str, more: Iterable[str]) -> str:
    return found or next(filter(None, more), "")


def _keys(a: Any, b: Any, path: str) -> str:
    here, there = [(type(k), bits(k)) for k in a], [(type(k), bits(k)) for k in b]
    return "" if here == there else f"{path}: keys {list(a)} and {list(b)}"


def raw(value: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, row by row."""
    plain = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def _tensors(a: torch.Tensor, b: torch.Tensor, path: str) -> str:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{path}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    return "" if raw(a) == raw(b) else f"{path}: bytes"


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a tree, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in MAPPINGS:
        return [t for child in value.values() for t in tensors(child)]
    if isinstance(value, list | tuple | deque):
        return [t for child in value for t in tensors(child)]
    return []


def span(value: torch.Tensor) -> tuple[int, int]:
    """Return where its memory begins and ends."""
    last = sum((count - 1) * step for count, step in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()


def overlaps(value: Any) -> set[tuple[int, int, int]]:
    """Which tensors of a tree overlap in memory, and how far apart they begin."""
    found, every = set(), [(n, span(t)) for n, t in enumerate(tensors(value)) if t.numel()]
    for n, (begin, end) in every:
        found |= {(n, m, other - begin) for m, (other, last) in every if m > n and other < end and begin < last}
    return found
