"""`@everstep.resilient`: the whole ladder around one function."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, overload

import torch

from everstep import environ
from everstep.inprocess.call import Assignment, Caller
from everstep.recovery import session as sessions
from everstep.recovery.session import Session
from everstep.training import alone, member
from everstep.training.exact import make_exact
from everstep.training.run import Run

P = ParamSpec("P")
T = TypeVar("T")

_caller: Caller | None = None


def prepare(session: Session) -> None:
    """Have a new worker hear its agent, before the script's first line. Called by the launcher, by name."""
    global _caller
    _caller = Caller(session)
    session.open_ledger()
    session.start()


@overload
def resilient(function: Callable[Concatenate[Run, P], T], /) -> Callable[P, T]: ...


@overload
def resilient(
    *, backend: str | None = None, exact: bool = False
) -> Callable[[Callable[Concatenate[Run, P], T]], Callable[P, T]]: ...


def resilient(
    function: Callable[Concatenate[Run, P], T] | None = None,
    /,
    *,
    backend: str | None = None,
    exact: bool = False,
) -> Callable[P, T] | Callable[[Callable[Concatenate[Run, P], T]], Callable[P, T]]:
    """Wrap a training function so that faults cost only what they broke.

    The function gets a `Run` before its other arguments and is called once in every generation; `run.steps` resumes
    where the world stands. The default process group exists while it runs (gloo on the CPU, NCCL on CUDA; `backend`
    overrides). `exact=True` sets what bit-exact repetition needs (deterministic algorithms, no autotuning).

    The wrapped call must be made on the main thread, once a process. It returns what the function returned here when
    every rank has completed; `sys.exit(0)` inside completes, any other code ends the job with it.
    """
    if function is None:
        return lambda given: _wrap(given, backend, exact)
    return _wrap(function, backend, exact)


def _wrap(function: Callable[Concatenate[Run, P], T], backend: str | None, exact: bool) -> Callable[P, T]:
    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if exact:
            make_exact()
        if sessions.current() is None or _caller is None:
            return alone.call(lambda run: function(run, *args, **kwargs), chosen, environ.placement())
        return _with_agent(_caller, lambda run: function(run, *args, **kwargs), chosen)

    return wrapped


def _with_agent(caller: Caller, function: Callable[[Run], T], backend: str) -> T:
    ours = member.Ours(caller.session, backend)

    def body(assignment: Assignment) -> T:
        with ours.generation(assignment) as run:
            return function(run)

    try:
        return caller.call(body, ours.interrupter, ours)
    finally:
        ours.close()
