"""The zygote: a process that has imported everything once, and forks what then belongs to the agent.

Rule 1: exec'd before the agent opens any socket (P15, Z4); one thread; no tensor operation, ever (Z1: a child of a
        process that has run one OpenMP region hangs in its first).
Rule 2: a child is forked twice, so that the agent, a sub-reaper, is its parent (Z3); it waits for the agent's `go`.
Rule 3: the child leaves this module's loop: `_serve` returns what the child is to run, and `main` runs it.
Rule 4: it is the janitor: when the agent is gone it ends every session it forked, all that carries the job's mark, and
        then itself. It hears of that end at once, stopped or in the middle of an import, by a SIGCONT from the kernel.
Rule 5: a fork that fails is said, never raised: the zygote outlives a lack of process numbers.

usage: python -m everstep.launcher.zygote LINK_FD JOB AGENT_PID (then JSON packets: argv and extensions; preload; forks)
"""

import contextlib
import errno
import gc
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import Any

from everstep import environ
from everstep.errors import EverstepError, ExitCode
from everstep.launcher import fresh, trial
from everstep.process import kernel, mark
from everstep.recovery.link import Link, LinkClosed

MINDS_A_FORK = ("jemalloc_bg_thd",)
"""Threads whose library holds its own locks over a fork."""

Birth = tuple[Mapping[str, Any], list[int]]
"""In a new process: the agent's order, and the descriptors that came with it."""

BASE_IMPORTS = (
    "torch",
    "torch.distributed",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.nn.parallel",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
    "torch._dynamo",
    "everstep.training",
    "everstep.checkpoint.writer",
    "everstep.checkpoint.dcp",
    "everstep.launcher.birth",
)
"""What every worker needs, and torch's lazy modules, which must never be interrupted half imported (I1, E18)."""


def _import(names: tuple[str, ...], link: Link, *, required: bool) -> list[str]:
    """Import modules; tell the agent of each one that fails. Returns those that were imported."""
    done: list[str] = []
    for name in names:
        threads = len(kernel.other_threads())
        asked: list[str] = []
        try:
            module, _, attribute = name.partition(":")
            with environ.noting(frozenset() if required else environ.OF_A_RANK, asked):
                loaded = importlib.import_module(module)
                if attribute:
                    getattr(loaded, attribute, None)  # packages that load lazily do it here
            done.append(name)
        except (Exception, SystemExit) as error:
            if required:
                raise
            link.send({"kind": "zygote.notice", "text": f"preload of {name} failed, it is left out: {error!r}"})
        if asked:
            text = (
                f"{name}, which is preloaded, reads {', '.join(asked)} when it is imported, and no rank is there yet: "
            )
            _notice(link, text + "all ranks have what it makes of that. Leave it out of --preload")
        if len(kernel.other_threads()) > threads and not required:
            _began_threads.append(name)
    return done


_began_threads: list[str] = []
"""Preloads after whose import there were more threads: a parallel tensor operation leaves its pool behind."""


def _parse(link: Link) -> bool:
    """Read the command line for the agent. False when there is nothing more to do (an error, or --help)."""
    importlib.import_module("torch")  # here and not before the link is up
    fresh.users_imports_done()
    from everstep.launcher import flags  # noqa: PLC0415 - likewise

    order, _ = link.receive()
    try:
        link.send({"kind": "zygote.flags", "flags": flags.parse(order["argv"], order["extensions"])})
    except EverstepError as error:
        link.send({"kind": "zygote.refused", "text": str(error), "code": int(error.exit_code)})
        return False
    except SystemExit as end:  # --help and its like have printed
        link.send({"kind": "zygote.refused", "text": "", "code": int(end.code or 0)})
        return False
    return True


def _probe() -> str:
    """Fork a child that must finish a parallel region and a backward; return what is wrong, or nothing (Z1)."""
    zygote = os.getpid()
    try:
        pid = _fork()
    except OSError as error:
        return f"no process can be forked on this machine: {error.strerror}; see `ulimit -u` and the cgroup's pids.max."
    if pid == 0:
        kernel.die_with_parent(zygote)
        _probe_child()
    deadline_s = 60

    def give_up(number: int, frame: FrameType | None) -> None:
        """SIGALRM: the probe hangs."""
        del number, frame
        kernel.kill(pid)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(deadline_s)
    _, code = os.waitpid(pid, 0)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if code == 0:
        return ""
    named = f"importing {', '.join(_began_threads)} began threads" if _began_threads else "find it with --preload none"
    return (
        f"a forked child could not finish a parallel tensor operation (status {os.waitstatus_to_exitcode(code)}): some "
        f"preloaded module runs tensor operations at import; {named}. Leave it out of --preload, or import it in the "
        "wrapped function."
    )


def _probe_child() -> None:
    import torch  # noqa: PLC0415 - loaded long ago; named here to keep tensor operations out of the zygote itself

    torch.set_num_threads(2)
    a = torch.ones(256, 256, requires_grad=True)
    (a @ a).sum().backward()
    os._exit(0)


def _fork() -> int:
    """Fork without Python 3.12's warning of threads: they are counted, and told to the agent, after the imports."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        return os.fork()


def _fork_twice(link: Link, order: Mapping[str, Any], fds: list[int]) -> Birth | None:
    """Fork; the agent's new process gets back what it is to be, the zygote None."""
    reader, writer = os.pipe()
    for stream in (sys.stdout, sys.stderr):  # what a preload has printed is said once, and by us
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    try:
        middle = _fork()
    except OSError as error:
        _tell_birth(link, order, -(error.errno or errno.EAGAIN))
        _close_all([reader, writer, *fds])
        return None
    if middle:
        os.close(writer)
        pid = int(os.read(reader, 16) or -errno.ESRCH)
        os.waitpid(middle, 0)
        _tell_birth(link, order, pid)
        _close_all([reader, *fds])
        return None
    try:
        if _fork():
            os._exit(0)
    except OSError as error:
        os.write(writer, str(-(error.errno or errno.EAGAIN)).encode())
        os._exit(1)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    os.setsid()
    mark.rewrite(order["order"])
    os.write(writer, str(os.getpid()).encode())
    keep = sorted({0, 1, 2, *fds})
    for low, high in zip(keep, [*keep[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
    return order, fds


def _tell_birth(link: Link, order: Mapping[str, Any], pid: int) -> None:
    """Tell the agent of its new process, or (minus an error's number) why there is none."""
    with contextlib.suppress(LinkClosed):  # its end is heard where the next order is awaited
        if pid > 0:
            _sessions.add(pid)
            link.send({"kind": "zygote.forked", "order": order["order"], "pid": pid})
        else:
            link.send({"kind": "zygote.unborn", "order": order["order"], "text": os.strerror(-pid)})


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


_sessions: set[int] = set()


def _serve(link: Link) -> Birth | None:
    """Fork what the agent orders until it goes; in a child, return what it is to be."""
    while True:
        try:
            order, fds = link.receive()
        except LinkClosed:
            return None
        if order["kind"] == "zygote.fork":
            born = _fork_twice(link, order, fds)
            if born is not None:
                return born
        elif order["kind"] == "zygote.adopt":  # what a zygote before this one had forked
            _sessions.update(order["pids"])
        elif order["kind"] == "zygote.forget":
            _sessions.discard(order["pid"])
        elif order["kind"] == "zygote.end":
            return None


def _listen_for_the_end(agent: int, job: str) -> None:
    """End with the agent, whatever we are doing when it goes (rule 4)."""
    me = os.getpid()

    def hear(number: int, frame: FrameType | None) -> None:
        """SIGCONT: perhaps from the kernel, for our parent's end; perhaps from a shell."""
        del number, frame
        if os.getpid() == me and os.getppid() != agent:
            mark.kill(job, sessions=frozenset(_sessions))
            os._exit(0)

    signal.signal(signal.SIGCONT, hear)
    if not kernel.hear_of_parents_end(agent, signal.SIGCONT):
        os._exit(0)


def main(argv: list[str]) -> int:
    """Prepare, say ready, serve. Returns the exit code of the zygote, or of whatever a child ran."""
    fresh.begin()
    link, job = Link.from_fd(int(argv[0])), argv[1]
    _listen_for_the_end(int(argv[2]), job)
    for number in kernel.ASKING:
        signal.signal(number, signal.SIG_IGN)  # the agent decides when we end
    born = None
    with contextlib.suppress(LinkClosed):  # the agent has gone
        if not _prepare(link):
            return 0
        born = _serve(link)
    if born is not None:
        from everstep.launcher import birth  # noqa: PLC0415 - loaded with the rest; named here to keep torch out before

        birth.leave(birth.live(*born))
    mark.kill(job, sessions=frozenset(_sessions))
    return 0


def _notice(link: Link, text: str) -> None:
    link.send({"kind": "zygote.notice", "text": text})


def _prepare(link: Link) -> bool:
    """Do all that is done once; False when there is nothing to serve for (the agent has been told why)."""
    if not _parse(link):
        return False
    order, _ = link.receive()
    try:
        _import(BASE_IMPORTS, link, required=True)
        fresh.own_imports_done()
        loaded = _import(tuple(order["preload"]), link, required=False)
        last_run = set(order.get("last_run", ()))
        unnamed = trial.harmless(order.get("unnamed", ()), _fork, lambda text: _notice(link, text))
        fresh.found[:] = [name for name in unnamed if name in last_run]
        loaded += _import(tuple(unnamed), link, required=False)
    except LinkClosed:
        raise
    except Exception as error:  # noqa: BLE001 - told to the agent, who ends the job with it
        link.send({"kind": "zygote.refused", "text": f"imports failed: {error!r}", "code": int(ExitCode.CONFIGURATION)})
        return False
    gc.collect()
    gc.freeze()
    trouble = _probe()
    if trouble:
        link.send({"kind": "zygote.refused", "text": trouble, "code": int(ExitCode.CONFIGURATION)})
        return False
    kernel.name_process("everstep-zygote")
    others = [name for name in kernel.other_threads() if name not in MINDS_A_FORK]
    if others:
        text = f"the zygote has threads beside its own ({', '.join(others)}); a fork may find their locks held (Z1)"
        link.send({"kind": "zygote.notice", "text": text})
    link.send({"kind": "zygote.ready", "preloaded": loaded})
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
