"""What the driver and the kernel say of a rank's GPU and of the node's links. Nothing here needs torch or raises.

NVML comes through `nvidia-ml-py`; where there is none (no package, no driver, an old driver) that is said once, and
nothing is judged.

Rule 1: NVML counts the node's GPUs, CUDA those that this process may see, and ranks may share one: a rank's own is
        known by its UUID, and by LOCAL_RANK and CUDA_VISIBLE_DEVICES only while it uses none.
Rule 2: an error of a kernel ends the context for good: every later call of this process fails with the same words.
"""

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

from everstep import environ
from everstep.ranks import visible
from everstep.telemetry import say

_RECOVERY_ACTION_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
_NVLINKS = 18
_told: set[str] = set()
INFINIBAND = Path("/sys/class/infiniband")


def tell_once(text: str) -> None:
    """Say it, the first time."""
    if text and text not in _told:
        _told.add(text)
        say(text)


def gpu_trouble(index: int | None) -> str:
    """Return what the driver wants done about a GPU; empty where nothing, or where it cannot be asked."""
    nvml = _nvml()
    if nvml is None:
        return ""
    field = getattr(nvml, _RECOVERY_ACTION_FIELD, None)
    if field is None:
        tell_once("nvidia-ml-py knows no recovery action (it wants 12.570 or newer): GPUs are not checked by it")
        return ""
    try:
        value = nvml.nvmlDeviceGetFieldValues(_handle(nvml, index), [field])[0]
    except Exception as error:  # noqa: BLE001 - NVML's own errors; what was not measured is no verdict
        tell_once(f"the driver was asked for the recovery action of a GPU, and refuses: {error}; GPUs are not checked")
        return ""
    if value.nvmlReturn != 0:
        tell_once("this driver tells no recovery action (it wants 570 or newer): GPUs are not checked by it")
        return ""
    action = int(value.value.uiVal)
    return f"the driver wants recovery action {action} for GPU {_index(index)} (0 is none): reset or drain it" * (
        action != 0
    )


def context_trouble() -> str:
    """Return the error that has ended this process's CUDA context; empty where it works or is none. Never waits."""
    torch: Any = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.current_stream().query()
    except RuntimeError as error:
        return f"the CUDA context is lost: {str(error).partition(chr(10))[0]}"
    return ""


def nvlink_trouble(index: int | None) -> str:
    """Return which NVLinks of a GPU are down; empty where none, or where it cannot be asked."""
    nvml = _nvml()
    if nvml is None:
        return ""
    down: list[int] = []
    with contextlib.suppress(Exception):  # a GPU without NVLink refuses at the first
        handle = _handle(nvml, index)
        down.extend(link for link in range(_NVLINKS) if nvml.nvmlDeviceGetNvLinkState(handle, link) == 0)
    return f"NVLinks {down} of GPU {_index(index)} are down" if down else ""


class LinkCounters:
    """How often each port of the node has gone down, by the kernel's own counters."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or INFINIBAND
        self._last = self._read()
        if not self._last:
            tell_once(f"no link counters under {self._root}: links are not checked")

    def _read(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in sorted(self._root.glob("*/ports/*/counters/link_downed")):
            with contextlib.suppress(OSError, ValueError):
                found[f"{path.parts[-5]}/{path.parts[-3]}"] = int(path.read_text())
        return found

    def fallen(self) -> tuple[str, ...]:
        """Return the ports that have gone down since the last look."""
        last, self._last = self._last, self._read()
        return tuple(port for port, count in self._last.items() if count > last.get(port, count))


def _nvml() -> Any:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - no package, no driver: both are a machine without NVML
        tell_once(f"no NVML on this machine ({error}): GPUs and NVLinks are not checked")
        return None
    return nvml


def _index(index: int | None) -> int | str:
    if index is not None:
        return index
    listed = environ.get("CUDA_VISIBLE_DEVICES") or ""
    return _own_uuid() or visible(int(environ.get("LOCAL_RANK", "0") or 0), listed)


def _own_uuid() -> str:
    """Return NVML's name of the GPU that this process uses; empty while it uses none."""
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return ""
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    except (RuntimeError, AttributeError):  # a lost context, a torch that does not tell
        return ""


def _handle(nvml: Any, index: int | None) -> Any:
    which = _index(index)
    by = nvml.nvmlDeviceGetHandleByUUID if isinstance(which, str) else nvml.nvmlDeviceGetHandleByIndex
    return by(which)
