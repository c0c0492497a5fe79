"""How a process of a job shows in /proc whose it is: by two words of the environment it was exec'd with.

Forks inherit the words, and so does whatever they exec (they stand in `os.environ` too): a daemon that has forked twice
and begun a session of its own still says which job, and which of its processes, it comes from (LA-06). What cleans its
environment before it execs, or writes over its own, does not: see docs/assumptions.md.

A forked child carries the words of its zygote; `BORN` is written over in place, hence its fixed width.
"""

import ctypes
import os
from pathlib import Path

from everstep.process import kernel

JOB = "EVERSTEP_JOB"
BORN = "EVERSTEP_BORN"
_WIDTH = 10
_PASSES = 5
_ENV_START, _ENV_END = 47, 48  # of /proc/self/stat, counted after the name: fields 50 and 51


def text(number: int) -> str:
    """Write the number of an order as it stands in the environment."""
    return f"{number:0{_WIDTH}d}"


def words(job: str, number: int = 0) -> dict[str, str]:
    """Return the variables that mark a process; no order has the number 0."""
    return {JOB: job, BORN: text(number)}


def rewrite(number: int) -> None:
    """Show `number` as this process's own in /proc, from here on and in all that it forks."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    block = ctypes.string_at(start, end - start)
    at = (b"\0" + block).find(f"\0{BORN}=".encode())
    if at >= 0:
        ctypes.memmove(start + at + len(BORN) + 1, text(number).encode(), _WIDTH)


def of(pid: int) -> dict[str, str]:
    """Return the marks that `pid` carries; empty where it has none, or cannot be read."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in block.split(b"\0"))
    return {name.decode(): value.decode("ascii", "replace") for name, _, value in pairs if name in _NAMES}


_NAMES = (JOB.encode(), BORN.encode())


def kill(job: str, number: int | None = None, sessions: frozenset[int] = frozenset()) -> None:
    """SIGKILL all that carries `job` (and `number`, where given) or belongs to one of `sessions`, this process apart.

    Again while somebody is found: what is killed may have been forking.
    """
    for _ in range(_PASSES):
        found = [pid for pid, stat in kernel.processes().items() if _meant(pid, stat, job, number, sessions)]
        if sum(kernel.kill(pid) for pid in found) == 0:
            return


def _meant(pid: int, stat: kernel.Status, job: str, number: int | None, sessions: frozenset[int]) -> bool:
    if pid == os.getpid() or stat.state in "ZX":
        return False
    if stat.session in sessions:
        return True
    marks = of(pid)
    return marks.get(JOB) == job and (number is None or marks.get(BORN) == text(number))
