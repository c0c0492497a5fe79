"""A state, or a call's arguments, made ready for another process: pickled here, its tensors copied into a region.

Rule 1: when `pack` or `ship` has returned, nothing that is done to the objects reaches what will be written (CS-01):
tensors of the host and of devices are copied alike, and a device has finished.
Rule 2: of a tensor its own elements are copied, not the storage that it is a view of (CS-17). Two tensors of the same
memory, shape and strides become one again (CS-18); views that overlap in another way become tensors of their own.
Rule 3: what is pickled by `pack` is pickled by torch's own code, so that `torch.load` reads it as it reads what
`torch.save` wrote; the other process needs neither torch nor the classes of the state.
Rule 4: functions that the other process could not import (of the script itself, nested ones, lambdas) travel by value.

Rejected: `torch.multiprocessing`, which takes a descriptor for each tensor (CS-11) and a guard around the script.
"""

import importlib
import io
import marshal
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from everstep.checkpoint.async_ckpt.region import Pool, Region, aligned
from everstep.checkpoint.async_ckpt.shipped import make_function, rebuild, set_function
from everstep.checkpoint.sharded import local_of
from everstep.checkpoint.staging import grouped, page_lock, page_unlock

torch_serialization: Any = importlib.import_module("torch.serialization")


@dataclass(frozen=True, slots=True)
class Part:
    """A record of an archive: a stretch of the region, or of the small memory beside it."""

    name: str
    at: int
    nbytes: int
    inline: bool = False


@dataclass(slots=True)
class Packed:
    """What `pack` returns. The region belongs to whoever took it from the pool."""

    region: Region
    parts: list[Part]
    inline: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the archive's records."""
        return sum(part.nbytes for part in self.parts)

    @property
    def used(self) -> int:
        """Bytes of the region, from its beginning, that parts lie in."""
        return max((part.at + part.nbytes for part in self.parts if not part.inline), default=0)


def with_record(packed: Packed, name: str, content: bytes) -> Packed:
    """Return the same with one more record before the others."""
    part = Part(name, len(packed.inline), len(content), inline=True)
    return Packed(packed.region, [part, *packed.parts], packed.inline + content)


def pack(obj: Any, pool: Pool, pickle_module: Any = pickle, protocol: int = 2, *, byteorder: bool = True) -> Packed:
    """Return `obj` as the records of what `torch.save` would write.

    Raises what pickling raises, and MemoryShortage.
    """
    sizes = _sized(obj, pickle_module, protocol)
    region = pool.take(sizes.total)
    try:
        staged = _Staged(region, sizes)
        recorder = _Recorder(staged)
        torch_serialization._save(obj, recorder, _with(pickle_module, staged.reduced), protocol, not byteorder)  # noqa: SLF001
    except BaseException:
        pool.give(region)
        raise
    return Packed(region, recorder.parts, recorder.inline.getvalue())


def ship(call: Any, pool: Pool) -> tuple[Region, bytes]:
    """Return a call (function, arguments) as its pickle and the region of its tensors.

    Raises what pickling raises: what cannot be pickled cannot be sent.
    """
    sizes = _sized(call, pickle, pickle.HIGHEST_PROTOCOL, by_value=True)
    region = pool.take(sizes.total)
    try:
        staged = _Staged(region, sizes)
        out = io.BytesIO()
        _pickler(pickle, staged.described, by_value=True)(out, protocol=pickle.HIGHEST_PROTOCOL).dump(call)
    except BaseException:
        pool.give(region)
        raise
    return region, out.getvalue()


# What a pickler does with tensors


Reduce = Callable[[Tensor, int], Any]


def _sized(obj: Any, pickle_module: Any, protocol: int, *, by_value: bool = False) -> "_Sizes":
    """Find the tensors of `obj`, wherever the pickler meets them, and where each will lie."""
    sizes = _Sizes()
    kind = _pickler(pickle_module, sizes.needed, by_value=by_value)
    kind(_Nowhere(), protocol=protocol).dump(obj)
    return sizes


def _pickler(pickle_module: Any, reduce: Reduce, *, by_value: bool = False) -> Any:
    base: Any = _with(pickle_module, reduce, by_value=by_value).Pickler
    return base if by_value else type("Pickler", (base,), {"persistent_id": _storage})


def _storage(pickler: Any, obj: Any) -> Any:
    """Storages are told apart by torch where it writes them; elsewhere they are content like any other."""
    del pickler
    return "storage" if isinstance(obj, torch.TypedStorage | torch.UntypedStorage) else None


def _with(pickle_module: Any, reduce: Reduce, *, by_value: bool = False) -> types.SimpleNamespace:
    """Return the pickle module with a Pickler that asks `reduce` about plain tensors."""
    base: Any = pickle_module.Pickler

    class Pickler(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            found: Any = NotImplemented
            if type(obj) in (Tensor, DTensor):
                found = reduce(obj, self._protocol)
            elif by_value:
                found = _by_value(obj)
            before = getattr(super(), "reducer_override", None)
            return before(obj) if found is NotImplemented and before is not None else found

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._protocol = kwargs.get("protocol", 2)

    return types.SimpleNamespace(Pickler=Pickler)


class _Nowhere:
    """Takes bytes and forgets them."""

    def write(self, data: Any) -> int:
        return len(data)


Key = tuple[Any, ...]


def _key(value: Tensor) -> Key:
    return (
        value.data_ptr(), value.device, value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg(),
        value.requires_grad,
    )  # fmt: skip


def _fit(value: Tensor) -> bool:
    """A dense tensor with elements in memory; every other kind is left to torch."""
    return (
        value.layout is torch.strided
        and not value.is_nested
        and not value.is_quantized
        and value.device.type != "meta"
        and value.numel() > 0
    )


@dataclass(slots=True)
class _Sizes:
    """The tensors that were met, and where each will lie in the region."""

    total: int = 0
    places: dict[Key, int] = field(default_factory=dict[Key, int])
    sources: list[tuple[int, Tensor]] = field(default_factory=list[tuple[int, Tensor]])

    def needed(self, value: Tensor, protocol: int) -> Any:
        """Count a tensor once; its pickle is of no interest yet."""
        del protocol
        local = local_of(value) if isinstance(value, DTensor) else value
        if not _fit(local):
            return NotImplemented
        key = _key(local)
        if key not in self.places:
            self.places[key] = self.total
            self.sources.append((self.total, local))
            self.total += aligned(local.numel() * local.element_size())
        return int, ()


class _Staged:
    """A filled region: each tensor's copy in it."""

    def __init__(self, region: Region, sizes: _Sizes) -> None:
        self.raw = torch.frombuffer(region.map, dtype=torch.uint8)
        self.start = self.raw.data_ptr()
        self._places = sizes.places
        self._made: dict[int, Tensor] = {}
        devices = {source.device for _, source in sizes.sources if source.device.type != "cpu"}
        if devices and region.unlock is None and torch.cuda.is_initialized() and page_lock(self.raw):
            raw = self.raw
            region.unlock = lambda: page_unlock(raw)
        pairs = [(self._copy_of(region, at, source), source.detach()) for at, source in sizes.sources]
        for group in grouped(((to, source) for to, source in pairs), self.raw):
            group.copy(non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        self._mine = {id(made) for made in self._made.values()}

    def _copy_of(self, region: Region, at: int, source: Tensor) -> Tensor:
        count = source.numel() * source.element_size()
        row = torch.frombuffer(region.map, dtype=torch.uint8, count=count, offset=at).view(source.dtype)
        made = row.as_strided(source.shape, source.stride()) if _dense(source) else row.view(source.shape)
        self._made[at] = made
        return made

    def reduced(self, value: Tensor, protocol: int) -> Any:
        """Reduce the copy in the region as torch reduces a tensor."""
        if isinstance(value, DTensor):
            return self._sharded(value, protocol)
        made = self._of(value)
        if made is None:
            return NotImplemented
        if value.requires_grad:
            made.requires_grad_()
        vars(made).update(vars(value))
        return made.__reduce_ex__(protocol)

    def _sharded(self, value: DTensor, protocol: int) -> Any:
        made = self._of(local_of(value))
        if made is None:
            return NotImplemented
        again: Any = DTensor
        return again(made, value._spec, requires_grad=value.requires_grad).__reduce_ex__(protocol)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def described(self, value: Tensor, protocol: int) -> Any:
        """Reduce to the place of the copy."""
        del protocol
        if isinstance(value, DTensor):
            return NotImplemented  # its local tensor will be met
        made = self._of(value)
        if made is None:
            return NotImplemented
        at = made.data_ptr() - self.start
        return rebuild, (at, str(made.dtype).removeprefix("torch."), tuple(made.shape), tuple(made.stride()))

    def _of(self, value: Tensor) -> Tensor | None:
        if id(value) in self._mine or not _fit(value):
            return None
        at = self._places.get(_key(value))
        return None if at is None else self._made[at]


def _dense(value: Tensor) -> bool:
    """True where the elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for size, stride in sorted(zip(value.shape, value.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class _Recorder:
    """Stands in the place of torch's zip writer, and notes what would be written from where."""

    def __init__(self, staged: _Staged) -> None:
        self.parts: list[Part] = []
        self.inline = io.BytesIO()
        self._start, self._size = staged.start, staged.raw.numel()

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, torch.UntypedStorage):
            at = data.data_ptr() - self._start
            if size and 0 <= at < self._size:
                self.parts.append(Part(name, at, size))
                return
            data = torch.empty(0, dtype=torch.uint8).set_(data).numpy().tobytes() if size else b""  # pyright: ignore[reportArgumentType, reportCallIssue]
        content = data.encode() if isinstance(data, str) else bytes(data)
        self.parts.append(Part(name, self.inline.tell(), len(content), inline=True))
        self.inline.write(content)


# Functions by value


def _by_value(obj: Any) -> Any:
    if isinstance(obj, types.ModuleType):
        return importlib.import_module, (obj.__name__,)
    if isinstance(obj, type) and obj.__module__ in _SCRIPT:
        raise pickle.PicklingError(
            f"{obj.__qualname__} is a class of the script itself, which the worker cannot import: move it to a module"
        )
    if not isinstance(obj, types.FunctionType) or _importable(obj):
        return NotImplemented
    cells = tuple(_content(cell) for cell in obj.__closure__ or ())
    used = {name: obj.__globals__[name] for name in _names(obj.__code__) if name in obj.__globals__}
    state = {
        "globals": used, "defaults": obj.__defaults__, "kwdefaults": obj.__kwdefaults__, "cells": cells,
        "qualname": obj.__qualname__, "dict": dict(vars(obj)),
    }  # fmt: skip
    return make_function, (marshal.dumps(obj.__code__), obj.__name__, len(cells)), state, None, None, set_function


_SCRIPT = ("__main__", "__mp_main__")


def _importable(fn: types.FunctionType) -> bool:
    if fn.__module__ in _SCRIPT:
        return False
    found: Any = sys.modules.get(fn.__module__)
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is fn


def _names(code: types.CodeType) -> set[str]:
    inner: Iterable[types.CodeType] = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not bound yet: a name that the function does not reach


def records(packed: Packed) -> Iterator[Mapping[str, Any]]:
    """Return the parts as plain values, for a message."""
    for part in packed.parts:
        yield {"name": part.name, "at": part.at, "bytes": part.nbytes, "inline": part.inline}


def memory_of(content: bytes) -> int:
    """Return a new descriptor of memory that holds `content`; the caller closes it."""
    fd = os.memfd_create("everstep-save", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    return fd
