"""How bytes get from live tensors into a snapshot buffer.

On the CPU a copy is whole before the call returns: what changes afterwards cannot reach the snapshot (CS-01). Small
tensors that come to lie one behind the other are copied dozens at a time, as one concatenation.

On CUDA copies go to a side stream, into host memory that is page-locked once. What anything but an optimizer's step
may change is copied before later work of the current stream (the stream waits, not the host); parameters and
optimizer state may be copied beside the next forward and backward, and the optimizer's step waits for them
(EXPERIMENTS M4). The sources are held until the copy is done (M13); whoever polls seals.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from everstep.checkpoint.core.layout import ALIGNMENT

Pair = tuple[Tensor, Tensor]
"""Destination and source, of one shape and dtype."""

SERIAL = 32768  # elements up to which torch.cat copies in one loop, whatever the number of threads
_WORD = 4


@dataclass(frozen=True, slots=True)
class Group:
    """Pairs of one dtype on one kind of device: one fused call."""

    device: str
    targets: list[Tensor]
    sources: list[Tensor]

    def copy(self, *, non_blocking: bool = False) -> None:
        """Copy them."""
        torch._foreach_copy_(self.targets, self.sources, non_blocking=non_blocking)  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Small tensors of the host, as words, with the gaps between their destinations: one call for all of them.

    A copy of its own costs a tensor a microsecond; a hundredth of that moves a hundred bytes.
    """

    target: Tensor
    sources: list[Tensor]
    device: str = "cpu"

    def copy(self, *, non_blocking: bool = False) -> None:
        """Copy them; the gaps come to hold zeros."""
        del non_blocking
        torch.cat(self.sources, out=self.target)


@dataclass(slots=True)
class _Gathering:
    """A stretch that grows."""

    raw: Tensor  # all of the buffer's bytes
    start: int = 0
    end: int = 0
    words: list[Tensor] = field(default_factory=list[Tensor])

    def takes(self, at: int, words: Tensor) -> bool:
        """Add `words` if they come right behind, and few enough are here."""
        gap = at - self.end
        if not self.words or not 0 <= gap < ALIGNMENT or (at - self.start) // _WORD + words.numel() > SERIAL:
            return False
        if gap:
            self.words.append(_zeros(gap // _WORD))
        self._add(at, words)
        return True

    def begin(self, at: int, words: Tensor) -> None:
        """Let a new stretch begin here."""
        self.start, self.words = at, []
        self._add(at, words)

    def _add(self, at: int, words: Tensor) -> None:
        self.words.append(words)
        self.end = at + words.numel() * _WORD

    def done(self) -> list[Stretch]:
        """Return the stretch, if there is one."""
        return [Stretch(self.raw[self.start : self.end].view(torch.float32), self.words)] if self.words else []


Copied = Group | Stretch


@functools.cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count)


def _words(source: Tensor) -> Tensor | None:
    """Return the bytes of a small contiguous tensor of the host as a row of words; None for any other tensor."""
    size = source.numel() * source.element_size()
    if source.device.type != "cpu" or size % _WORD or size > SERIAL * _WORD or source.data_ptr() % _WORD:
        return None
    if not source.is_contiguous() or source.is_conj() or source.is_neg():
        return None
    if source.storage_offset() * source.element_size() % _WORD:
        return None
    row = source.as_strided((source.numel(),), (1,))  # one element may be contiguous at any stride
    return row.view(torch.float32)


def grouped(pairs: Iterable[Pair], raw: Tensor) -> list[Copied]:
    """Sort pairs into groups. All destinations lie in `raw`, a row of bytes."""
    groups: dict[tuple[torch.dtype, str], Group] = {}
    stretches, gathering = list[Stretch](), _Gathering(raw)
    for to, source in pairs:
        words = _words(source)
        if words is not None:
            at = to.data_ptr() - raw.data_ptr()
            if not gathering.takes(at, words):
                stretches += gathering.done()
                gathering.begin(at, words)
            continue
        kind = source.dtype, source.device.type
        group = groups.setdefault(kind, Group(kind[1], [], []))
        group.targets.append(to)
        group.sources.append(source)
    return [*groups.values(), *stretches, *gathering.done()]


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

    def stage(self, early: Sequence[Copied], late: Sequence[Copied]) -> Copy | None:
        """Copy; None when all is done already. `late` sources are changed by an optimizer's step alone."""
        ...

    def close(self) -> None:
        """Let go of hooks; no copy is under way."""
        ...


class HostStager:
    """For state in host memory."""

    def stage(self, early: Sequence[Copied], late: Sequence[Copied]) -> Copy | None:
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

    def stage(self, early: Sequence[Copied], late: Sequence[Copied]) -> Copy | None:
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
