"""One selector, one thread: descriptors, timers and signals, each handed to the callable that asked for it."""

import heapq
import itertools
import selectors
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from everstep.clock import Clock


@dataclass(order=True)
class Timer:
    """A call that is due at `when`; cancelled by setting `call` to None."""

    when: float
    number: int
    call: Callable[[], None] | None = field(compare=False)


class Loop:
    """Runs until `stop` is called. Nothing that it calls may block."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._numbers = itertools.count()
        self._running = True
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._on_signal: Callable[[int], None] | None = None
        self._old: dict[int, object] = {}

    def watch(self, fd: int, call: Callable[[], None], *, write: bool = False) -> None:
        """Call when `fd` can be read (or written, with `write`). Watching again replaces."""
        mask = selectors.EVENT_WRITE if write else selectors.EVENT_READ
        try:
            key = self._selector.get_key(fd)
        except KeyError:
            self._selector.register(fd, mask, {mask: call})
            return
        self._selector.modify(fd, key.events | mask, {**key.data, mask: call})

    def unwatch(self, fd: int, *, write: bool = False) -> None:
        """Stop watching `fd` for writing, or altogether."""
        try:
            key = self._selector.get_key(fd)
        except KeyError:
            return
        if write and key.events & selectors.EVENT_READ:
            self._selector.modify(fd, selectors.EVENT_READ, {selectors.EVENT_READ: key.data[selectors.EVENT_READ]})
            return
        self._selector.unregister(fd)

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once, in `delay_s` seconds."""
        timer = Timer(self.clock.now() + delay_s, next(self._numbers), call)
        heapq.heappush(self._timers, timer)
        return timer

    def hear(self, signals: Iterable[int], call: Callable[[int], None]) -> None:
        """Call with the number of each signal that arrives; SIGCHLD is heard too, as 0-sized news of a death."""
        self._on_signal = call
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in signals:
            self._old[number] = signal.signal(number, _ignore)
        self.watch(self._woken.fileno(), self._read_signals)

    def _read_signals(self) -> None:
        try:
            numbers = self._woken.recv(4096)
        except BlockingIOError:
            return
        for number in numbers:
            if self._on_signal is not None:
                self._on_signal(number)

    def stop(self) -> None:
        """Let `run` return after the present round."""
        self._running = False

    def run(self) -> None:
        """Serve until stopped; at once where that has been said before."""
        while self._running:
            self.turn()

    def turn(self) -> None:
        """One round: wait for the next descriptor, signal or timer, and hand it out."""
        timeout = max(0.0, self._timers[0].when - self.clock.now()) if self._timers else None
        for key, mask in self._selector.select(timeout):
            for bit, call in tuple(key.data.items()):
                if mask & bit:
                    call()
        now = self.clock.now()
        while self._timers and self._timers[0].when <= now:
            timer = heapq.heappop(self._timers)
            if timer.call is not None:
                timer.call()

    def close(self) -> None:
        """Give the signals back and close."""
        if self._on_signal is not None:
            signal.set_wakeup_fd(-1)
            for number, old in self._old.items():
                signal.signal(number, old)  # type: ignore[arg-type]  # what signal.signal returned
        self._selector.close()
        self._woken.close()
        self._waker.close()


def _ignore(*_: object) -> None:
    """Python's handler: the wake-up descriptor carries the news."""
