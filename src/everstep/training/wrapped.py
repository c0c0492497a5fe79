"""`@everstep.resilient`: the whole ladder around one function."""

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, overload

import torch

from everstep import environ
from everstep.inprocess import call
from everstep.inprocess.assignment import Assignment
from everstep.inprocess.call import Caller
from everstep.inprocess.function import check_function, in_this_process
from everstep.recovery.session import Session
from everstep.training import alone, member
from everstep.training.exact import make_exact
from everstep.training.run import Run

DRAINS = {"drains": True}
"""What the agent is told of this call: it can be left between two steps."""
P = ParamSpec("P")
T = TypeVar("T")


def prepare(session: Session) -> None:
    """Have a new worker hear its agent, before the script's first line. Called by the launcher, by name."""
    call.install(Caller(session))
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
    check_function(function)
    if next(iter(inspect.signature(function).parameters), "") in ("self", "cls"):
        raise TypeError(
            f"{function.__qualname__} is a method, and would get its Run in the place of its object. Wrap it bound, "
            f"everstep.resilient(it.{function.__name__})(), or decorate a function."
        )

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if exact:
            make_exact()
        caller = call.current()
        if caller is None:
            return alone.call(lambda run: function(run, *args, **kwargs), chosen, environ.placement())
        return _with_agent(caller, lambda run: function(run, *args, **kwargs), chosen)

    return wrapped


def _with_agent(caller: Caller, function: Callable[[Run], T], backend: str) -> T:
    ours = member.Ours(caller.session, backend)

    def body(assignment: Assignment) -> T:
        with ours.generation(assignment) as run:
            return in_this_process(lambda: function(run))

    try:
        return caller.call(body, ours.interrupter, ours, DRAINS)
    finally:
        ours.close()
