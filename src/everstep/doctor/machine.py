"""What this machine says of itself at once: /proc, limits, and calls that are tried. Linux; any thread, milliseconds.

What may hang (a mount, a name service, a driver) is not asked here but in a child: see `trial`.
"""

import contextlib
import os
import platform
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from everstep.doctor.core.machine import Limits, Machine

_GROUPS = Path("/sys/fs/cgroup")
_SNAPSHOT = 1 << 16


def look(proc: Path = Path("/proc"), groups: Path = _GROUPS) -> Machine:
    """Look now. What cannot be read is not known, and never an error."""
    return Machine(
        python=(sys.version_info[0], sys.version_info[1]),
        kernel=platform.release(),
        pidfd=_tried(_pidfd),
        memfd=_tried(_memfd),
        ptrace=_number(proc / "sys/kernel/yama/ptrace_scope"),
        limits=Limits(_limit(resource.RLIMIT_NOFILE), _tasks(proc, groups), _limit(resource.RLIMIT_MEMLOCK)),
        shm=_shm(),
        groups="v2" if (groups / "cgroup.controllers").exists() else "v1" if (groups / "memory").exists() else "",
        oom_group=any(_number(group / "memory.oom.group") == 1 for group in _around("memory", proc, groups)),
        infiniband=bool(_listed("/sys/class/infiniband")),
    )


def driver(proc: Path = Path("/proc"), devices: str = "/dev") -> str:
    """Return the version of NVIDIA's kernel driver; empty where there is none."""
    text = _text(proc / "driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\b(\d+(?:\.\d+)+)", text)
    if found is not None:
        return found[1]
    there = any(re.fullmatch(r"nvidia\d+", name) for name in _listed(devices))
    return "of unknown version" if there or text else ""


def _tried(call: object) -> str:
    assert callable(call)
    try:
        call()
    except (OSError, AttributeError) as error:  # AttributeError: a Python that was built without it
        return str(error)
    return ""


def _pidfd() -> None:
    fd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(fd, 0)
    finally:
        os.close(fd)


def _memfd() -> None:
    fd = os.memfd_create("everstep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, _SNAPSHOT)
    finally:
        os.close(fd)


def _limit(which: int) -> int | None:
    hard = resource.getrlimit(which)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _tasks(proc: Path, groups: Path) -> int | None:
    """How many processes and threads may be made beside those that are."""
    left: list[int] = []
    for group in _around("pids", proc, groups):
        most, now = _number(group / "pids.max"), _number(group / "pids.current")
        if most is not None and now is not None:
            left.append(most - now)
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:  # the kernel holds root to no such limit
        left.append(soft - sum(_tasks_of_user(proc, os.getuid())))
    return max(0, min(left)) if left else None


def _tasks_of_user(proc: Path, user: int) -> Iterator[int]:
    for name in os.listdir(proc):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if os.stat(proc / name).st_uid == user:
                    yield len(os.listdir(proc / name / "task"))


def _around(controller: str, proc: Path, groups: Path) -> Iterator[Path]:
    """Our control group for `controller` and every group around it, of either version."""
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root = groups
        elif controller in controllers.split(","):
            root = groups / controller
        else:
            continue
        here = root / path.lstrip("/")
        yield from [here, *(each for each in here.parents if each == root or root in each.parents)]


def _shm() -> tuple[int, int] | None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
