"""Files that a script has left open: an interpreter that ends writes what their buffers hold, and so does a worker.

Rule 1: nothing is torn down (ADR 0007): buffers are written, and what writes its last part when it is closed is closed.
Rule 2: a file that cannot be written is told of, and keeps no process from its end.

Main thread, after the exit hooks, right before the process ends.
"""

import contextlib
import ctypes
import gc
import io
import sys
from typing import Any

_CLOSED = (("zipfile", "ZipFile"), ("shelve", "Shelf"), ("tempfile", "_TemporaryFileCloser"))
"""Have a destructor that closes them, and are no files themselves."""


def write() -> None:
    """Write what is buffered in every file that is open here, those of C's standard library too."""
    files: list[list[Any]] = [[], [], []]
    closers = tuple(getattr(sys.modules[module], name) for module, name in _CLOSED if module in sys.modules)
    base = io.IOBase.__mro__[1]  # C's own: `io.IOBase` is asked by way of `abc`, which takes ten times as long
    for one in gc.get_objects():
        kind = type(one)
        if issubclass(kind, base):
            stage = _stage(kind)
            if stage is not None:
                files[stage].append(one)
        elif closers and issubclass(kind, closers):
            files[1].append(one)
    lost: set[str] = set()
    for stage, many in enumerate(files):
        for one in many:
            _settle(one, lost, close=stage == 1)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _stage(kind: type[Any]) -> int | None:
    """Return when a kind's turn is: text first, then what writes into other files, then plain buffers."""
    if issubclass(kind, io.TextIOWrapper):
        return 0
    if issubclass(kind, io.BufferedWriter | io.BufferedRandom | io.BufferedRWPair):
        return 2
    if kind.__module__ in ("_io", "io") or issubclass(kind, io.FileIO):
        return None
    return 1


def _settle(file: Any, lost: set[str], *, close: bool) -> None:
    try:
        if close:
            file.close()
        elif not file.closed:
            file.flush()
    except OSError as error:
        name = str(getattr(file, "name", file))
        if name not in lost:  # a text and the buffer below it are one file
            lost.add(name)
            sys.stderr.write(f"everstep: {name} was left open, and what it still held is lost: {error}\n")
    except Exception:  # noqa: BLE001 - what is closed already, or never was open: nothing of it can be lost
        return
