"""What the driver and the kernel say of a rank's GPU and of the node's links. Nothing here needs torch or raises.

NVML comes through `nvidia-ml-py`; where there is none (no package, no driver, an old driver) that is said once, and
nothing is judged.
"""

import contextlib
import importlib
from pathlib import Path
from typing import Any

from everstep import environ
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


def _index(index: int | None) -> int:
    return int(environ.get("LOCAL_RANK", "0") or 0) if index is None else index


def _handle(nvml: Any, index: int | None) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(_index(index))
