"""Deaths for lack of memory: the kernel counts them for each control group, and sends SIGKILL after it has counted.

Both versions of control groups; where none can be read, the whole machine's count, which may be of somebody else.
"""

from collections.abc import Iterator
from pathlib import Path

_FILES = {"v1": "memory.oom_control", "v2": "memory.events"}
_LIMITS = {"v1": "memory.limit_in_bytes", "v2": "memory.max"}
_GIB = 1 << 30
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a huge number


class Shortage:
    """The count of this process's own group, from its making on; its children are taken to be in it."""

    def __init__(self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._vmstat = proc / "vmstat"
        self._groups = list(_around(proc, groups))
        self._of_group, self._of_machine = self._counts()

    def told(self) -> str:
        """Return what is known of a process that has ended by SIGKILL just now; empty: it was no lack of memory."""
        group, machine = self._counts()
        before, self._of_group = self._of_group, group
        elsewhere, self._of_machine = self._of_machine, machine
        if group is not None:
            return f"killed by the kernel for lack of memory{self._limit()}" if group > (before or 0) else ""
        if machine is not None and machine > (elsewhere or 0):
            return "perhaps killed by the kernel for lack of memory: it has just killed a process of this machine so"
        return ""

    def _counts(self) -> tuple[int | None, int | None]:
        own = (_count(path / _FILES[version]) for version, path in self._groups[:1])
        return next(own, None), _count(self._vmstat)

    def _limit(self) -> str:
        """Name the narrowest limit around us."""
        found = [(int(text), path) for v, path in self._groups if (text := _text(path / _LIMITS[v]).strip()).isdigit()]
        narrow = min(((size, path) for size, path in found if size < _UNLIMITED), default=None)
        return f": {narrow[1]} allows {narrow[0] / _GIB:.2f} GiB" if narrow else ""


def _around(proc: Path, groups: Path) -> Iterator[tuple[str, Path]]:
    """Yield our group of memory, and those around it, innermost first."""
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            version, root = "v1", groups / "memory"
        elif number == "0" and not controllers:
            version, root = "v2", groups
        else:
            continue
        here = root / path.lstrip("/")
        if not (here / _FILES[version]).exists():  # a container sees its own at the root of the mount
            here = root
        around = [here, *(each for each in here.parents if each == root or root in each.parents)]
        if any((each / _FILES[version]).exists() for each in around):
            yield from ((version, each) for each in around)
            return


def _count(path: Path) -> int | None:
    for line in _text(path).splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
