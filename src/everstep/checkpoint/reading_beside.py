"""Reads checkpoints for a rank in a process of its own, so that a read that never returns is an error, not a hang.

A rank that stands in a call to a dead server or a frozen device cannot be interrupted, nor ended. So its keeper, or its
agent, forks one who reads, and hands the rank a line to it: `Beside` is a `storage.opening.Opening` for
`load.open_for`.

    rank ─▶ open + socket, window         a conversation: one question at a time, one thread here for each
    rank ─▶ read {path, name, offset, count}       ─▶ {count}: so many bytes lie in the window  | {error, …}
    rank ─▶ manifest {path} | size {path, name}    ─▶ {count}, or a descriptor of more | {size}

Rule 1: an answer that does not come within the grace time makes the place stuck: UnreachableStorage, at once for every
other question too. It is no damage: nothing is struck out for it, and nothing older taken in its stead.
Rule 2: what is read is compared with its checksum by the rank, as ever: this process adds no trust.
"""

import contextlib
import errno
import mmap
import os
import queue
import select
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint import visible
from everstep.checkpoint.storage import opening
from everstep.checkpoint.storage.api import Reading
from everstep.checkpoint.unreachable import deadline_s
from everstep.clock import SYSTEM, Clock
from everstep.errors import CheckpointError, UnreachableStorage
from everstep.recovery.link import Link, LinkClosed

ENTRY = "everstep.checkpoint.reading_beside:main"
HELPER = "everstep.checkpoint.reading_beside:helper"
DOOR_S = 60.0
"""So long an agent may take to give a rank its reader: it forks one, and has one thread."""
WINDOW = 4 << 20
BLOCK = 1 << 20
BLOCKS = 8
"""Small reads are served from blocks: a state of a thousand tensors is not a thousand questions."""


@dataclass(slots=True)
class _Talk:
    """One conversation, on the rank's side."""

    link: Link
    window: mmap.mmap

    def close(self) -> None:
        self.link.close()
        with contextlib.suppress(BufferError):  # a view of a failed read may live in its traceback
            self.window.close()


class Beside:
    """The rank's side; an `Opening`. Any thread. `grace_s`: how long one answer may take."""

    def __init__(self, fd: int, grace_s: float) -> None:
        self._door = Link.from_fd(fd)
        self._grace_s = grace_s
        self._idle: queue.SimpleQueue[_Talk] = queue.SimpleQueue()
        self._stuck = ""

    def __call__(self, path: str) -> Reading:
        """See `opening.Opening`."""
        return _There(self, path)

    def close(self) -> None:
        """Let the reader go, whatever it is doing."""
        self._door.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def ask(
        self, path: str, kind: str, into: memoryview | None = None, **facts: Any
    ) -> tuple[Mapping[str, Any], bytes]:
        """Ask one question; what lies in the window is put into `into`, or returned."""
        if self._stuck:
            raise UnreachableStorage(self._stuck)
        talk = self._talk()
        try:
            talk.link.send({"kind": kind, "path": path, **facts})
            answer, found = self._answer(talk, path, into)
        except LinkClosed:
            talk.close()
            raise CheckpointError(
                f"{path}: the process that read it ended; it was killed, or ran out of memory"
            ) from None
        except BaseException:
            talk.close()
            raise
        self._idle.put(talk)
        if "error" in answer:
            raise OSError(int(answer["errno"]), str(answer["error"]), answer["file"])
        return answer, found

    def _answer(self, talk: _Talk, path: str, into: memoryview | None) -> tuple[Mapping[str, Any], bytes]:
        grace_s = self._grace_s + (deadline_s() if opening.is_url(path) else 0.0)
        poll = select.poll()
        poll.register(talk.link.fileno(), select.POLLIN)
        if not poll.poll(grace_s * 1000):
            self._stuck = (
                f"{path} does not answer: a read has not come back for {grace_s:g} s. Its storage is stuck, or gone: "
                "see whether `ls` of it returns, mend the mount, and start again. It may be whole, so nothing older is "
                "taken in its stead; nothing was restored"
            )
            raise UnreachableStorage(self._stuck)
        answer, fds = talk.link.receive()
        if fds:
            with open(fds[0], "rb") as file:
                file.seek(0)
                return answer, file.read()
        count = int(answer.get("count", 0))
        if into is None:
            return answer, talk.window[:count]
        with memoryview(talk.window) as view:
            into[:count] = view[:count]
        return answer, b""

    def _talk(self) -> _Talk:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        ours, theirs = Link.pair()
        fd = os.memfd_create("everstep-reading", os.MFD_CLOEXEC)
        os.ftruncate(fd, WINDOW)
        talk = _Talk(ours, mmap.mmap(fd, WINDOW))
        try:
            self._door.send({"kind": "open"}, [theirs.fileno(), fd])
        except LinkClosed:
            talk.close()
            raise CheckpointError("the process that reads checkpoints ended; it was killed") from None
        finally:
            theirs.close()
            os.close(fd)
        return talk


class Readers:
    """Has a rank's agent start who reads for it. `send`: to the agent. Two threads: main, and the line's."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._asked = 0
        self._doors: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def ask(self, tier: str, clock: Clock = SYSTEM) -> Beside:
        """Return a reader of a directory; an answer of its may take as long as a call may. Main thread.

        CheckpointError where the agent gives none.
        """
        self._asked += 1
        self._send({"kind": f"{tier}.reader", "ask": self._asked})
        until = clock.now() + DOOR_S
        while (left := until - clock.now()) > 0:
            with contextlib.suppress(queue.Empty):
                ask, fd = self._doors.get(timeout=left)
                if ask == self._asked:
                    return Beside(fd, deadline_s())
                os.close(fd)  # it was asked for by a generation that has ended
        raise CheckpointError(
            f"the agent has given no process to read the {tier} tier for {DOOR_S:g} s: the node is overloaded, or the "
            "zygote cannot fork; see its notices"
        )

    def on_message(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        """The agent's answer. The line's thread."""
        self._doors.put((int(message["ask"]), fds[0]))


class _There:
    """A `Reading` of one checkpoint."""

    def __init__(self, beside: Beside, path: str) -> None:
        self._beside, self._path = beside, path
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def manifest(self) -> bytes:
        """See `Reading.manifest`."""
        return self._beside.ask(self._path, "manifest")[1]

    def size(self, name: str) -> int | None:
        """See `Reading.size`."""
        found: int | None = self._beside.ask(self._path, "size", name=name)[0]["size"]
        return found

    def read_into(self, name: str, into: memoryview, offset: int) -> int:
        """See `Reading.read_into`."""
        if len(into) >= BLOCK // 2:
            wanted = min(len(into), WINDOW)
            return int(self._beside.ask(self._path, "read", into, name=name, offset=offset, wanted=wanted)[0]["count"])
        number, start = divmod(offset, BLOCK)
        part = self._block(name, number)[start : start + len(into)]
        into[: len(part)] = part
        return len(part)

    def _block(self, name: str, number: int) -> bytes:
        with self._lock:
            known = self._blocks.get((name, number))
        if known is not None:
            return known
        block = self._beside.ask(self._path, "read", name=name, offset=number * BLOCK, wanted=BLOCK)[1]
        with self._lock:
            self._blocks[name, number] = block
            while len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
        return block

    def close(self) -> None:
        """See `Reading.close`."""
        with contextlib.suppress(OSError, CheckpointError):
            self._beside.ask(self._path, "close")


# The process.


class _Reader:
    """All that it has open. `visible_s`: so long another host's writing may take to be seen; None: it is there."""

    def __init__(self, visible_s: float | None) -> None:
        self._lock = threading.Lock()
        self._visible_s = visible_s
        self._open: dict[str, Reading] = {}

    def converse(self, link: Link, window: mmap.mmap) -> None:
        """Answer one conversation until it closes."""
        while True:
            try:
                message, _ = link.receive()
                answer, more = self._answered(message, window)
                if more:
                    _send_more(link, answer, more)
                else:
                    link.send(answer)
            except LinkClosed:
                link.close()
                window.close()
                return

    def _answered(self, message: Mapping[str, Any], window: mmap.mmap) -> tuple[dict[str, Any], bytes]:
        try:
            return self._said(message, window)
        except OSError as error:
            told = {"error": error.strerror or str(error), "errno": error.errno or errno.EIO, "file": error.filename}
        except Exception as error:  # noqa: BLE001 - a client library of a store raises what it likes
            told = {"error": f"{type(error).__name__}: {error}", "errno": errno.EIO, "file": None}
        return {"kind": "failed", **told}, b""

    def _said(self, message: Mapping[str, Any], window: mmap.mmap) -> tuple[dict[str, Any], bytes]:
        path = str(message["path"])
        source = self._source(path)
        match message["kind"]:
            case "manifest":
                return {"kind": "manifest"}, source.manifest()
            case "size":
                return {"kind": "size", "size": source.size(message["name"])}, b""
            case "close":
                with self._lock:
                    self._open.pop(path, source).close()
                return {"kind": "closed"}, b""
            case _:
                with memoryview(window) as view, view[: message["wanted"]] as into:
                    return {"kind": "read", "count": _filled(source, message["name"], into, message["offset"])}, b""

    def _source(self, path: str) -> Reading:
        with self._lock:
            if path not in self._open:
                if self._visible_s is not None and not visible.wait(path, self._visible_s):
                    text = (
                        f"another host has published it, and it is not seen on this one after {self._visible_s:.0f} s"
                    )
                    raise OSError(errno.ETIMEDOUT, text, path)
                self._open[path] = opening.reading(path)
            return self._open[path]


def _filled(source: Reading, name: str, into: memoryview, offset: int) -> int:
    """Read until `into` is full or the file ends: a read may give less (a page behind it that fails, a signal)."""
    done = 0
    while done < len(into):
        with into[done:] as rest:  # let go of at once: an error's traceback would keep the window open
            count = source.read_into(name, rest, offset + done)
        if count == 0:
            break
        done += count
    return done


def _send_more(link: Link, answer: Mapping[str, Any], content: bytes) -> None:
    fd = os.memfd_create("everstep-reading", os.MFD_CLOEXEC)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        link.send(answer, [fd])


def main(link: Link, *, visible_s: float | None = None) -> None:
    """Entry of a keeper's: serve conversations until the rank lets go. `visible_s`: see `_Reader`."""
    serve(link, visible_s)
    os._exit(0)  # whatever its threads are doing


def helper(link: Link) -> None:
    """Entry of an agent's: it is told which rank to serve."""
    _, fds = link.receive()
    serve(Link.from_fd(fds[0]))
    os._exit(0)


def serve(link: Link, visible_s: float | None = None) -> None:
    """Begin a conversation, on a thread of its own, for each that is asked for."""
    reader = _Reader(visible_s)
    while True:
        try:
            _, fds = link.receive()
        except LinkClosed:
            return
        talk, window = Link.from_fd(fds[0]), mmap.mmap(fds[1], WINDOW)
        os.close(fds[1])
        threading.Thread(target=reader.converse, args=(talk, window), daemon=True).start()
