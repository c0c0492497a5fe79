"""A worker's side of the line to its agent: what the agent made this process, and who listens to what it says.

One `Session` a process, made when an agent forks it, before the user's script begins. Where there is no agent (plain
torchrun, a bare script) there is none, and the surface runs without the ladder.

Threads: `serve` runs on the waiter thread, which owns receiving; everything else may be called from any thread.
"""

import itertools
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.clock import SYSTEM, Clock
from everstep.errors import ProtocolError
from everstep.process.page import Page
from everstep.recovery.core.words import Incarnation
from everstep.recovery.link import Link, LinkClosed
from everstep.telemetry import JsonLines, Telemetry

MOST_UNHEARD = 256
Handler = Callable[[Mapping[str, Any], Sequence[int]], None]


@dataclass
class Session:
    """What an agent's process holds of its agent."""

    link: Link
    page: Page
    job: str
    run_dir: Path
    slot: int
    incarnation: Incarnation
    clock: Clock = SYSTEM
    assigned: Mapping[str, Any] | None = None  # the assignment that came with `begin`, until the wrapped call takes it
    called: bool = False  # a wrapped function has been entered in this process
    telemetry: Telemetry = field(init=False)
    _handlers: dict[str, Handler] = field(default_factory=dict[str, Handler])
    _replies: "dict[int, queue.Queue[tuple[Mapping[str, Any], Sequence[int]]]]" = field(default_factory=dict)
    _unheard: dict[str, list[tuple[Mapping[str, Any], Sequence[int]]]] = field(
        default_factory=dict[str, list[tuple[Mapping[str, Any], Sequence[int]]]]
    )
    _listening: threading.Lock = field(default_factory=threading.Lock)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _waiter: threading.Thread | None = None
    lost: Callable[[], None] | None = None  # what to do when the agent is gone; None: end this process

    def __post_init__(self) -> None:
        self.telemetry = Telemetry("worker", clock=self.clock, slot=self.slot)

    def open_ledger(self) -> None:
        """Begin this process's own ledger file."""
        path = self.run_dir / "events" / f"worker-{self.incarnation.pid}-{self.incarnation.start}.jsonl"
        self.telemetry.sinks.append(JsonLines(path))

    def on(self, prefix: str, handler: Handler) -> None:
        """Have `handler` called, on the waiter thread, with every message whose kind is `prefix.…`.

        What came before anybody listened is handed over first, on the caller's thread.
        """
        with self._listening:
            for message, fds in self._unheard.pop(prefix, []):
                handler(message, fds)
            self._handlers[prefix] = handler

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Tell the agent; a vanished agent is the waiter's business and not the caller's."""
        try:
            self.link.send(message, fds)
        except LinkClosed:
            return

    def call(self, message: Mapping[str, Any], timeout_s: float) -> tuple[Mapping[str, Any], Sequence[int]]:
        """Ask the agent and wait for its answer: a message with the same `call` number.

        Raises TimeoutError when none came. Never call this on the waiter thread.
        """
        if threading.current_thread() is self._waiter:
            raise ProtocolError("Session.call on the waiter thread would wait for itself: send a message instead")
        number = next(self._numbers)
        self._replies[number] = queue.Queue(1)
        try:
            self.send({**message, "call": number})
            return self._replies[number].get(timeout=timeout_s)
        except queue.Empty:
            kind = message["kind"]
            raise TimeoutError(f"the agent did not answer {kind} within {timeout_s:g} s") from None
        finally:
            del self._replies[number]

    def start(self) -> None:
        """Start the waiter thread, once."""
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._serve, name="everstep-waiter", daemon=True)
            self._waiter.start()

    def _serve(self) -> None:
        while True:
            try:
                message, fds = self.link.receive()
            except LinkClosed:
                break
            try:
                self._dispatch(message, fds)
            except Exception as error:  # noqa: BLE001 - whatever it is, the agent must hear that this process is not well
                self._unwell(str(message["kind"]), error)
        if self._waiter is not None:
            (self.lost or _end_now)()

    def _unwell(self, kind: str, error: Exception) -> None:
        """A handler has failed, so this process has not done what it was told: it asks to be replaced, and hears on."""
        sys.stderr.write("".join(traceback.format_exception(error)))
        self.send({"kind": "world.replace", "text": f"it failed over {kind}: {error!r}"[:2000]})

    def _dispatch(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        waiting = self._replies.get(message.get("answers", -1))
        if waiting is not None:
            waiting.put((message, fds))
            return
        prefix = str(message["kind"]).partition(".")[0]
        with self._listening:
            handler = self._handlers.get(prefix)
            if handler is None:
                self._keep(prefix, message, fds)
                return
        handler(message, fds)

    def _keep(self, prefix: str, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        """A script that is slow to come to its wrapped call has no listeners yet; the oldest are dropped first."""
        kept = self._unheard.setdefault(prefix, [])
        kept.append((message, fds))
        if len(kept) > MOST_UNHEARD:
            for fd in kept.pop(0)[1]:
                os.close(fd)

    def stop(self) -> None:
        """Wake and join the waiter (E8, P11: no thread of ours is inside a wait when the interpreter ends)."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and waiter is not threading.current_thread():
            self.lost = _nothing
            self.link.shutdown()
            waiter.join(5.0)


def _end_now() -> None:
    """The agent is gone, and with it this node: no eyes, no store, nobody to report to (P15)."""
    os.write(2, b"everstep: the agent is gone; this worker ends\n")
    os._exit(1)


def _nothing() -> None:
    return


_current: Session | None = None


def current() -> Session | None:
    """The session of this process, or None where no agent started it."""
    return _current if _current is not None and _current.incarnation.pid == os.getpid() else None


def install(session: Session) -> None:
    """Make `session` this process's own (by the code that is forked, once)."""
    global _current
    _current = session
