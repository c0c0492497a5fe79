"""How a rank monitor finds what its agent gave its process: the page, the settings; and who uses them."""

import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from everstep import environ
from everstep.errors import UsageError
from everstep.fault_tolerance.config import FaultToleranceConfig
from everstep.process import stacks
from everstep.process.monitor import PAGE, SETTINGS
from everstep.process.page import Page
from everstep.recovery import session


class RankMonitorClientError(Exception):
    """A rank monitor that cannot do what it was called for; the message says why."""


_page: tuple[int, Page] | None = None  # of which process
_signal: tuple[int, int] | None = None
_holder: "weakref.ref[object] | None" = None


def page() -> Page:
    """Return the page of this process's rank. RankMonitorClientError where no agent has made one."""
    global _page
    own = session.current()
    if own is not None:
        return own.page
    if _page is None or _page[0] != os.getpid():
        _page = (os.getpid(), _opened(environ.get(PAGE)))
    return _page[1]


def _opened(path: str | None) -> Page:
    """Map a page by its name: this process is no fork of the agent's, but begun by one that is."""
    if path is None:
        raise RankMonitorClientError(
            "no agent watches this process: start the script with `everstep run` (torchrun's and ft_launcher's flags "
            "hold there); under plain torchrun nobody would judge its heartbeats."
        )
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return Page(fd, stacks=True)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise RankMonitorClientError(
            f"the agent that {PAGE}={path} names is gone, or is not in this container: {error}."
        ) from None


def settings() -> FaultToleranceConfig:
    """Return the settings that the launcher was given, and NVRx's defaults for the others."""
    told = environ.get(SETTINGS)
    if told is None:
        return FaultToleranceConfig()
    try:
        given = json.loads(told)
    except ValueError as error:
        raise UsageError(f"{SETTINGS} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise UsageError(f"{SETTINGS}={told!r}: a JSON object of settings is expected.")
    return FaultToleranceConfig.from_kwargs(**given)


def take(held: Page, holder: object) -> None:
    """`holder` monitors this rank from here on. RankMonitorClientError where somebody else does, in its generation."""
    global _holder
    owner = held.monitor.owner
    if owner is not None and owner[0] == held.generation:
        before = _holder() if _holder is not None else None
        if owner[1] == os.getpid() and before is not None:
            raise RankMonitorClientError(
                "another RankMonitorClient of this process monitors its rank: shut that one down first."
            )
        if owner[1] != os.getpid() and Path(f"/proc/{owner[1]}").exists():
            raise RankMonitorClientError(f"process {owner[1]} monitors this rank already: one can, at a time.")
    _holder = weakref.ref(holder)


def let_go(held: Page) -> None:
    """Whoever monitored is gone; a client that has taken its place meanwhile goes on."""
    holder, owner = _holder() if _holder is not None else None, held.monitor.owner
    if not getattr(holder, "is_initialized", False) and owner is not None and owner[1] == os.getpid():
        held.monitor.end()


def listen(held: Page) -> int:
    """Have this process write its stacks when its agent asks; return the signal, 0 where the agent knows one."""
    global _signal
    own = session.current()
    if own is not None and own.assigned is not None and own.assigned.get("wrapped"):
        return 0
    if _signal is None or _signal[0] != os.getpid():
        _signal = (os.getpid(), stacks.listen(held.stacks_fd))
    return _signal[1]


def longest(seen: Sequence[float]) -> list[float]:
    """Return the most of each number over all ranks. A collective."""
    import torch  # noqa: PLC0415 - only who calculates needs it
    import torch.distributed as dist  # noqa: PLC0415

    on_device = "nccl" in str(dist.get_backend()) and torch.cuda.is_available()
    told = torch.tensor(list(seen), dtype=torch.float64, device="cuda" if on_device else "cpu")
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return [float(value) for value in told.tolist()]
