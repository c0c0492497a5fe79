"""Whether a value that holds tensors is, but for their bytes, the one that was read at the last step.

A stale part would be a wrong state, saved without a word. So all of a value but the bytes is compared: the types and
the order of its containers, keys and plain values to the last bit (`marshal`, as in core/plain.py), and of each tensor
whether it reads the memory that was copied the last time, in the same way (`Tensor.is_set_to`, and its dtype). The
copied views are held as long as they are compared with, so their memory is nobody else's.

Containers need not be the same objects: a `state_dict()` makes new ones at each call. What is not plain (DTensors,
arrays, sets, objects) makes no outline, and is read the long way each time.
"""

import marshal
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everstep.checkpoint.core.layout import MAX_DEPTH

_TENSORS = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_SCALARS = frozenset({type(None), bool, int, float, complex, str})
_MAPPINGS = frozenset({dict, OrderedDict})
_ROWS = frozenset({list, tuple})
_NO_REFERENCES = 2


@dataclass(frozen=True, slots=True)
class Outline:
    """A value without the bytes of its tensors."""

    forms: list[Any]  # types and lengths, in the order in which they are met
    bits: bytes  # keys and plain values
    tensors: list[Tensor]

    @classmethod
    def of(cls, value: Any) -> "Outline | None":
        """Return the outline of a value; None where it has none."""
        forms, plain, tensors = list[Any](), list[Any](), list[Tensor]()
        if not _met(value, forms, plain, tensors, 0) or not tensors:
            return None
        try:
            return cls(forms, marshal.dumps(plain, _NO_REFERENCES), tensors)
        except (ValueError, TypeError):  # a key that is none of these
            return None

    def same(self, other: "Outline", sources: Sequence[Tensor]) -> bool:
        """True where `other`'s tensors read the memory of `sources`, and all else of it is alike."""
        return (
            self.forms == other.forms
            and self.bits == other.bits
            and len(self.tensors) == len(other.tensors) == len(sources)
            and all(a.dtype is b.dtype for a, b in zip(other.tensors, sources, strict=True))
            and all(map(Tensor.is_set_to, other.tensors, sources))  # False for a conjugate or negative view
        )


def _met(value: Any, forms: list[Any], plain: list[Any], tensors: list[Tensor], depth: int) -> bool:
    kind = type(value)
    forms.append(kind)
    if kind in _TENSORS:
        tensors.append(value)
        return not value.is_nested and value.layout is torch.strided
    if kind in _SCALARS:
        plain.append(value)
        return True
    if depth > MAX_DEPTH or not (kind in _MAPPINGS or kind in _ROWS):
        return False
    forms.append(len(value))
    children = value
    if kind in _MAPPINGS:
        plain.extend(value)
        children = value.values()
    return all(_met(child, forms, plain, tensors, depth + 1) for child in children)
