"""The process that writes in the background: started anew, never forked, so it inherits no device and no lock (CS-08).

It does one call at a time, in the order asked, and answers each with its end: done, or what was raised. An archive is
written without torch; torch is imported by the first call that needs it. It ends when its trainer does, in the midst
of a write too: what it was writing has no name yet. Signals of a terminal or a scheduler are the trainer's business.

    archives {idx, files: [{path, temporary, parts}]} + region, inline of each     → done {idx}
    call     {idx} + region, pickle                                                → failed {idx, text, trace}
"""

import mmap
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from everstep.checkpoint.archive_file import Record, write_archive
from everstep.checkpoint.async_ckpt import shipped
from everstep.process.kernel import name_process
from everstep.recovery.link import Link, LinkClosed


def main(fd: int, trainer: int) -> None:
    """Entry of the process: serve until the line closes or the process `trainer` has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name_process("everstep-saver")
    link = Link.from_fd(fd)
    threading.Thread(target=_end_with, args=(fd, trainer), name="everstep-saver-line", daemon=True).start()
    while True:
        try:
            message, fds = link.receive()
        except LinkClosed:
            return
        _answer(link, message, fds)


def _answer(link: Link, message: Mapping[str, Any], fds: Sequence[int]) -> None:
    if message["kind"] == "settle":
        _settle(message["nice"], message["io"])
        return
    try:
        {"archives": _archives, "call": _call}[message["kind"]](message, fds)
        answer: dict[str, Any] = {"kind": "done", "idx": message["idx"]}
    except BaseException as error:  # noqa: BLE001 - whatever a call raises is its end, not the worker's
        trace = "".join(traceback.format_exception(error))
        answer = {"kind": "failed", "idx": message["idx"], "text": told(error), "trace": trace}
    finally:
        for fd in fds:
            os.close(fd)
    try:
        link.send(answer)
    except LinkClosed:
        os._exit(0)


def told(error: BaseException) -> str:
    """Say an exception in one line, with its type."""
    return f"{type(error).__name__}: {error}"


def _settle(nice: int | None, io: int | None) -> None:
    if nice:
        os.nice(nice)
    if io is not None:
        import psutil  # noqa: PLC0415 - rarely asked for, and 20 ms of every worker's start

        psutil.Process().ionice(io)


def _archives(message: Mapping[str, Any], fds: Sequence[int]) -> None:
    for n, file in enumerate(message["files"]):
        region, inline = _mapped(fds[2 * n]), _mapped(fds[2 * n + 1])
        write_archive(file["path"], file["temporary"], archive_records(file["parts"], region, inline))


def archive_records(parts: Sequence[Mapping[str, Any]], region: memoryview, inline: memoryview) -> Iterator[Record]:
    """Return the records that the parts describe."""
    for part in parts:
        source = inline if part["inline"] else region
        yield Record(part["name"], source[part["at"] : part["at"] + part["bytes"]])


def _mapped(fd: int) -> memoryview:
    size = os.fstat(fd).st_size
    return memoryview(mmap.mmap(fd, size)) if size else memoryview(b"")


def _call(message: Mapping[str, Any], fds: Sequence[int]) -> None:
    region, content = fds
    with open(content, "rb", closefd=False) as file:
        file.seek(0)
        shipped.reading(mmap.mmap(region, os.fstat(region).st_size))
        try:
            function, args, kwargs = pickle.load(file)
        finally:
            shipped.reading(None)
    function(*args, **kwargs)


def _end_with(line: int, trainer: int) -> None:
    """Wait for the trainer to go, without reading; then end the process whatever it is doing."""
    gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    poll = select.poll()
    poll.register(line, select.POLLRDHUP)
    try:
        poll.register(os.pidfd_open(trainer), select.POLLIN)
    except ProcessLookupError:
        os._exit(0)
    while not any(fd != line or what & gone for fd, what in poll.poll()):
        continue
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
