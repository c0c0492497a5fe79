"""Where each thread of this process stands, as plain values: what a rank tells of itself when an operator asks.

With the interpreter lock held, so the frames stand still meanwhile; some ten microseconds a thread. Values of variables
are not looked at.
"""

import os
import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

MOST_THREADS, MOST_FRAMES, MOST_BESIDE, MOST_TEXT = 9, 80, 20, 200
"""So many threads, frames of the first one and of each other, letters of a name: all nodes' go over one line."""
OURS = "everstep-"
"""Threads of ours begin with it, and are left out."""
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
Frame = list[Any]
"""[file, line, function]"""


def frames(innermost: FrameType) -> list[Frame]:
    """Return a stack, the innermost frame last, without what lies around the user's script."""
    found: list[Frame] = []
    frame: FrameType | None = innermost
    while frame is not None:
        code = frame.f_code
        found.append([code.co_filename[-MOST_TEXT:], frame.f_lineno, code.co_qualname[-MOST_TEXT:]])
        frame = frame.f_back
    found.reverse()
    return inner(found)


def inner(stack: list[Frame]) -> list[Frame]:
    """Leave out what runs the user's script, and what of ours lies between it and the function that it has wrapped.

    What of ours is called from there is shown: a rank may stand in a snapshot. Nothing is left out of a stack of ours.
    """
    ours = [file.startswith((_HERE, "<frozen ")) or os.path.basename(file) == "runpy.py" for file, _, _ in stack]
    if False not in ours:
        return stack
    begin = ours.index(False)
    if True not in ours[begin:]:
        return stack[begin:]
    wrapper = ours.index(True, begin)
    if False not in ours[wrapper:]:
        return stack[begin:]
    return stack[begin:wrapper] + stack[ours.index(False, wrapper) :]


def told(first: int) -> list[dict[str, Any]]:
    """Return `{name, first, frames}` of each thread, the one with the ident `first` before the others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return bounded(
        {"name": names.get(ident, "a thread of C++"), "first": ident == first, "frames": frames(frame)}
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # the documented name
        if not names.get(ident, "").startswith(OURS)
    )


def heard(said: Any) -> list[dict[str, Any]]:
    """Read what another process has told; LookupError, TypeError or ValueError for what no `told` returns."""
    return bounded(
        {
            "name": str(thread["name"]),
            "first": bool(thread["first"]),
            "frames": [
                [str(file)[-MOST_TEXT:], int(line), str(function)[-MOST_TEXT:]]
                for file, line, function in thread["frames"][-MOST_FRAMES:]
            ],
        }
        for thread in said
    )


def bounded(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the first thread first, and leave out what is too much."""
    kept = sorted(found, key=lambda thread: not thread["first"])[:MOST_THREADS]
    return [
        thread
        | {
            "name": thread["name"][:MOST_TEXT],
            "frames": thread["frames"][-(MOST_FRAMES if thread["first"] else MOST_BESIDE) :],
        }
        for thread in kept
    ]
