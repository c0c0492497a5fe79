"""py-spy, where it is installed: reads the stacks of a Python process from outside, without stopping it.

Rule 1: nothing blocks: it is a process of its own, with a deadline, and is read by the loop.
Rule 2: what cannot be had is left out; why, is not asked (no right to read another's memory, a strange interpreter).
"""

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep import environ
from everstep.process import kernel
from everstep.process.loop import Loop, Timer
from everstep.process.threads import MOST_TEXT, OURS, bounded, inner

LIMIT_S = 3.0
MOST_BYTES = 4 * 1024 * 1024
Then = Callable[[list[dict[str, Any]]], None]
"""Hears what `process.threads.told` would have told; empty: nothing could be read."""


@dataclass(eq=False)
class _Look:
    pid: int
    fd: int
    then: Then
    timer: Timer | None = None
    found: bytearray = field(default_factory=bytearray)


class Spy:
    """Reads stacks for one agent; all on the loop's thread."""

    def __init__(self, loop: Loop, path: str | None = None) -> None:
        """`path` of py-spy; where none is given it is looked for at the first use."""
        self._loop, self._path = loop, path

    @property
    def path(self) -> str:
        """Where it is; empty: nowhere."""
        if self._path is None:
            self._path = find_spy()
        return self._path

    def look(self, pid: int, then: Then) -> None:
        """Read the stacks of `pid`; `then` comes once, within `LIMIT_S`."""
        if not self.path:
            then([])
            return
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        actions = [(os.POSIX_SPAWN_DUP2, old, new) for old, new in ((nowhere, 0), (theirs, 1), (nowhere, 2))]
        command = [self.path, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        try:
            child = os.posix_spawn(self.path, command, environ.snapshot(), file_actions=actions)
        except OSError:
            os.close(ours)
            then([])
            return
        finally:
            os.close(theirs)
            os.close(nowhere)
        look = _Look(child, ours, then)
        look.timer = self._loop.later(LIMIT_S, functools.partial(self._end, look, whole=False))
        self._loop.watch(ours, functools.partial(self._read, look))

    def _read(self, look: _Look) -> None:
        try:
            piece = os.read(look.fd, 65536)
        except BlockingIOError:
            return
        look.found += piece
        if not piece or len(look.found) > MOST_BYTES:
            self._end(look, whole=not piece)

    def _end(self, look: _Look, *, whole: bool) -> None:
        if not whole:
            kernel.kill(look.pid)
        if look.timer is not None:
            look.timer.call = None
        self._loop.unwatch(look.fd)
        os.close(look.fd)
        look.then(read(bytes(look.found)) if whole else [])


def read(text: bytes) -> list[dict[str, Any]]:
    """Turn what `py-spy dump --json` prints into what `process.threads.told` tells; empty for anything else."""
    try:
        return bounded(_thread(each) for each in json.loads(text) if not str(each["thread_name"]).startswith(OURS))
    except (ValueError, KeyError, TypeError):
        return []


def _thread(told: dict[str, Any]) -> dict[str, Any]:
    stack = [[str(f["filename"])[-MOST_TEXT:], int(f["line"]), str(f["name"])[-MOST_TEXT:]] for f in told["frames"]]
    stack.reverse()
    name = str(told["thread_name"] or "")
    return {"name": name, "first": told["os_thread_id"] == told["pid"], "frames": inner(stack)}


def find_spy() -> str:
    """Return the path of py-spy, beside the interpreter or in PATH; empty where there is none."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy") or ""
