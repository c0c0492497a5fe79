"""The few calls to the kernel that Python has no name for, and what /proc says of a process."""

import ctypes
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What terminals, operators and schedulers send, the latter to every process of a job: the agent decides about it."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15
_PF_EXITING = 0x4  # <linux/sched.h>
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}) failed: {os.strerror(number)}")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies (child sub-reaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when its present parent ends; ends it now if that is not `parent` any more."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def hear_of_parents_end(parent: int, number: int) -> bool:
    """Have the kernel send `number` to this process when its present parent ends; False where it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def hold_standard_streams() -> None:
    """Open /dev/null for each of descriptors 0, 1 and 2 that is closed, lest a socket of ours become a console."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: `fd` itself
            os.set_inheritable(fd, True)


def raise_files_limit() -> tuple[int, int]:
    """Let this process open as many files as it may; return the limit that stood before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    return before


def name_process(name: str) -> None:
    """Set the name that ps and top show (15 bytes)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


@dataclass(frozen=True, slots=True)
class Status:
    """One look at /proc/<pid>/stat."""

    state: str  # R running, S sleeping, D uninterruptible, T stopped, t traced, Z gone but not reaped
    parent: int
    session: int
    cpu_s: float  # user and system time of all threads
    start: int  # ticks since boot: with the pid, an identity
    ending: bool = False  # it exits: it runs no more of its own code, and may not be reaped yet


def status(pid: int) -> Status | None:
    """Read what the kernel says of `pid`; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ProcessLookupError):
        return None
    rest = text.rpartition(")")[2].split()
    return Status(
        state=rest[0],
        parent=int(rest[1]),
        session=int(rest[3]),
        cpu_s=(int(rest[11]) + int(rest[12])) / _TICKS,
        start=int(rest[19]),
        ending=rest[0] in "ZX" or bool(int(rest[6]) & _PF_EXITING),
    )


def catches(pid: int, number: int) -> bool:
    """Tell whether `pid` has a handler of its own for a signal; False where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def place(pid: int) -> str:
    """Where in the kernel a process waits, as well as we may know it: "state D, in request_wait_answer"."""
    found = status(pid)
    if found is None:
        return "gone"
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n 0")
    except OSError:
        where = ""
    return f"state {found.state}" + (f", in {where}" if where else "")


def resident_bytes(pid: int) -> int:
    """Return the memory that `pid` has in use, pages that it shares included; 0 where nobody is there."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def give_memory_back() -> None:
    """Have the C library return what has been freed to the kernel; nothing where it cannot (musl)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def other_threads() -> list[str]:
    """The names of this process's threads beside the main one, as the kernel has them."""
    mine = str(os.getpid())
    return sorted(
        Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task") if t != mine
    )


def processes() -> dict[int, Status]:
    """Every process of this machine that can be seen."""
    found = ((int(name), status(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: stat for pid, stat in found if stat is not None}


def kill_session(session: int) -> None:
    """SIGKILL every process of a session."""
    for pid, stat in processes().items():
        if stat.session == session and stat.state != "Z":
            kill(pid)


def children() -> list[int]:
    """Children of this process, adopted ones and the dead not yet reaped included; one short read a thread."""
    try:
        lists = [Path(f"/proc/self/task/{task}/children").read_text() for task in os.listdir("/proc/self/task")]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        mine = os.getpid()
        return [pid for pid, stat in processes().items() if stat.parent == mine]
    return [int(word) for text in lists for word in text.split()]


def children_of(pid: int) -> list[int]:
    """Children of another process, the dead not yet reaped left out. Reads all of /proc: not for every tick."""
    return [child for child, stat in processes().items() if stat.parent == pid and stat.state != "Z"]


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal; False when nobody was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
