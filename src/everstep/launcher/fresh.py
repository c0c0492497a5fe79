"""What imports leave behind in a process, and what a fresh interpreter has in its place.

Rule 1: the zygote notes what it was before its imports (`begin`, `own_imports_done`); a child of it puts back what a
        script's own imports would not have changed (`become`), before the script's first line.
Rule 2: nothing here starts a thread or touches a device; main thread only.

What stays different is meant, and stands in docs/launcher.md: modules that are loaded already, names that ps shows.
"""

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep import environ

_ABOVE = 1008
"""Where descriptors of ours lie in a worker, or as high as its limit allows: a script finds the low ones free."""
_ROOM = 16

_environment: dict[str, str] = {}
_after_torch: dict[str, str] = {}
_path: list[str] = []
_filters: list[Any] = []
_with_torch: set[str] = set()
_KEPT = ("__main__", "everstep", "encodings")
modules: set[str] = set()
"""Loaded for our own sake."""
found: list[str] = []
"""Loaded since the last run had."""


def begin() -> None:
    """Note what this interpreter was before it imported anything for others."""
    _environment.update(environ.snapshot())
    # `python -m` has put the current folder first; a script has its own there
    _path[:] = sys.path if sys.flags.safe_path else sys.path[1:]


def users_imports_done() -> None:
    """What torch alone has changed is what every script's import of it changes."""
    _filters[:] = warnings.filters
    _after_torch.update(environ.snapshot())
    _with_torch.update(sys.modules)


def own_imports_done() -> None:
    """What has been imported beyond torch was for us: no script has asked for filters and variables that it set."""
    environ.replace(_after_torch)
    modules.update(sys.modules)
    warnings.filters[:] = _filters  # type: ignore[index] # a list, by the documentation too
    _filters_changed()


def _filters_changed() -> None:
    changed: Callable[[], None] | None = getattr(warnings, "_filters_mutated", None)
    if changed is not None:
        changed()


def set_by_imports() -> dict[str, str]:
    """Return the variables that imports have set or changed here: in a fresh process the same import does it."""
    return {name: value for name, value in environ.snapshot().items() if _environment.get(name) != value}


@contextlib.contextmanager
def low_taken() -> Generator[None]:
    """Have whatever is opened meanwhile lie where `high` puts things: `mmap` keeps a copy that cannot be moved."""
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while not taken or taken[-1] < _above() - 1:
                taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)


def _above() -> int:
    return max(3, min(_ABOVE, os.sysconf("SC_OPEN_MAX") - _ROOM))


def high(fds: Sequence[int]) -> list[int]:
    """Move descriptors out of a script's way; those for which there is no room stay where they are."""
    moved: list[int] = []
    for fd in fds:
        try:
            new = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _above())
        except OSError:
            moved.append(fd)
            continue
        os.close(fd)
        moved.append(new)
    return moved


def interpreter(words: Sequence[str]) -> None:
    """Show path and command line of `python -u …`, before its script's own folder is put in front."""
    sys.path[:] = _path
    sys.orig_argv = [sys.executable, *words]


def give_way(folder: str) -> None:
    """Forget what was loaded beforehand where a module of this folder has its name: the script's import finds its own.

    What torch itself loads stays: a script beside which lies another module of such a name imports no torch.
    """
    try:
        entries = [entry.name for entry in os.scandir(folder) if _importable(entry)]
    except OSError:
        return
    for top in {name.partition(".")[0] for name in entries} & (sys.modules.keys() - _with_torch):
        origin = getattr(getattr(sys.modules[top], "__spec__", None), "origin", None)
        if top in _KEPT or not isinstance(origin, str) or not os.path.isabs(origin):  # built in, frozen: never shadowed
            continue
        if os.path.realpath(origin).startswith(os.path.realpath(folder) + os.sep):
            continue
        for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
            del sys.modules[name]


def _importable(entry: "os.DirEntry[str]") -> bool:
    if entry.name.endswith((".py", ".so")):
        return entry.is_file()
    return os.path.exists(os.path.join(entry.path, "__init__.py"))


def unfork(threads: int) -> None:
    """Have nothing in common with other children of one zygote. `threads`: of each library's pool; 0: its default."""
    thread = threading.main_thread()
    if hasattr(thread, "_set_native_id"):  # a fork keeps its parent's
        thread._set_native_id()  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    multiprocessing.current_process().authkey = os.urandom(32)  # else all workers of the node would share it
    tempfile.tempdir = None  # found by an import, with the variables of that moment
    _fresh_randomness()
    _threads(threads)


def _fresh_randomness() -> None:
    """Draw seeds as a fresh interpreter would. A device's generator is left alone: fresh, all have torch's default."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _threads(count: int) -> None:
    """The zygote's pools are of one thread, by variables that libraries read when they are loaded (Z1, Z6)."""
    torch = sys.modules.get("torch")
    usable = len(os.sched_getaffinity(0))
    if torch is not None:
        torch.set_num_threads(count or (cores() if torch.backends.mkl.is_available() else usable))
    given = environ.get("OPENBLAS_NUM_THREADS", "")
    for get, put in zip(blas("get_num_threads"), blas("set_num_threads"), strict=True):
        wanted = int(given) if given and given.isdigit() else count or usable
        if wanted != get():  # to say what it does already would begin a thread
            put(wanted)


def cores(sysfs: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return how many physical cores this process may run on: so many threads MKL takes where nobody says."""
    cpus = os.sched_getaffinity(0)
    try:
        return len({(sysfs / f"cpu{n}/topology/thread_siblings_list").read_text() for n in cpus})
    except OSError:
        return len(cpus)


def blas(name: str) -> list[Callable[..., Any]]:
    """Return the function `name` of every OpenBLAS that is loaded here (NumPy and SciPy bring one each)."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "openblas" in line)
    found: list[Callable[..., Any]] = []
    for path in paths:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix in ("scipy_", ""):
            for suffix in ("64_", "_64", ""):
                function = getattr(library, f"{prefix}openblas_{name}{suffix}", None)
                if function is not None:
                    found.append(function)
    return found


def environment(wanted: Mapping[str, str]) -> dict[str, str]:
    """Return what a worker's environment is in this process: what was wanted, and what imports have set."""
    return dict(wanted) | set_by_imports()
