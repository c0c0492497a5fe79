"""What the kernel, the interpreter and the limits of this machine mean for a job."""

import re
from dataclasses import dataclass

from everstep.checkpoint.core.budget import Memory, Need, room, shortage, size
from everstep.checkpoint.core.rotation import ROTATING
from everstep.doctor.core.findings import Finding, ok, problem, warning

OLDEST_KERNEL = (5, 3)
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 12)
FILES_OF_AGENT = 128
FILES_A_PROCESS = 32
"""Descriptors that the agent holds for a rank or a spare: its line, page, pidfd, logs, buffers, writers; ample."""
TASKS_A_RANK = 128
"""Processes and threads of a rank with its loader, its writer and torch's pools; a guess, hence a warning."""
SMALL_SHM = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What this process and its children may have; None: no limit, or none is known."""

    files: int | None = None  # the hard limit: the agent raises the soft one to it
    tasks: int | None = None  # what is left of the user's and the control group's
    locked: int | None = None  # bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """One look at this machine. `pidfd` and `memfd`: why they do not work; empty where they do."""

    python: tuple[int, int]
    kernel: str
    pidfd: str = ""
    memfd: str = ""
    ptrace: int | None = None  # Yama's scope; None: this kernel has no Yama
    limits: Limits = Limits()
    shm: tuple[int, int] | None = None  # bytes of /dev/shm, all and free; None: it is not there
    groups: str = ""  # "v1", "v2", or nothing
    oom_group: bool = False
    infiniband: bool = False


def judge(seen: Machine, ranks: int) -> list[Finding]:
    """Return what it means for a job with `ranks` ranks on this node."""
    return [
        _python(seen.python),
        _kernel(seen.kernel),
        _call("pidfd", seen.pidfd, "the launcher watches processes by them"),
        _call("memfd", seen.memfd, "snapshots lie in them, sealed and allocated in full"),
        _files(seen.limits.files, ranks),
        _tasks(seen.limits.tasks, ranks),
        _locked(seen.limits.locked, infiniband=seen.infiniband),
        _shm(seen.shm),
        _groups(seen.groups, oom_group=seen.oom_group),
        _ptrace(seen.ptrace),
    ]


def _python(version: tuple[int, int]) -> Finding:
    text, wanted = _dotted(version), f"{_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}"
    if version < OLDEST_PYTHON:
        return problem("python", text, wanted, "Make the environment with a newer Python.")
    if version > NEWEST_PYTHON:
        return warning("python", text, wanted, f"Nothing is known against it; tried are {wanted}.")
    return ok("python", text)


def _kernel(release: str) -> Finding:
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_KERNEL:
        return problem("kernel", release, f"Linux {_dotted(OLDEST_KERNEL)} or newer", "Use a node with a newer kernel.")
    return ok("kernel", release)


def _call(what: str, trouble: str, why: str) -> Finding:
    if trouble:
        mend = "Let the container's seccomp profile allow it (Docker's and containerd's own profiles do)."
        return problem(what, trouble, f"that it works: {why}", mend)
    return ok(what, "works")


def _files(limit: int | None, ranks: int) -> Finding:
    need = FILES_OF_AGENT + FILES_A_PROCESS * (ranks + 1)
    if limit is not None and limit < need:
        mend = "Raise the hard limit (`ulimit -Hn`, LimitNOFILE= of systemd, the container runtime's)."
        return problem("open files", f"{limit} at most", f"{need} for the agent of {ranks} ranks and a spare", mend)
    return ok("open files", "no limit" if limit is None else f"{limit} at most")


def _tasks(left: int | None, ranks: int) -> Finding:
    need = TASKS_A_RANK * (ranks + 1)
    if left is not None and left < need:
        mend = "Raise the container's pids limit, or `ulimit -u`."
        return warning("processes", f"{left} more may be made", f"some {need} for {ranks} ranks and a spare", mend)
    return ok("processes", "no limit" if left is None else f"{left} more may be made")


def _locked(limit: int | None, *, infiniband: bool) -> Finding:
    if limit is None:
        return ok("locked memory", "no limit")
    if infiniband:
        mend = "Set `ulimit -l unlimited` (the container runtime's memlock): NCCL registers its buffers with the card."
        return warning("locked memory", f"{size(limit)} at most, beside InfiniBand", "no limit", mend)
    return ok(
        "locked memory", f"{size(limit)} at most; snapshots do not count against it, only InfiniBand's buffers do"
    )


def _shm(seen: tuple[int, int] | None) -> Finding:
    mend = "Give the container more (Docker: --shm-size; Kubernetes: an emptyDir of medium Memory at /dev/shm)."
    wanted = f"{size(SMALL_SHM)} for NCCL and for loaders with workers; snapshots do not lie there"
    if seen is None:
        return warning("/dev/shm", "not there", wanted, mend)
    total, free = seen
    text = f"{size(free)} free of {size(total)}"
    return warning("/dev/shm", text, wanted, mend) if free < SMALL_SHM else ok("/dev/shm", text)


def _groups(version: str, *, oom_group: bool) -> Finding:
    if oom_group:
        mend = "Set memory.oom.group to 0 where you can; else leave the job more memory than it needs."
        seen = f"{version}, memory.oom.group is 1: one process out of memory ends all of this node's"
        return warning("control groups", seen, "memory.oom.group 0: the rank that was too large ends alone", mend)
    return ok("control groups", version or "none are mounted: no limit is known")


def _ptrace(scope: int | None) -> Finding:
    if scope is not None and scope > 1:
        mend = "Set kernel.yama.ptrace_scope to 1, where debuggers are wanted; Everstep's own stacks need none."
        return warning("ptrace", f"scope {scope}", "0 or 1, for py-spy and gdb", mend)
    told = {None: "not restricted by Yama", 0: "scope 0", 1: "scope 1: py-spy and gdb need root"}
    return ok("ptrace", told[scope])


def memory(seen: Memory, ranks: int, state: int | None) -> Finding:
    """Judge the snapshots of `state` bytes, which the ranks of this node hold together, against what can be had."""
    had = f"{size(room(seen, 0, None))} can be had"
    if state is None:
        return ok("memory for snapshots", f"{had}; --state says what is needed")
    each = -(-state // ranks)
    buffers = ROTATING + 1
    need = Need(ranks, buffers, each, ranks * buffers * each, 0)
    refusal = shortage(need, seen, None)
    if refusal is None:
        return ok("memory for snapshots", f"{need}; {had}")
    return problem("memory for snapshots", had, str(need), f"A job would be refused: {refusal}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
