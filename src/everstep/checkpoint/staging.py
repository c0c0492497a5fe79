"""How bytes get from live tensors into a snapshot buffer.

On the CPU a copy is whole before the call returns: what changes afterwards cannot reach the snapshot (CS-01). Small
tensors that come to lie one behind the other are copied dozens at a time, as one concatenation. Large ones are copied
by torch's threads or by this thread alone, whichever is quicker here: threads that sleep between two steps are woken
for every tensor, and those that find no free core are waited for (20 MB in 16 tensors: 7.9 ms with two, 2.4 alone).

Many small tensors of a device are gathered there first, in a piece of its memory that is laid out as the buffer is, and
cross in one copy: a copy of its own costs each tensor a launch, some 7 µs (5,704 of them: 38 ms a step), a gathering
kernel takes dozens. The piece is `SCRATCH` bytes, and used again for one stretch after the other: they follow
each other in one stream.

On CUDA copies go to a side stream, into host memory that is page-locked once. What anything but an optimizer's step
may change is copied before later work of the current stream (the stream waits, not the host); parameters and
optimizer state may be copied beside the next forward and backward, and the optimizer's step waits for them
(EXPERIMENTS M4). The sources are held until the copy is done (M13); whoever polls seals.
"""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from everstep.checkpoint.core.layout import ALIGNMENT
from everstep.checkpoint.core.quicker import FIRST, Quicker
from everstep.clock import SYSTEM, Clock

Pair = tuple[Tensor, Tensor]
"""Destination and source, of one shape and dtype."""

SMALL = 1 << 20  # bytes up to which a device's tensor is gathered
SCRATCH = 32 << 20  # bytes of a device in which they are
SERIAL = 32768  # elements up to which torch.cat copies in one loop, whatever the number of threads
ALIKE = 1.25  # times as much or as little is the same amount, as far as the way to copy it goes
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

    def copy_alone(self) -> None:
        """Copy tensors of the host in this thread alone; where they lie is asked anew each time."""
        for to, source in zip(self.targets, self.sources, strict=True):
            if plain(to) and plain(source) and to.nbytes == source.nbytes:
                ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)
            else:
                to.copy_(source)

    @property
    def bytes(self) -> int:
        """What is moved."""
        return sum(source.nbytes for source in self.sources)


def plain(tensor: Tensor) -> bool:
    """True where a tensor's bytes are one row in memory, in the order of its elements, as they are meant."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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


class Scratch:
    """Memory on devices in which small tensors are gathered; made when it is first needed, and kept."""

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}

    def wants(self, source: Tensor) -> bool:
        """True for a tensor that is better gathered than copied by itself."""
        small: bool = 0 < source.numel() * source.element_size() <= SMALL
        odd = source.dtype is torch.complex32 and source.is_conj()  # see `_as_integers`
        return small and source.device.type != "cpu" and not odd

    def of(self, device: torch.device, size: int) -> Tensor:
        """Return so many bytes on a device, `SCRATCH` at most: the same memory each time."""
        known = self._memory.get(device)
        if known is None:
            known = self._memory[device] = torch.zeros(SCRATCH, dtype=torch.uint8, device=device)
        return known[:size]

    @property
    def bytes(self) -> int:
        """What it takes, over all devices."""
        return sum(memory.numel() for memory in self._memory.values())


@dataclass(frozen=True, slots=True)
class Gathered:
    """Small tensors of one device that come to lie one behind the other: gathered there, then one copy."""

    device: str
    target: Tensor
    scratch: Tensor
    sources: list[Tensor]
    into: tuple[tuple[list[Tensor], list[Tensor]], ...]  # places in the scratch and sources, by dtype

    def copy(self, *, non_blocking: bool = False) -> None:
        """Copy them; what comes to lie in the gaps is nobody's. Nothing else may use the scratch between the two."""
        for places, sources in self.into:
            torch._foreach_copy_(places, sources)  # pyright: ignore[reportPrivateUsage]
        self.target.copy_(self.scratch, non_blocking=non_blocking)


@dataclass(slots=True)
class _Run:
    """Small tensors of one device that lie one behind the other in the buffer."""

    start: int
    end: int
    pairs: list[Pair]

    def takes(self, at: int, pair: Pair) -> bool:
        """Add a pair that comes right behind, if there is room in the scratch."""
        size = pair[1].numel() * pair[1].element_size()
        same = self.pairs[-1][1].device == pair[1].device
        if not same or not 0 <= at - self.end < ALIGNMENT or at + size - self.start > SCRATCH:
            return False
        self.pairs.append(pair)
        self.end = at + size
        return True

    def gathered(self, raw: Tensor, scratch: Scratch) -> "Gathered":
        """Return it, ready to be copied again and again."""
        sources = [_as_integers(source) for _, source in self.pairs]
        memory = scratch.of(sources[0].device, self.end - self.start)
        into: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for (to, _), source in zip(self.pairs, sources, strict=True):
            begin = to.data_ptr() - raw.data_ptr() - self.start
            place = memory[begin : begin + source.numel() * source.element_size()].view(source.dtype).view(to.shape)
            places, from_ = into.setdefault(source.dtype, ([], []))
            places.append(place)
            from_.append(source)
        return Gathered(sources[0].device.type, raw[self.start : self.end], memory, sources, tuple(into.values()))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(source: Tensor) -> Tensor:
    """Return a tensor's bits as integers of its width: on a device nothing copies a list of uint16 or float8_e8m0fnu.

    All dtypes of one width are gathered by one call, then. A conjugate or negative view has its bits elsewhere.
    """
    bits = _INTEGERS.get(source.element_size())
    return source if bits is None or source.is_conj() or source.is_neg() else source.view(bits)


def _runs(pairs: Iterable[Pair], raw: Tensor) -> list[_Run]:
    runs = list[_Run]()
    for pair in pairs:
        at = pair[0].data_ptr() - raw.data_ptr()
        if not runs or not runs[-1].takes(at, pair):
            runs.append(_Run(at, at + pair[1].numel() * pair[1].element_size(), [pair]))
    return runs


Copied = Group | Stretch | Gathered


@functools.cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count)


def _words(source: Tensor) -> Tensor | None:
    """Return the bytes of a small contiguous tensor of the host as a row of words; None for any other tensor."""
    size = source.numel() * source.element_size()
    if source.device.type != "cpu" or size % _WORD or size > SERIAL * _WORD or source.data_ptr() % _WORD:
        return None
    if not plain(source) or source.storage_offset() * source.element_size() % _WORD:
        return None
    row = source.as_strided((source.numel(),), (1,))  # one element may be contiguous at any stride
    return row.view(torch.float32)


def grouped(pairs: Iterable[Pair], raw: Tensor, scratch: Scratch | None = None) -> list[Copied]:
    """Sort pairs into groups. All destinations lie in `raw`, a row of bytes; `scratch` is for a device's small ones."""
    given = list(pairs)
    small = [pair for pair in given if scratch is not None and scratch.wants(pair[1])]
    runs = [run for run in _runs(small, raw) if len(run.pairs) > 1] if small else []
    taken = {id(to) for run in runs for to, _ in run.pairs}
    gathered = [run.gathered(raw, scratch) for run in runs if scratch is not None]
    return [*gathered, *_plainly([pair for pair in given if id(pair[0]) not in taken], raw)]


def _plainly(pairs: Iterable[Pair], raw: Tensor) -> list[Copied]:
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

    scratch: Scratch | None  # where small tensors of a device may be gathered

    def stage(self, early: Sequence[Copied], late: Sequence[Copied]) -> Copy | None:
        """Copy; None when all is done already. `late` sources are changed by an optimizer's step alone."""
        ...

    def close(self) -> None:
        """Let go of hooks; no copy is under way."""
        ...


class HostStager:
    """For state in host memory."""

    scratch: Scratch | None = None

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._bytes = 0
        self._quicker = Quicker()

    def stage(self, early: Sequence[Copied], late: Sequence[Copied]) -> Copy | None:
        """See `Stager.stage`."""
        large = list[Group]()
        for group in (*early, *late):
            if isinstance(group, Group):
                large.append(group)
            else:
                group.copy()
        if large:
            self._copy(large)
        return None

    def _copy(self, groups: Sequence[Group]) -> None:
        size = sum(group.bytes for group in groups)
        if not self._bytes / ALIKE <= size <= self._bytes * ALIKE:
            self._bytes, self._quicker = size, Quicker()
        way = self._quicker.choose()
        begun = self._clock.now()
        for group in groups:
            if way == FIRST:
                group.copy_alone()
            else:
                group.copy()
        self._quicker.took(way, self._clock.now() - begun)

    def close(self) -> None:
        """See `Stager.close`."""


class DeviceCopy:
    """A copy on a side stream; holds its sources until it is done."""

    def __init__(self, event: torch.cuda.Event, sources: list[Tensor]) -> None:
        self.event = event
        self._sources = sources

    def done(self) -> bool:
        """See `Copy.done`."""
        arrived = bool(self.event.query())
        if arrived:
            self._sources = []  # what the user has let go of meanwhile is free now (CASES CS-10)
        return arrived

    def wait(self) -> None:
        """See `Copy.wait`."""
        self.event.synchronize()
        self._sources = []


class DeviceStager:
    """For state on a CUDA device."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.scratch: Scratch | None = Scratch()
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
        self._hooks, self._last, self.scratch = [], None, None

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
