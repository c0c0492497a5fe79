"""The user's function: what cannot be wrapped, and what becomes of a child that it has forked."""

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from everstep.inprocess.exception import RestartAbort

T = TypeVar("T")


def in_this_process(function: Callable[[], T]) -> T:
    """Call the user's function. A child that it has forked, and that leaves it too, ends there: it is not this rank.

    So `sys.exit` and exceptions in a forked child are the child's own, as in any script; its exit hooks do not run.
    """
    ours = os.getpid()
    try:
        result = function()
    except BaseException as error:
        if os.getpid() == ours:
            raise
        _end_child(error)
    if os.getpid() != ours:
        _end_child(None)
    return result


def check_function(function: Callable[..., Any]) -> None:
    """Refuse what returns before it has run. Raises TypeError: nothing of it would be protected."""
    kinds = {
        "a coroutine function": inspect.iscoroutinefunction,
        "an asynchronous generator function": inspect.isasyncgenfunction,
        "a generator function": inspect.isgeneratorfunction,
    }
    for kind, matches in kinds.items():
        if matches(function):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"{name} is {kind}: calling it returns at once, and what it does later could not be restarted. Wrap a "
                "plain function that runs it to its end (asyncio.run, a for loop)."
            )


def _end_child(error: BaseException | None) -> NoReturn:
    code = 0
    try:
        if isinstance(error, SystemExit):
            if error.code is not None and not isinstance(error.code, int):
                sys.stderr.write(f"{error.code}\n")
            code = exit_code(error)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code & 0xFF)


def exit_code(end: SystemExit | RestartAbort) -> int:
    """Return the code that a process which ends so leaves behind."""
    return end.code if isinstance(end, SystemExit) and isinstance(end.code, int) else 1
