"""What memory this machine and this process's control group still have to give; Linux, both cgroup versions."""

from collections.abc import Iterator
from pathlib import Path

from everstep.checkpoint.core.budget import Memory

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number
_V1, _V2 = "memory.limit_in_bytes", "memory.max"


def read(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Look now. A file that cannot be read or understood counts as no limit."""
    available = _fields(proc / "meminfo").get("MemAvailable:", 0) * 1024
    free, name = min(_groups(proc, groups), default=(None, ""))
    return Memory(available, free, name)


def _groups(proc: Path, groups: Path) -> Iterator[tuple[int, str]]:
    """The room left in our group and in every group around it."""
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root, limit, used = groups, _V2, "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = groups / "memory", _V1, "memory.usage_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        # A container sees its own group at the root of the mount, whatever path the host gave it.
        for group in [here, *[p for p in here.parents if p == root or root in p.parents]]:
            free = _room(group, limit, used)
            if free is not None:
                yield free, str(group)


def _room(group: Path, limit_name: str, used_name: str) -> int | None:
    limit, used = _number(group / limit_name), _number(group / used_name)
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    stat = _fields(group / "memory.stat")
    reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return max(limit - max(used - reclaimable, 0), 0)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, or not allowed: no limit is known
        return ""
