"""The companion that has snapshots hashed when there is time: it starts the hasher, and tells it where they lie."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from everstep.checkpoint.shelf import Shelf
from everstep.events import Notice
from everstep.recovery.api import Child, Host, Message
from everstep.recovery.core.words import Roster

ENTRY = "everstep.checkpoint.hasher:main"
MOST_DEATHS = 5
"""So often is it begun again, in all of a job: then memory is trusted by its seals, as where it was not read."""
PACKET = 32


class Hashing:
    """Rides beside the shelf whose buffers are hashed, and is started after it."""

    prefix = "hash"

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._child: Child | None = None
        self._deaths = 0
        self._told: frozenset[tuple[int, int]] = frozenset()
        self._closed = False

    def start(self, host: Host) -> None:
        """See `Companion.start`."""
        self._host = host
        self._shelf.changed = self._changed

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`: no worker says anything to it."""

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`: it says nothing; the checksums lie beside the seals."""

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""
        if child is not self._child:
            return
        self._child, self._told = None, frozenset()
        self._deaths += 1
        if self._deaths == MOST_DEATHS:
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            text = (
                f"the process that hashes snapshots in memory has ended {MOST_DEATHS} times, the last time by {how}: "
                "it is not begun again, and what no writer has read is trusted by its seal"
            )
            self._host.emit(Notice(text=text, level="warning"))
        self._changed()

    def on_stopped(self, generation: int) -> None:
        """See `Companion.on_stopped`."""

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`."""
        return {}

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`."""

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`: nobody waits for it. After a completed job nobody restores from this memory."""
        if completed and self._child is not None:
            self._closed = True
            self._child.send({"kind": "end"})
        return True

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`."""
        return ()

    def close(self) -> None:
        """See `Companion.close`: the hasher ends with its line."""
        self._closed = True

    def _changed(self) -> None:
        """Buffers were made, or are to be freed."""
        if self._closed or self._deaths >= MOST_DEATHS:
            return
        ready = self._shelf.ready()
        if self._child is None:
            if not ready:
                return
            self._child = self._host.spawn("hasher", ENTRY, {})
        for rank, buffers in _packets(self._told - ready.keys()):
            self._child.send({"kind": "forget", "rank": rank, "buffers": buffers})
        for rank, buffers in _packets(ready.keys() - self._told):
            fds = [ready[rank, buffer] for buffer in buffers]
            self._child.send({"kind": "watch", "rank": rank, "buffers": buffers}, fds)
        self._told = frozenset(ready)


def _packets(keys: frozenset[tuple[int, int]] | set[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for rank, buffer in sorted(keys):
        by_rank[rank].append(buffer)
    return [(rank, each[n : n + PACKET]) for rank, each in by_rank.items() for n in range(0, len(each), PACKET)]
