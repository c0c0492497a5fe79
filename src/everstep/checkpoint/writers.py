"""The agent's writers: one process per rank slot, begun again when one is gone, asked in order.

A writer that dies before it has answered anything, several times in a row, is not begun again: whatever kills it
(an import that fails, memory) would kill the next. Saves then fail by name; training goes on.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everstep.checkpoint.core import names
from everstep.recovery.api import Child, Host

ENTRY = "everstep.checkpoint.writer:main"
DEATHS_IN_A_ROW = 3


class Writers:
    """The writers of one agent and one directory, by rank. `called`: stands in their names before the rank."""

    def __init__(self, host: Host, directory: str, lock: str, tell_s: float, called: str = "") -> None:
        self._host = host
        self._directory = directory
        self._lock = lock
        self._tell_s, self._called = tell_s, called
        self._children: dict[int, Child] = {}
        self._deaths: dict[int, int] = {}
        self._outstanding: dict[int, int] = {}
        self._fragments: dict[int, int] = {}
        self._closed = False

    def start(self, ranks: Iterable[int] | None = None) -> None:
        """Begin one for each rank, or for each of `ranks`, that has none."""
        for rank in range(self._host.world_size) if ranks is None else ranks:
            if rank not in self._children:
                self._begin(rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whose writers there are, lowest first."""
        return tuple(sorted(self._children))

    def leave(self, ranks: Iterable[int]) -> None:
        """Their host is gone: nothing comes of their writers any more, and no others are begun."""
        for rank in ranks:
            self._children.pop(rank, None)
            self._outstanding.pop(rank, None)

    def use_lock(self, lock: str) -> None:
        """The job's owner file has become known: every writer holds it from now on."""
        if lock and lock != self._lock:
            self._lock = lock
            for child in self._children.values():
                child.send({"kind": "keep", "lock": lock})

    def _begin(self, rank: int) -> None:
        arguments = {"directory": self._directory, "rank": rank}
        child = self._host.spawn(f"writer-{self._called}{rank}", ENTRY, arguments)
        self._children[rank] = child
        if self._lock:
            child.send({"kind": "keep", "lock": self._lock})

    @property
    def given_up(self) -> bool:
        """True when a writer dies whatever is done."""
        return any(deaths >= DEATHS_IN_A_ROW for deaths in self._deaths.values())

    @property
    def busy(self) -> bool:
        """True while a removal has not been answered."""
        return any(self._outstanding.values())

    def rank_of(self, child: Child) -> int | None:
        """The rank whose writer this is; None for one that was replaced."""
        return next((rank for rank, one in self._children.items() if one is child), None)

    def lost(self, rank: int, status: int) -> str:
        """A writer is gone: begin another; return a sentence."""
        self._outstanding.pop(rank, None)
        del self._children[rank]
        self._deaths[rank] = self._deaths.get(rank, 0) + 1
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        text = f"the checkpoint writer of rank {rank} ended by {how}"
        if self._closed:
            return text
        if self._deaths[rank] >= DEATHS_IN_A_ROW:
            return f"{text}, {DEATHS_IN_A_ROW} times in a row; it is not begun again, no checkpoints from here on"
        self._begin(rank)
        return f"{text}; another takes its place"

    def _send(self, rank: int, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        child = self._children.get(rank)
        if child is not None:
            child.send(message, fds)

    def write(self, rank: int, token: str, snapshot: int | None, world_size: int, buffer: int = 0) -> None:
        """Have a rank's snapshot written: a descriptor, or, where the writer is another host's, a `buffer` there."""
        staging = names.staging_of(token)
        assert staging is not None
        order = {"kind": "write", "save": token, "folder": token, "step": staging.step, "epoch": staging.epoch}
        place = {"generation": staging.generation, "world_size": world_size, "tell_s": self._tell_s}
        if snapshot is None:
            self._send(rank, order | place | {"rank": rank, "buffer": buffer})
        else:
            self._send(rank, order | place, [snapshot])

    def keep_fragment(self, rank: int, fds: Sequence[int]) -> None:
        """Take what a writer reported; the descriptors are ours from here on."""
        self._deaths.pop(rank, None)
        for fd in fds:
            if self._fragments.setdefault(rank, fd) is not fd:
                os.close(fd)

    def fragment(self, rank: int) -> bytes | None:
        """What a rank's writer has reported of the open save; None where it has not."""
        fd = self._fragments.get(rank)
        return None if fd is None else os.pread(fd, os.fstat(fd).st_size, 0)

    @property
    def reported(self) -> tuple[int, ...]:
        """Of which ranks there is a fragment of the open save."""
        return tuple(sorted(self._fragments))

    def merge(self, rank: int, token: str, metrics: Mapping[str, float], visible_s: float | None = None) -> None:
        """Have one writer publish what all have reported, with what was measured at that step.

        `visible_s`: others' files come from other nodes; so long they may take to be seen here. None: they are there.
        """
        for source, fd in sorted(self._fragments.items()):
            self._send(rank, {"kind": "fragment", "save": token, "rank": source}, [fd])
        order = {"kind": "merge", "save": token, "folder": token, "metrics": dict(metrics)}
        self._send(rank, order if visible_s is None else order | {"visible_s": visible_s})

    def forget_fragments(self) -> None:
        """The save has ended."""
        for fd in self._fragments.values():
            os.close(fd)
        self._fragments.clear()

    def discard(self, token: str) -> None:
        """Have every writer remove what it has written of a save."""
        for rank in list(self._children):
            self._outstanding[rank] = self._outstanding.get(rank, 0) + 1
            self._send(rank, {"kind": "discard", "folder": token})

    def prune(self, condemn: Sequence[str], remove: Sequence[str]) -> bool:
        """Have one writer take names and data away; False where there is none to ask."""
        rank = min(self._children, default=None)
        if rank is None:
            return False
        self._outstanding[rank] = self._outstanding.get(rank, 0) + 1
        self._send(rank, {"kind": "prune", "condemn": list(condemn), "remove": list(remove)})
        return True

    def done(self, rank: int) -> None:
        """A removal was answered."""
        self._outstanding[rank] = max(0, self._outstanding.get(rank, 0) - 1)

    def close(self) -> None:
        """The job is over; the writers end with their lines."""
        self._closed = True
        self.forget_fragments()
