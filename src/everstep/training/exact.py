"""What bit-exact repetition needs of torch (EXPERIMENTS B1, B4)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from everstep import environ


def make_exact() -> None:
    """Choose deterministic algorithms, no autotuning, and cuBLAS's fixed workspace."""
    if environ.get("CUBLAS_WORKSPACE_CONFIG") is None:
        environ.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


_FEWEST_THAT_ADD_IN_ORDERS = 3
"""Two numbers have the same sum in either order."""


def rebuilt_in_another_order(state: Mapping[str, Any], world_size: int) -> str:
    """Say which DDP in `state` sums its gradients in another order after a restart, or return nothing.

    DDP lays its buckets out anew after its first step, in the order in which gradients came; one that is built again
    begins with the first layout again. `find_unused_parameters=True` keeps one layout.
    """
    if world_size < _FEWEST_THAT_ADD_IN_ORDERS:
        return ""
    named = [n for n, t in state.items() if isinstance(t, DistributedDataParallel) and not t.find_unused_parameters]
    if not named:
        return ""
    return (
        f"{', '.join(named)}: DistributedDataParallel changes the order of its sums after its first step, so that "
        "losses after a restart differ in their last bits from those of a run without faults. For bit-exactness build "
        "it with find_unused_parameters=True."
    )
