"""What must be ended around a restart: features register it, whoever restarts a function ends it.

A checkpoint's background process, a user's own communicator, a transport engine: the restart knows none of them by
name. Each has a kind, by which the callbacks that users compose can choose.

Rule 1: everything is ended at the same time, and nobody waits longer than the deadline for anybody.
Rule 2: one that fails or is late is named; it never keeps the others from being ended.
"""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from everstep.clock import SYSTEM, Clock

Ender = Callable[[float], None]
"""Ends one resource within the given seconds. Called from any thread, perhaps more than once."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of ending many resources."""

    ended: tuple[str, ...]
    late: tuple[str, ...]  # still at it when the deadline passed; their threads go on
    failed: tuple[str, ...]  # "name: what it said"

    @property
    def clean(self) -> bool:
        """True where nothing was late and nothing failed."""
        return not self.late and not self.failed


class Registration:
    """Held by whoever registered; `release` when the resource has ended by itself."""

    def __init__(self, registry: "Registry", kind: str, name: str, end: Ender) -> None:
        self.kind, self.name, self.end = kind, name, end
        self._registry = registry

    def release(self) -> None:
        """Forget the resource. Twice does no harm."""
        self._registry.forget(self)


class Registry:
    """The resources of one process."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: list[Registration] = []

    def register(self, kind: str, name: str, end: Ender) -> Registration:
        """Have `end` called when a restart begins."""
        made = Registration(self, kind, name, end)
        with self._lock:
            self._held.append(made)
        return made

    def forget(self, registration: Registration) -> None:
        """See `Registration.release`."""
        with self._lock:
            self._held = [r for r in self._held if r is not registration]

    def enders(self, kinds: Collection[str] | None = None) -> dict[str, Ender]:
        """Return what ends the resources of these kinds (all where None), by kind and name."""
        with self._lock:
            chosen = [r for r in self._held if kinds is None or r.kind in kinds]
        return {f"{r.kind} {r.name} #{n}": r.end for n, r in enumerate(chosen)}

    def end(self, deadline_s: float, kinds: Collection[str] | None = None) -> Ended:
        """End everything of these kinds within the deadline."""
        return together(self.enders(kinds), deadline_s, self._clock)


REGISTRY = Registry()
"""The registry of this process."""


def together(enders: dict[str, Ender], deadline_s: float, clock: Clock = SYSTEM) -> Ended:
    """Call all at the same time, each in its own thread, and wait for them until the deadline."""
    failed: dict[str, str] = {}
    until = clock.now() + deadline_s

    def one(name: str, end: Ender) -> None:
        try:
            end(max(0.0, until - clock.now()))
        except BaseException as error:  # noqa: BLE001 - rule 2
            failed[name] = f"{name}: {type(error).__name__}: {error}"

    threads = {
        name: threading.Thread(target=one, args=(name, end), name=f"everstep-end-{name}", daemon=True)
        for name, end in enders.items()
    }
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, until - clock.now()))
    late = tuple(name for name, thread in threads.items() if thread.is_alive())
    ended = tuple(name for name in enders if name not in late and name not in failed)
    return Ended(ended, late, tuple(failed[name] for name in sorted(failed)))
