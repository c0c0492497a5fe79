"""Which descriptors carry a collective, and how to end what waits on them, by what they are in the kernel's own books.

Gloo keeps each device's sockets in an epoll set of its own. The kernel lists the members of a set (`fdinfo`: number and
inode), later and lazily made connections included, so a set that appeared while c10d made a group names exactly the
sockets of that group; the store's, a user's HTTP client's and another event loop's are not in it.

Rule 1: only connected TCP sockets are shut down. A listening one must stay (torch ends the process: seen).
Rule 2: a descriptor is duplicated, its inode compared, and only then shut down: a number may have a new owner by now.
Rule 3: `shutdown` only, never `close`: the owner's thread wakes with an error and closes itself.
"""

import os
import re
import socket
from dataclasses import dataclass

_MEMBER = re.compile(r"^tfd:\s*(\d+)\s.*?\bino:\s*([0-9a-f]+)", re.MULTILINE)
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class Handle:
    """An open file of this process: a number that may be given away, and an inode that tells if it was."""

    fd: int
    inode: int


def descriptors() -> dict[int, str]:
    """Return this process's descriptors and what they point to, as the kernel spells it."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own descriptor, or one that another thread has just closed
            continue
    return found


def epoll_sets() -> set[int]:
    """Return the descriptors that are epoll sets."""
    return {fd for fd, what in descriptors().items() if what == "anon_inode:[eventpoll]"}


def sockets() -> dict[int, Handle]:
    """Return the sockets of this process by descriptor."""
    return {fd: Handle(fd, int(what[8:-1])) for fd, what in descriptors().items() if what.startswith("socket:[")}


def members(epoll_fd: int) -> frozenset[Handle]:
    """Return what an epoll set watches; empty where it is gone or is none."""
    try:
        with open(f"/proc/self/fdinfo/{epoll_fd}", encoding="ascii") as info:
            text = info.read()
    except OSError:
        return frozenset()
    return frozenset(Handle(int(fd), int(inode, 16)) for fd, inode in _MEMBER.findall(text))


def _borrowed(handle: Handle) -> socket.socket | None:
    """Return a duplicate of a TCP socket, if the descriptor is still that socket."""
    try:
        copy = os.dup(handle.fd)
    except OSError:
        return None
    try:
        if os.fstat(copy).st_ino == handle.inode:
            borrowed = socket.socket(fileno=copy)
            copy = -1
            if borrowed.family in _FAMILIES and borrowed.type == socket.SOCK_STREAM:
                return borrowed
            borrowed.close()
    except OSError:  # not a socket
        return None
    finally:
        if copy >= 0:
            os.close(copy)
    return None


def listens(handle: Handle) -> bool:
    """Tell whether this is a listening TCP socket."""
    borrowed = _borrowed(handle)
    if borrowed is None:
        return False
    with borrowed:
        return bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def remote_port(handle: Handle) -> int | None:
    """Return the port at the other end, None where it is not connected (nor connecting)."""
    borrowed = _borrowed(handle)
    if borrowed is None:
        return None
    with borrowed:
        try:
            return int(borrowed.getpeername()[1])
        except OSError:
            return None


def end_reading(handle: Handle) -> socket.socket | None:
    """Have this side of a connected TCP socket read its end, and the other side notice nothing.

    Returns a duplicate that keeps the connection up for as long as it is open; None where nothing was done.
    """
    borrowed = _borrowed(handle)
    if borrowed is None:
        return None
    try:
        if not borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            borrowed.shutdown(socket.SHUT_RD)
            return borrowed
    except OSError:  # not connected (any more)
        pass
    borrowed.close()
    return None


def sever(handle: Handle) -> bool:
    """Shut a connected TCP socket down in both directions; True where that was done. Never a listening one."""
    borrowed = _borrowed(handle)
    if borrowed is None:
        return False
    with borrowed:
        if borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected (any more)
            return False
    return True
