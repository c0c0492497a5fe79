"""Small states of a training world, without torch: what a rank would have put into its snapshot buffer."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.checkpoint.core import segment
from everstep.checkpoint.core.layout import Layout, Leaf, Ref, Section, place


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's state after one step."""

    layout: Layout
    payload: bytes


def rank_state(rank: int, world_size: int, step: int, rows: int = 4, columns: int = 8, line: str = "") -> RankState:
    """Return a state that is a function of its arguments. `line`: who made it, where two may have made the same step.

    A sharded and a replicated weight, a tied one, a buffer of the rank's own, a scalar, plain values, a generator.
    """
    size = 4 * rows * columns
    whole = random.Random(f"shared {step}{line}").randbytes(size)
    own = random.Random(f"own {step} {rank}{line}")
    parts = [
        (Leaf("model/weight", "float32", (rows, columns), size, global_shape=(rows * world_size, columns),
              offsets=(rows * rank, 0), placements=("S(0)",)), own.randbytes(size)),
        (Leaf("model/bias", "float32", (rows * columns,), size, replicated=True), whole),
        (Leaf("model/tied", "float32", (rows * columns,), size, replicated=True, alias_of="model/bias"), b""),
        (Leaf("model/seen", "int64", (), 8, per_rank=True), own.randbytes(8)),
        (Leaf("model/none", "float32", (0, 3), 0, replicated=True), b""),
    ]  # fmt: skip
    leaves, end = place(leaf for leaf, _ in parts)
    payload = bytearray(end)
    for leaf, (_, content) in zip(leaves, parts, strict=True):
        payload[leaf.offset : leaf.offset + len(content)] = content
    tree = {leaf.path.removeprefix("model/"): Ref(n) for n, leaf in enumerate(leaves)} | {"steps": step}
    sections = (
        Section("model", tree, leaves),
        Section(
            "optimizer/param_groups", [{"lr": 0.1 / (step + 1), "betas": (0.9, 0.95), "params": ["weight", "bias"]}]
        ),
        Section("rng", {"python": (3, tuple(own.randbytes(4)), None)}, per_rank=True),
    )
    return RankState(Layout(rank, world_size, sections), bytes(payload))


def snapshot(state: RankState, step: int, *, epoch: int = 0, generation: int = 0, sequence: int = 1) -> int:
    """Return the descriptor of a sealed snapshot buffer with that state; the caller closes it."""
    meta, layout = state.layout.to_json(), state.layout
    header = segment.Header(
        sequence, step, epoch, generation, segment.FROM_THE_BEGINNING, layout.rank, layout.world_size,
        len(state.payload), len(meta),
    )  # fmt: skip
    buffer = bytearray(segment.needed_bytes(len(state.payload), len(meta)))
    segment.unseal(buffer)
    buffer[segment.HEADER_BYTES : segment.HEADER_BYTES + len(state.payload)] = state.payload
    segment.write(buffer, header, meta)
    segment.seal(buffer, sequence)
    fd = os.memfd_create(f"everstep-test-{layout.rank}", os.MFD_CLOEXEC)
    os.write(fd, buffer)
    return fd


def world(world_size: int, step: int, *, generation: int = 0) -> Sequence[int]:
    """Return a sealed buffer of each rank."""
    return [snapshot(rank_state(rank, world_size, step), step, generation=generation) for rank in range(world_size)]
