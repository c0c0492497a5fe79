"""What can be seen of a loop that says nothing of its steps: how often it has turned, and where (ADR 0012).

A turn is an optimizer's step. In a process that uses no optimizer of torch's it is a collective, called from a line of
the user's own that has called one several times before: a loop of set-up has other lines, and calls from libraries (a
sharded forward gathers once a layer) turn with layers.

Rule 1: what is counted is counted on the thread of the wrapped call, in one generation.
Rule 2: a path of offsets is kept of the last turn, never a frame: frames hold the model (IR-01).
Rule 3: nothing here may change what the user's code does, nor what a compiler makes of it: in traced code the hooks do
        nothing.
What it cannot see: a loop without optimizer whose collectives are called by a function, or in C++ alone; an optimizer
that is not torch's, or is compiled together with the step. There NVRx's times hold.
"""

import functools
import re
import sys
import threading
from collections.abc import Callable, Hashable
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from everstep.clock import Clock
from everstep.inprocess.core import loops
from everstep.process.page import Page

BEFORE = 7
"""So many collectives of one line are none of a loop yet."""
_ASKED = "_rank_not_in_group"  # what each collective of c10d asks first
_C10D = frozenset((c10d.__file__, c10d.__file__.replace("distributed_c10d", "c10d_logger")))
_ASIDE = ("get_", "_")  # functions of c10d that ask as well, and are no collectives
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<")


class Rhythm:
    """Counts the turns of one wrapped function, and notes them on its page."""

    def __init__(self, page: Page, clock: Clock) -> None:
        self._page, self._clock = page, clock
        self._thread = self._depth = 0
        self._counts: dict[Hashable, int] = {}
        self._turns = 0
        self._path: loops.Path = ()
        self._optimizes = False
        self._unhook: list[Callable[[], object]] = []

    def begin(self) -> None:
        """A generation begins on this thread; the caller is about to call the function."""
        self._thread, self._depth = threading.get_ident(), len(_frames(sys._getframe(1)))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        self._forget()
        if not self._unhook:
            self._watch()

    def close(self) -> None:
        """The call is over: give torch back as it was."""
        for undo in self._unhook:
            undo()
        self._unhook.clear()

    def inside(self, frame: FrameType) -> bool:
        """Tell whether the thread whose innermost frame this is stands in the loop that turned last. Any thread."""
        return loops.together(self._path, self._path_of(frame))

    def _watch(self) -> None:
        self._unhook.append(register_optimizer_step_post_hook(self._stepped).remove)
        asked = getattr(c10d, _ASKED, None)
        if asked is None:  # a torch that has it no more
            return

        @functools.wraps(asked)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._called(sys._getframe(1))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # the documented name
            return asked(*args, **kwargs)

        setattr(c10d, _ASKED, watched)
        self._unhook.append(lambda: setattr(c10d, _ASKED, asked))

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if not self._optimizes:
            self._optimizes = True
            self._forget()
        self._count(id(optimizer), sys._getframe(1), 0)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def _called(self, frame: FrameType) -> None:
        """A function of c10d, `frame`, may be a collective that was called from the user's own line."""
        if self._optimizes or threading.get_ident() != self._thread or frame.f_code.co_name.startswith(_ASIDE):
            return
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_filename in _C10D:
            caller = caller.f_back
        if caller is not None and _own(caller.f_code):
            self._count((caller.f_code, caller.f_lasti), caller, BEFORE)

    def _count(self, what: Hashable, frame: FrameType, before: int) -> None:
        self._counts[what] = count = self._counts.get(what, 0) + 1
        if count > max(before, self._turns):
            self._turns = count
            self._path = self._path_of(frame)
            self._page.turned(self._turns, self._clock.now())

    def _forget(self) -> None:
        self._counts.clear()
        self._turns, self._path = 0, ()
        self._page.turned(0, 0.0)

    def _path_of(self, frame: FrameType) -> loops.Path:
        """Return where the function stands; loops that it is called in are not its own."""
        return _frames(frame)[self._depth :]


def _frames(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Return where a thread stands, from the root of its stack on."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found[::-1]


@functools.lru_cache(maxsize=1024)
def _own(code: CodeType) -> bool:
    """Tell whether a function is the user's own."""
    return not _LIBRARY.search(code.co_filename)
