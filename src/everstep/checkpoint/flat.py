"""FSDP1's flat parameters, read as what each rank holds of each parameter. Nothing is gathered, no state dict called.

FSDP1 (`FullyShardedDataParallel`) lays a module's parameters one behind the other, pads, and cuts the row into as many
parts as there are ranks. `_shard_param_infos` says which range of which parameter lies where in this rank's part; here
each range becomes rectangles (EXPERIMENTS C7, `core/rectangles.py`), under the parameter's own name.

Rule 1: the part is read where it always is (`_local_shard`), whatever the forward has left unsharded.
Rule 2: what FSDP1 says of itself is checked before it is believed: `_unsound` names what does not add up, in the words
    of a refusal with torch's version. FSDP1 over tensor parallelism is refused.
Rule 3: padding is nobody's: it is not stored, and stays as it is in live tensors (zero in new ones).
Rule 4: a parameter whose elements lie in another order than its dimensions' (channels last) is cut in that order.
"""

# FSDP1 shows where its parts lie only in underscored names.
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from everstep.checkpoint.core.rectangles import Rectangle, rectangles

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a parameter, and where it begins in this rank's part."""

    rectangle: Rectangle  # of the parameter
    start: int
    order: tuple[int, ...]  # the parameter's dimensions as they lie in memory, the slowest first

    def of(self, part: Tensor) -> Tensor:
        """Return the view of it in a part: the flat parameter's, or a vector of the optimizer's beside it."""
        sizes = [self.rectangle.sizes[d] for d in self.order]
        laid = part[self.start : self.start + self.rectangle.count].view(sizes)
        return laid.permute([self.order.index(d) for d in range(len(self.order))])


@dataclass(frozen=True, slots=True)
class Ranged:
    """What this rank holds of one parameter."""

    fqn: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    start: int  # in the rank's part
    count: int  # elements

    def alone(self) -> "Ranged":
        """Return the same, to be read from a vector that holds this parameter's range alone."""
        moved = tuple(Piece(p.rectangle, p.start - self.start, p.order) for p in self.pieces)
        return Ranged(self.fqn, self.shape, moved, 0, self.count)

    def beside(self, value: Tensor) -> list[tuple[Rectangle, Tensor]] | None:
        """Return this rank's rectangles of an optimizer's tensor beside this parameter; None where it is none such."""
        if len(self.pieces) == 1 and self.count == prod(self.shape) and tuple(value.shape) == self.shape:
            return [(self.pieces[0].rectangle, value)]
        if tuple(value.shape) != (self.count,) or not value.is_contiguous():
            return None
        return [(piece.rectangle, piece.of(value)) for piece in self.alone().pieces]


class Flat:
    """One flat parameter."""

    def __init__(self, where: str, prefix: str, handle: Any) -> None:
        self._handle = handle
        self.parameter: Tensor = handle.flat_param
        self.replicated: bool = not handle.uses_sharded_strategy  # on the ranks of its group
        self.group_size: int = handle.world_size
        problem = _unsound(handle)
        if problem:
            raise TypeError(
                f"{where}: this FSDP1 module of torch {torch.__version__} cannot be kept: {problem}. Use fully_shard "
                "(FSDP2): torch.distributed.fsdp.fully_shard(model)."
            )
        flat: Any = self.parameter
        self.ranged: tuple[Ranged, ...] = tuple(
            _ranged(prefix + clean(fqn), tuple(shape), tuple(stride), bool(contiguous), info)
            for fqn, shape, stride, contiguous, info in zip(
                flat._fqns, flat._shapes, flat._strides, flat._contiguities, flat._shard_param_infos, strict=True
            )
        )
        first = {(id(info.module), info.param_name): r for info, r in zip(flat._param_infos, self.ranged, strict=True)}
        self.tied: tuple[tuple[str, Ranged], ...] = tuple(
            (prefix + clean(_name(x.module_name, x.param_name)), first[id(x.prim_module), x.prim_param_name])
            for x in flat._shared_param_infos
        )

    @property
    def originals(self) -> Mapping[Tensor, Ranged]:
        """The parameters that an optimizer is given with `use_orig_params`, each with its range."""
        return dict(zip(self._handle.flat_param._params or (), self.ranged, strict=False))

    def views(self, ranged: Ranged, original: Tensor | None = None) -> list[tuple[Rectangle, Tensor]]:
        """Return this rank's rectangles of a parameter as views of live memory.

        A parameter that was given other memory since (`p.data = …`) is read there: FSDP1 takes it over in the forward.
        """
        own = original.detach() if original is not None and tuple(original.shape) == (ranged.count,) else None
        if own is None or not own.is_contiguous():
            return [(piece.rectangle, piece.of(self.part())) for piece in ranged.pieces]
        return [(piece.rectangle, piece.of(own)) for piece in ranged.alone().pieces]

    @property
    def attributes(self) -> dict[str, Any]:
        """Where FSDP1 puts the part when it is first used."""
        held: dict[str, Any] = vars(self.parameter)
        return held

    def part(self) -> Tensor:
        """Return this rank's part, detached: the same memory, padding at its end included."""
        return self.attributes.get("_local_shard", self.parameter).detach()

    def reshard(self) -> None:
        """Give up what a forward without a backward has left unsharded: it would outlive a restore.

        Also where the parameter points to its shard again: the gathered copy beside it is used by the next forward.
        """
        handle = self._handle
        if handle.uses_sharded_strategy and "_full_param_padded" in self.attributes:  # so it was in use once
            handle.reshard(True)
            handle.post_reshard()
        handle._prefetched = False


def flats(where: str, modules: Iterator[tuple[str, nn.Module]]) -> list[Flat]:
    """Return all flat parameters of a model, with the prefixes of their parameters' names."""
    found: list[Flat] = []
    for prefix, module in modules:
        handle = getattr(module, "_handle", None) if is_fsdp1(module) else None
        if handle is not None:
            found.append(Flat(where, prefix, handle))
    return found


def is_fsdp1(module: nn.Module) -> bool:
    """True for FSDP1's wrapper; known by its name, since its module is slow to import."""
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


def is_flat(value: Tensor) -> bool:
    """True for a flat parameter, which is registered where it belongs to nobody's names."""
    return type(value).__name__ == "FlatParameter" or hasattr(value, "_fqns")


def clean(fqn: str) -> str:
    """Return a parameter's name inside its wrappers."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def _name(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _ranged(fqn: str, shape: tuple[int, ...], stride: tuple[int, ...], contiguous: bool, info: Any) -> Ranged:
    if not info.in_shard or not prod(shape):
        return Ranged(fqn, shape, (), 0, 0)
    order = tuple(range(len(shape))) if contiguous else _order(stride)
    start: int = info.offset_in_shard
    pieces: list[Piece] = []
    at = start
    laid = tuple(shape[d] for d in order)
    for box in rectangles(laid, info.intra_param_start_idx, info.intra_param_end_idx + 1):
        offsets, sizes = ([b[order.index(d)] for d in range(len(shape))] for b in (box.offsets, box.sizes))
        pieces.append(Piece(Rectangle(tuple(offsets), tuple(sizes)), at, order))
        at += box.count
    return Ranged(fqn, shape, tuple(pieces), start, at - start)


def _order(stride: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions by stride, the largest first: how a dense tensor's elements lie."""
    return tuple(sorted(range(len(stride)), key=lambda d: -stride[d]))


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for d in reversed(_order(stride)):
        if shape[d] != 1 and stride[d] != expected:
            return False
        expected *= shape[d]
    return True


_NEEDED = ("_fqns", "_shapes", "_strides", "_contiguities", "_numels", "_shard_param_infos", "_param_infos",
           "_shared_param_infos", "_param_extensions", "_sharded_size")  # fmt: skip
_INFO = ("in_shard", "offset_in_shard", "numel_in_shard", "intra_param_start_idx", "intra_param_end_idx")


def _unsound(handle: Any) -> str:
    """Say why this handle's account of itself cannot be trusted; empty where it can."""
    flat: Any = handle.flat_param
    missing = [name for name in _NEEDED if not hasattr(flat, name)]
    if missing or not hasattr(handle, "uses_sharded_strategy"):
        return f"its flat parameter has no {' and no '.join(missing) or 'sharding strategy'}"
    if any(extension is not None for extension in flat._param_extensions):
        return "it shards parameters that are sharded already (tensor parallelism)"
    lengths = {len(x) for x in (flat._fqns, flat._shapes, flat._strides, flat._contiguities, flat._shard_param_infos)}
    if len(lengths) != 1:
        return "its lists of parameters differ in length"
    if any(not hasattr(info, name) for info in flat._shard_param_infos for name in _INFO):
        return f"its _shard_param_infos lack one of {', '.join(_INFO)}"
    return _misplaced(flat)


def _misplaced(flat: Any) -> str:
    size, taken = prod(flat._sharded_size), 0
    for fqn, shape, stride, contiguous, count, info in zip(
        flat._fqns, flat._shapes, flat._strides, flat._contiguities, flat._numels, flat._shard_param_infos, strict=True
    ):
        if prod(shape) != count or (not contiguous and not _dense(tuple(shape), tuple(stride))):
            return f"{fqn} of shape {list(shape)} does not lie densely in it"
        if not info.in_shard or not count:
            continue
        begin, end = info.intra_param_start_idx, info.intra_param_end_idx + 1
        if not (0 <= begin < end <= count and end - begin == info.numel_in_shard):
            return f"its range {begin} to {end} of {fqn} is none of {count} elements"
        if not taken <= info.offset_in_shard <= info.offset_in_shard + info.numel_in_shard <= size:
            return f"its range of {fqn} lies outside of this rank's part, or over another's"
        taken = info.offset_in_shard + info.numel_in_shard
    return ""
