"""What arrives in the worker's process: tensors over the region that was sent, and functions that came by value."""

import importlib
import marshal
import mmap
import types
from collections.abc import Mapping, Sequence
from typing import Any

_region: list[mmap.mmap] = []
"""The region of the call that is being read, while it is."""


def reading(region: mmap.mmap | None) -> None:
    """Let `rebuild` find its bytes here."""
    _region[:] = [region] if region is not None else []


def rebuild(at: int, dtype: str, shape: Sequence[int], stride: Sequence[int]) -> Any:
    """Return the tensor that lies at `at` in the region. Torch is imported with the first one."""
    torch: Any = importlib.import_module("torch")
    kind = getattr(torch, dtype)
    count = 1
    for size in shape:
        count *= size
    row = torch.frombuffer(_region[0], dtype=torch.uint8, count=count * kind.itemsize, offset=at).view(kind)
    return row.as_strided(tuple(shape), tuple(stride))


def make_function(code: bytes, name: str, cells: int) -> types.FunctionType:
    """Make a function without its world; `set_function` gives it one. Two steps, since it may name itself."""
    closure = tuple(types.CellType() for _ in range(cells))
    own: dict[str, Any] = {"__name__": "everstep.shipped", "__builtins__": __builtins__}
    return types.FunctionType(marshal.loads(code), own, name, None, closure)


def set_function(function: types.FunctionType, state: Mapping[str, Any]) -> None:
    """Give a function the names, defaults and cells that it had."""
    function.__globals__.update(state["globals"])
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["kwdefaults"]
    function.__qualname__ = state["qualname"]
    function.__dict__.update(state["dict"])
    for cell, content in zip(function.__closure__ or (), state["cells"], strict=True):
        cell.cell_contents = content
