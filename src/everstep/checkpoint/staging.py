"""How bytes get from live tensors into a snapshot buffer.

On the CPU a copy is whole before the call returns: what changes afterwards cannot reach the snapshot (CS-01).

On CUDA copies go to a side stream, into host memory that is page-locked once. What anything but an optimizer's step
may change is copied before later work of the current stream (the stream waits, not the host); parameters and
optimizer state may be copied beside the next forward and backward, and the optimizer's step waits for them
(EXPERIMENTS M4). The sources are held until the copy is done (M13); whoever polls seals.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Destination and source, of one shape and dtype."""


@dataclass(frozen=True, slots=True)
class Group:
    """Pairs of one dtype on one kind of device: one fused call."""

    device: str
    targets: list[Tensor]
    sources: list[Tensor]

    def copy(self, *, non_blocking: bool = False) -> None:
        """Copy them."""
        torch._foreach_copy_(self.targets, self.sources, non_blocking=non_blocking)  # pyright: ignore[reportPrivateUsage]


def grouped(pairs: Iterable[Pair]) -> list[Group]:
    """Sort pairs into groups."""
    groups: dict[tuple[torch.dtype, str], Group] = {}
    for to, source in pairs:
        kind = source.dtype, source.device.type
        group = groups.setdefault(kind, Group(kind[1], [], []))
        group.targets.append(to)
        group.sources.append(source)
    return list(groups.values())


class Copy(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """True when every byte has arrived. Never waits; any thread."""
        ...

    def wait(self) -> None:
        """Return when every byte has arrived."""
        ...


class Stager(Protocol):
    """Copies groups. Called on the training thread, once a step."""

    def stage(self, early: Sequence[Group], late: Sequence[Group]) -> Copy | None:
        """Copy; None when all is done already. `late` sources are changed by an optimizer's step alone."""
        ...

    def close(self) -> None:
        """Let go of hooks; no copy is under way."""
        ...


class HostStager:
    """For state in host memory."""

    def stage(self, early: Sequence[Group], late: Sequence[Group]) -> Copy | None:
        """See `Stager.stage`."""
        for group in (*early, *late):
            group.copy()
        return None

    def close(self) -> None:
        """See `Stager.close`."""


class DeviceCopy:
    """A copy on a side stream; holds its sources until it is done."""

    def __init__(self, event: torch.cuda.Event, sources: list[Tensor]) -> None:
        self.event = event
        self._sources = sources

    def done(self) -> bool:
        """See `Copy.done`."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See `Copy.wait`."""
        self.event.synchronize()


class DeviceStager:
    """For state on a CUDA device."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._stream = torch.cuda.Stream()
        self._last: DeviceCopy | None = None
        self._hooks = [optimizer.register_step_pre_hook(self._gate) for optimizer in optimizers]

    def stage(self, early: Sequence[Group], late: Sequence[Group]) -> Copy | None:
        """See `Stager.stage`. Host tensors are copied before it returns."""
        for group in (*early, *late):
            if group.device == "cpu":
                group.copy()
        now, then = [[group for group in groups if group.device != "cpu"] for groups in (early, late)]
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            soon, done = torch.cuda.Event(), torch.cuda.Event()
            for group in now:
                group.copy(non_blocking=True)
            soon.record()
            for group in then:
                group.copy(non_blocking=True)
            done.record()
        current.wait_event(soon)
        self._last = DeviceCopy(done, [source for group in (*now, *then) for source in group.sources])
        return self._last

    def close(self) -> None:
        """See `Stager.close`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._last = [], None

    def _gate(self, *_: Any) -> None:
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last.event)


def page_lock(raw: Tensor) -> bool:
    """Register mapped memory with CUDA; False where the driver does not allow it: copies are slower then."""
    runtime: Any = torch.cuda.cudart()
    return int(runtime.cudaHostRegister(raw.data_ptr(), raw.numel(), 0)) == 0


def page_unlock(raw: Tensor) -> None:
    """Undo `page_lock`, before the memory is unmapped."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(raw.data_ptr())
