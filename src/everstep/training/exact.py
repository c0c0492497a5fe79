"""What bit-exact repetition needs of torch (EXPERIMENTS B4)."""

import torch

from everstep import environ


def make_exact() -> None:
    """Choose deterministic algorithms, no autotuning, and cuBLAS's fixed workspace."""
    if environ.get("CUBLAS_WORKSPACE_CONFIG") is None:
        environ.update({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
