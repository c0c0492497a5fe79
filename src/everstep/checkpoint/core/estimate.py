"""How large a snapshot will be before an optimizer has made its state, so that buffers are allocated once.

Most optimizers make their state in their first step. The multiples below are theirs, in tensors of the parameter's
size and in scalars, by class name; an unknown class counts as Adam. A guess that is too small costs one larger
allocation later, with an event; never a wrong snapshot.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from everstep.checkpoint.core.layout import ALIGNMENT, align

LEAF_META_BYTES = 320
"""JSON of one leaf with its place in the tree, generously."""
SPARE_META_BYTES = 256 * 1024
"""Room for what grows later: loader positions, schedulers, generators."""


def _sgd(group: Mapping[str, Any]) -> int:
    return 1 if group.get("momentum") else 0


def _adam(group: Mapping[str, Any]) -> int:
    return 3 if group.get("amsgrad") else 2


def _rmsprop(group: Mapping[str, Any]) -> int:
    return 1 + bool(group.get("momentum")) + bool(group.get("centered"))


def _lbfgs(group: Mapping[str, Any]) -> int:
    return 2 * int(group.get("history_size", 100)) + 4


def _fixed(tensors: int) -> Any:
    def tensors_of(group: Mapping[str, Any]) -> int:
        del group
        return tensors

    return tensors_of


_TENSORS: Mapping[str, Any] = {
    "SGD": _sgd, "Adam": _adam, "AdamW": _adam, "NAdam": _adam, "RAdam": _adam, "Adamax": _fixed(2),
    "SparseAdam": _fixed(2), "Adagrad": _fixed(1), "Adadelta": _fixed(2), "ASGD": _fixed(2), "Rprop": _fixed(2),
    "RMSprop": _rmsprop,    "Muon": _fixed(1), "Adafactor": _fixed(1), "LBFGS": _lbfgs,
}  # fmt: skip
_SCALARS = 3


def state_tensors(class_names: Iterable[str], group: Mapping[str, Any]) -> int:
    """Return how many tensors of a parameter's size its state will have; `class_names` from the class upwards."""
    for name in class_names:
        if name in _TENSORS:
            return int(_TENSORS[name](group))
    return 2


def state_bytes(tensors: int, parameter_bytes: int) -> int:
    """Return the payload bytes of one parameter's state."""
    return tensors * align(parameter_bytes) + _SCALARS * ALIGNMENT


def buffer_bytes(payload_bytes: int, leaves: int, header_bytes: int) -> int:
    """Return the size of one buffer, in whole pages, with room for the description to grow."""
    meta = leaves * LEAF_META_BYTES + SPARE_META_BYTES
    return align(header_bytes + align(payload_bytes) + meta, 4096)
