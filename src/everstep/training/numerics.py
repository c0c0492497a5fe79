"""What the bits of this rank's sums depend on beside the code (EXPERIMENTS B4)."""

import functools
from typing import Any

import torch

from everstep import environ

UNKNOWN = "unknown"


def facts() -> dict[str, str]:
    """Return it by name, as it is now; of a device only where this process uses one already."""
    backends: Any = torch.backends
    found = {
        "threads": str(torch.get_num_threads()),
        "processor": processor(),
        "kernels": str(backends.cpu.get_cpu_capability()),
        "torch": str(torch.__version__),
        "float32 matmul": torch.get_float32_matmul_precision(),
        "deterministic algorithms": _yes(torch.are_deterministic_algorithms_enabled()),
        "autotuning": _yes(backends.cudnn.benchmark),
    }
    if torch.cuda.is_initialized():
        found["device"] = torch.cuda.get_device_name()
        found["cudnn"] = str(backends.cudnn.version())
        found["cuBLAS workspace"] = environ.get("CUBLAS_WORKSPACE_CONFIG") or "the library's own"
    return found


def _yes(value: object) -> str:
    return "on" if value else "off"


@functools.cache
def processor() -> str:
    """Return the processor's model, as Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        return UNKNOWN
    return lines[0] if lines else UNKNOWN
