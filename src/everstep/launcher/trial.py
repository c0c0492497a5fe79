"""Modules that nobody has named are imported in a throw-away child first: what spoils a fork is left out (Z7).

A module spoils it that begins threads, initializes the CUDA driver, hangs, or ends the process; the child says each
name before it imports it, so that whoever reads knows where it ended. Once more without it, a few times.
"""

import contextlib
import ctypes
import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.clock import SYSTEM
from everstep.process import kernel

HANG_S = 60.0
MOST_BAD = 8
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def harmless(
    names: Sequence[str], fork: Callable[[], int], tell: Callable[[str], None], hang_s: float = HANG_S
) -> list[str]:
    """Return those that can be imported before a fork; `tell` hears of each that cannot, and why."""
    left = [name for name in names if name not in sys.modules]
    for _ in range(MOST_BAD):
        if not left:
            return []
        bad, why = _try(left, fork, hang_s)
        if bad is None:
            return left
        tell(f"{bad} is imported by each worker itself, as the last run did: {why}")
        left.remove(bad)
    tell(f"{MOST_BAD} modules of the last run cannot be imported before a fork: none of them is")
    return []


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
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told and the module left out
                os.write(writer, f"{name} {error!r}\n".replace("\n", " ").encode() + b"\n")
                os._exit(1)
            trouble = "it begins threads" if len(kernel.other_threads()) > threads else ""
            if trouble or cuda_begun():
                os.write(writer, f"{name} {trouble or 'it initializes the CUDA driver'}\n".encode())
                os._exit(1)
        os.write(writer, b"\n")
        code = 0
    os._exit(code)


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
