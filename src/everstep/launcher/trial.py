"""Modules that nobody has named are imported in a throw-away child first: what spoils a fork is left out (Z7).

A module spoils it that begins threads, initializes the CUDA driver, hangs, or ends the process, and one that asks for
RANK and its like: it would take every worker for the same. The child says each name before it imports it, so that
whoever reads knows where it ended. Once more without it, a few times.
"""

import contextlib
import ctypes
import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep import environ
from everstep.clock import SYSTEM
from everstep.process import kernel

HANG_S = 60.0
MOST_BAD = 8
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def harmless(
    names: Sequence[str], fork: Callable[[], int], tell: Callable[[str], None], hang_s: float = HANG_S
) -> list[str]:
    """Return those that can be imported before a fork; `tell` hears of each that cannot, and why.

    `names`: `module`, or `module:attribute` where what is loaded for an attribute counts too.
    """
    left = [name for name in dict.fromkeys(names) if not _loaded(name)]
    for _ in range(MOST_BAD):
        if not left:
            return []
        bad, why = _try(left, fork, hang_s)
        if bad is None:
            return left
        tell(f"{bad.partition(':')[0]} is imported by each worker itself: {why}")
        left = [name for name in left if not _falls_with(name, bad, whole=why.startswith(_READS))]
    tell(f"{MOST_BAD} modules and more cannot be imported before a fork: each worker imports all of them itself")
    return []


_READS = "it reads "


def _loaded(name: str) -> bool:
    module, _, attribute = name.partition(":")
    return module in sys.modules and (not attribute or attribute in vars(sys.modules[module]))


def _falls_with(name: str, bad: str, *, whole: bool) -> bool:
    """True where a name is of the same module, or (`whole`) of the same package, whose parts import one another."""
    ours, its = name.partition(":")[0], bad.partition(":")[0]
    return ours == its or (whole and ours.partition(".")[0] == its.partition(".")[0])


def _try(names: Sequence[str], fork: Callable[[], int], hang_s: float) -> tuple[str | None, str]:
    """Import all of them in a child; return the one that went wrong, and how."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    zygote = os.getpid()
    pid = fork()
    if pid == 0:
        kernel.die_with_parent(zygote)
        os.close(reader)
        _import_all(names, writer)
    os.close(writer)
    said = b""
    why = ""
    deadline = SYSTEM.now() + hang_s
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - SYSTEM.now()))
        if not ready:
            why = f"its import did not end within {hang_s:g} s"
            kernel.kill(pid)
            break
        piece = os.read(reader, 65536)
        if not piece:
            break
        said += piece
        deadline = SYSTEM.now() + hang_s
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    lines = said.decode().splitlines()
    if lines and lines[-1] == "":
        return None, ""
    last = lines[-1] if lines else names[0]
    name, _, told = last.partition(" ")
    return name, told or why or f"it ended the process (status {os.waitstatus_to_exitcode(status)})"


def _import_all(names: Sequence[str], writer: int) -> None:
    """In the child: say each name, import it, look at what it has begun. An empty line says that all is well."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    code = 1
    with contextlib.suppress(BaseException):
        threads = len(kernel.other_threads())
        for name in names:
            os.write(writer, f"{name}\n".encode())
            trouble = _import_one(name)
            if not trouble and len(kernel.other_threads()) > threads:
                trouble = "it begins threads"
            if trouble or cuda_begun():
                os.write(writer, f"{name} {trouble or 'it initializes the CUDA driver'}\n".encode())
                os._exit(1)
        os.write(writer, b"\n")
        code = 0
    os._exit(code)


def _import_one(name: str) -> str:
    """Import it; return what went wrong, in one line."""
    module, _, attribute = name.partition(":")
    asked: list[str] = []
    said = ""
    with environ.noting(environ.OF_A_RANK, asked):
        try:
            loaded = importlib.import_module(module)
            if attribute:
                getattr(loaded, attribute, None)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is told and the module left out
            said = repr(error).replace("\n", " ")
    return f"{_READS}{', '.join(asked)}, which a process has when it is a rank" if asked else said


def cuda_begun() -> bool:
    """Tell whether this process has initialized the CUDA driver: after that no child of it can use a GPU."""
    maps = Path("/proc/self/maps").read_text()
    path = next((line.split(maxsplit=5)[5] for line in maps.splitlines() if "libcuda.so" in line), None)
    if path is None:
        return False
    try:
        current = ctypes.CDLL(path).cuCtxGetCurrent
    except (OSError, AttributeError):
        return False
    context = ctypes.c_void_p()
    return bool(current(ctypes.byref(context)) != _NOT_INITIALIZED)
