"""Device memory is seen free before the next attempt of an unwrapped script: in the new worker, before it begins.

Rule 1: NVML is asked by a process of its own, forked for it: a driver that does not answer costs `limit_s` and its
        words, never the worker; and a warm worker has nothing loaded that a cold one has not.
Rule 2: no device, no `nvidia-ml-py`: nothing is judged, and nothing said.
"""

import importlib
import os
import select
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.clock import SYSTEM
from everstep.launcher.core.reclaim import MIB, Look, Reclaim
from everstep.process import kernel, mark
from everstep.ranks import visible

LOOK_S = 0.05
END_S = 1.0
DRIVER = Path("/dev/nvidiactl")


def wait(limits: Sequence[float], local_rank: int, environment: Mapping[str, str], job: str) -> str:
    """Return when the memory of this rank's device is free, or will not become so; what is to be said of it.

    `limits`: for how many seconds it is waited for, and how many MiB in use count as free.
    Takes at most `limit_s` and a second. Which device it is, CUDA_VISIBLE_DEVICES and LOCAL_RANK say.
    """
    limit_s, tolerance_mib = limits
    if limit_s <= 0 or not DRIVER.exists():
        return ""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(
                writer,
                _watch(
                    limit_s, tolerance_mib, visible(local_rank, environment.get("CUDA_VISIBLE_DEVICES", "")), job
                ).encode(),
            )
            os.close(writer)  # nothing to say is an answer too, and does not wait for our exit
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    try:
        if not select.select([reader], [], [], limit_s + 1.0)[0]:
            kernel.kill(pid)
            return (
                f"the NVIDIA driver has not answered within {limit_s + 1.0:g} s; the next attempt begins all the same"
            )
        said = os.read(reader, 1 << 16).decode(errors="replace")
        _bury(pid)
        return said
    finally:
        os.close(reader)


def _bury(pid: int) -> None:
    """Reap the process that has said all it had to; one whose driver does not let it end is waited for no longer."""
    until = SYSTEM.now() + END_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if SYSTEM.now() > until:
            kernel.kill(pid)
            return
        SYSTEM.sleep(0.001)


def _watch(limit_s: float, tolerance_mib: float, device: int | str, job: str) -> str:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        by = nvml.nvmlDeviceGetHandleByUUID if isinstance(device, str) else nvml.nvmlDeviceGetHandleByIndex
        handle = by(device)
    except Exception:  # noqa: BLE001 - no package, no such device (a rank without one): nothing to be seen
        return ""
    judge = Reclaim(device, limit_s, int(tolerance_mib * MIB))
    while True:
        said = judge.judge(_look(nvml, handle, job), SYSTEM.now())
        if said is not None:
            return said
        SYSTEM.sleep(LOOK_S)


def _look(nvml: Any, handle: Any, job: str) -> Look:
    used = int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)  # v1 counts the driver's own too
    held, sharing, strangers = 0, False, list[str]()
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        known = kernel.status(process.pid)
        if known is None or known.ending:
            continue
        held += int(process.usedGpuMemory or 0)
        if mark.of(process.pid).get(mark.JOB) == job:
            sharing = True
        else:
            strangers.append(f"pid {process.pid} ({_name(process.pid)})")
    return Look(used, held, sharing, tuple(strangers))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
