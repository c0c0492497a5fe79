"""What ranks tell one another around a save: one number each, within a limit of time, over whatever the group speaks.

NVRx's own all-reduce of one CUDA integer has no limit: a rank that has died holds the others for the group's timeout,
and a group without CUDA not at all (W43, W51). Called by all ranks of the group at the same point.
"""

import contextlib
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everstep import environ
from everstep.clock import SYSTEM, Clock
from everstep.errors import CheckpointError

LIMIT_S = 600.0
_LIMIT = "EVERSTEP_CHECKPOINT_AGREEMENT_TIMEOUT"
_POLL_S = 0.0005
_MOST_S = 0.02


_patience: list[float] = []


def limit_s() -> float:
    """Return for how many seconds a rank waits for the others: what the environment says, else ten minutes."""
    return _patience[-1] if _patience else float(environ.get(_LIMIT) or LIMIT_S)


@contextlib.contextmanager
def patience(seconds: float) -> Generator[None]:
    """While this lasts, wait no longer than that."""
    _patience.append(min(seconds, limit_s()))
    try:
        yield
    finally:
        _patience.pop()


def distributed() -> bool:
    """True where this process has peers to agree with."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def device_of(group: Any = None) -> torch.device:
    """Return the device on which the group moves tensors: the host where it can, else the current device."""
    kinds = [part.split(":")[0] for part in str(dist.get_backend_config(group)).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    kind = kinds[0] if kinds[0] != "nccl" else "cuda"
    return torch.device(kind, torch.accelerator.current_device_index())


def gathered(mine: int, group: Any = None, within_s: float | None = None, clock: Clock = SYSTEM) -> list[int]:
    """Return the number of every rank of the group, this one's included.

    Raises CheckpointError where not all have answered in time, or a peer is gone.
    """
    if not distributed():
        return [mine]
    size, where = dist.get_world_size(group), device_of(group)
    own = torch.tensor([mine], dtype=torch.int64, device=where)
    all_of = [torch.zeros_like(own) for _ in range(size)]
    try:
        work = dist.all_gather(all_of, own, group=group, async_op=True)
        finished(work, within_s, clock)
    except RuntimeError as error:
        raise CheckpointError(
            f"rank {dist.get_rank()} could not agree with its peers about a save ({error}): one of them has died or "
            "left. What was being saved is not finalized; the checkpoints before it stand."
        ) from error
    return [int(one.item()) for one in all_of]


def finished(work: Any, within_s: float | None = None, clock: Clock = SYSTEM) -> None:
    """Wait for a collective; CheckpointError when it takes too long.

    It is asked, again and again, whether it is over: a wait inside it would keep signals out.
    """
    limit = limit_s() if within_s is None else within_s
    until, pause = clock.now() + limit, _POLL_S
    while not work.is_completed():
        if clock.now() > until:
            raise CheckpointError(
                f"rank {dist.get_rank()} has waited {limit:g} s for its peers to agree about a save, and some did not "
                f"answer: they hang, or call it at other steps. {_LIMIT} sets the limit; what was being saved is not "
                "finalized."
            )
        clock.sleep(pause)
        pause = min(_MOST_S, 2 * pause)
    work.wait(timedelta(seconds=max(1.0, limit)))


def transferred(work: Any) -> None:
    """Wait for a transfer between two ranks, of whose end gloo knows only within its own wait, which has a limit."""
    limit = limit_s()
    try:
        work.wait(timedelta(seconds=limit))
    except RuntimeError as error:
        raise CheckpointError(
            f"rank {dist.get_rank()} could not exchange a copy with its peer within {limit:g} s ({error})"
        ) from error
