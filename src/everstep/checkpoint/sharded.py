"""What a sharded tensor says of itself: DTensor and ShardedTensor. Read without a collective; nothing is gathered.

Rule 1: what cannot be told for sure is refused: a rectangle at a wrong offset is a wrong state that no checksum sees
    (CASES CS-23). So where a shard lies is computed twice where there are two ways, and compared.
Rule 2: a DTensor's shard is a rectangle by its placements. Strided ones (FSDP2 over tensor parallelism) are followed
    element by element along their dimension: what does not lie in one piece is refused.
Rule 3: a ShardedTensor (of FSDP1's sharded state dicts, of embedding tables) names its shards' offsets itself. The
    global metadata is kept beside it, so that it can be made again without asking another rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

SHARDED_TENSOR = "ShardedTensor"


def is_sharded_tensor(value: object) -> bool:
    """True for torch's older ShardedTensor; known by its name, since its module is slow to import and rarely used."""
    return any(kind.__name__ == SHARDED_TENSOR for kind in type(value).__mro__)


def local_of(value: Tensor) -> Tensor:
    """Return this rank's own part, detached: the same memory, no copy, no communication."""
    local = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - to_local() goes through autograd
    return local.detach()


def facts(value: DTensor, path: str) -> dict[str, Any]:
    """Return what a leaf says of its place in the whole. Raises TypeError where that cannot be said for sure."""
    placements, mesh = value.placements, value.device_mesh
    if any(isinstance(p, Partial) for p in placements):
        raise TypeError(f"{path} is a DTensor with a partial placement: its value is a sum over ranks that has not "
                        "been made. Redistribute it first.")  # fmt: skip
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TypeError(f"{path} is a DTensor of a mesh to which this rank does not belong: it holds nothing of it. "
                        "Leave it out of this rank's state.")  # fmt: skip
    shape, offsets = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    if not all(type(p) is Shard or isinstance(p, Replicate) for p in placements):
        offsets = _followed(value, coordinate, tuple(shape), path)
    local = tuple(local_of(value).shape)
    if tuple(shape) != local:  # so also where a mesh of a former generation has crept in from a cache of DTensor
        raise TypeError(f"{path}: this rank's shard has the shape {local} where its placements {placements} say "
                        f"{tuple(shape)}. Such a layout is not supported.")  # fmt: skip
    whole = tuple(value.shape)
    return {
        "global_shape": None if whole == tuple(shape) else whole,
        "offsets": tuple(offsets) if any(offsets) else None,
        "placements": tuple(placement_name(p) for p in placements),
        "replicated": mesh.size() == 1 or all(isinstance(p, Replicate) for p in placements),
        "per_rank": False,
    }


def _followed(value: DTensor, coordinate: Sequence[int], shape: tuple[int, ...], path: str) -> tuple[int, ...]:
    """Return where the shard begins, having followed each dimension's elements through all placements."""
    begins: list[int] = []
    for dim, size in enumerate(value.shape):
        row = torch.arange(size).view([size if d == dim else 1 for d in range(value.dim())])
        for place, parts, mine in zip(value.placements, value.device_mesh.shape, coordinate, strict=True):
            if getattr(place, "dim", None) == dim:
                split: Any = place
                pieces, _ = split._split_tensor(row, parts, with_padding=False, contiguous=True)  # noqa: SLF001
                row = pieces[mine]
        found = row.flatten()
        begin = int(found[0]) if found.numel() else 0
        if found.numel() != shape[dim] or not found.equal(torch.arange(begin, begin + found.numel())):
            raise TypeError(f"{path}: this rank's shard of dimension {dim} of {list(value.shape)} does not lie in one "
                            f"piece under {value.placements}: sizes that the mesh does not divide. Pad the dimension, "
                            "or shard it over one dimension of the mesh.")  # fmt: skip
        begins.append(begin)
    return tuple(begins)


def placement_name(placement: Any) -> str:
    """Return the short name of a DTensor placement: R, S(0), else its repr."""
    if isinstance(placement, Replicate):
        return "R"
    return f"S({placement.dim})" if type(placement) is Shard else repr(placement)


# ShardedTensor.


def shards_of(value: Any, path: str) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return (offsets, tensor) of this rank's shards of a ShardedTensor. TypeError where one is not as it says."""
    found: list[tuple[tuple[int, ...], Tensor]] = []
    for shard in value.local_shards():
        told, tensor = shard.metadata, shard.tensor
        if tuple(told.shard_sizes) != tuple(tensor.shape):
            raise TypeError(f"{path}: a shard of this ShardedTensor has the shape {tuple(tensor.shape)} where its "
                            f"metadata says {tuple(told.shard_sizes)}. Padding belongs into neither.")  # fmt: skip
        found.append((tuple(told.shard_offsets), tensor))
    return found


def spec_of(value: Any) -> dict[str, Any]:
    """Return a ShardedTensor's global metadata as plain values."""
    told = value.metadata()
    properties = told.tensor_properties
    return {
        "class": SHARDED_TENSOR,
        "shards": [
            [[*s.shard_offsets], [*s.shard_sizes], None if s.placement is None else str(s.placement)]
            for s in told.shards_metadata
        ],
        "requires_grad": bool(properties.requires_grad),
        "pin_memory": bool(properties.pin_memory),
    }


def sharded_tensor(
    spec: Mapping[str, Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    shards: Sequence[tuple[tuple[int, ...], Tensor]],
) -> Any:
    """Make a ShardedTensor of this rank's shards again; its process group is the default one. No communication."""
    from torch.distributed._shard.metadata import ShardMetadata  # noqa: PLC0415 - rarely needed, and slow
    from torch.distributed._shard.sharded_tensor import (  # noqa: PLC0415 - likewise
        Shard as LocalShard,
    )
    from torch.distributed._shard.sharded_tensor import (  # noqa: PLC0415 - likewise
        ShardedTensor,
        ShardedTensorMetadata,
        TensorProperties,
    )

    every = [ShardMetadata(list(o), list(s), placement) for o, s, placement in spec["shards"]]
    rank = dist.get_rank()
    places = {
        (tuple(each.shard_offsets), tuple(each.shard_sizes)): each
        for each in every
        if each.placement is None or each.placement.rank() == rank
    }
    grad = bool(spec["requires_grad"])
    mine = [LocalShard(t.requires_grad_(grad), places[offsets, tuple(t.shape)]) for offsets, t in shards]
    properties = TensorProperties(dtype=dtype, requires_grad=spec["requires_grad"], pin_memory=spec["pin_memory"])
    told = ShardedTensorMetadata(every, torch.Size(shape), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, told)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
