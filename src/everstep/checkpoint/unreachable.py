"""What an error of a read means: an answer, or none; and asking again.

A checkpoint is *damaged* where what lies there is wrong, or where a file that its manifest promises is not there: then
the next best is taken, and named. Any other error says nothing of it: a server that is away or throttles, a right that
was withdrawn, a device that fails a read. It may be whole, and newer than all else, so nothing older is taken for it.

Rule 1: an error is an answer only where it says that there is no such file, or that it is none. All others are asked
    again, with back-off, for a limit that each caller states; then they are an UnreachableStorage.
Rule 2: a listing that fails is not an empty one.
"""

import errno
import random
from collections.abc import Callable
from typing import TypeVar

from everstep import environ
from everstep.clock import SYSTEM, Clock
from everstep.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedCheckpoint,
    EverstepError,
    UnreachableStorage,
)

T = TypeVar("T")
DEADLINE = "EVERSTEP_STORAGE_DEADLINE"
DEADLINE_S = 120.0
"""Of one call to an object store, a request of at most a part, its retries included; and of one read anywhere."""
FIRST_S, MOST_S = 0.1, 5.0
"""The first wait before a call is made again, and the longest: each is twice the last, by chance up to half less."""
NOW = "cannot be read now"
AWAY = "is away"
_ANSWERS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
_AWAY = frozenset({
    errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH,
    errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EREMOTEIO,
    errno.EBUSY, errno.EAGAIN,
})  # fmt: skip


def deadline_s() -> float:
    """Seconds that one call to a store may take, and for which a read that fails is made again."""
    return float(environ.get(DEADLINE) or DEADLINE_S)


def is_answer(error: OSError) -> bool:
    """True where it says that there is no such file, or no regular one; False where it says nothing of the file."""
    return error.errno in _ANSWERS


def unopened(directory: str, error: OSError) -> EverstepError:
    """Return what it is raised as that a job's directory could not be had."""
    if is_away(error):
        return unreachable(directory, why(error), AWAY)
    return ConfigurationError(
        f"the checkpoint directory {directory} cannot be read: {error}; give another --checkpoint-dir"
    )


def is_none(error: OSError) -> bool:
    """True where it is no answer."""
    return not is_answer(error)


def is_away(error: OSError) -> bool:
    """True for what passes by itself: nobody there, too busy, a device or server that fails. Not rights or room."""
    return error.errno in _AWAY


def failure(where: str, error: OSError) -> CheckpointError:
    """Return what a read of `where` that has failed is to be raised as."""
    if is_answer(error):
        return DamagedCheckpoint(f"{where}: {error.strerror or error}")
    return unreachable(where, why(error))


def why(error: OSError) -> str:
    """Say what went wrong, with the name of its code."""
    code = errno.errorcode.get(error.errno or 0)
    return f"{error.strerror or error}" + (f" ({code})" if code else "")


def unreachable(where: str, text: str, what: str = NOW) -> UnreachableStorage:
    """Return the error that says `what` of `where`, and what mends it."""
    return UnreachableStorage(
        f"{where} {what}: {text}. What it holds may be whole, so nothing older is taken in its stead, and nothing "
        "begins anew. See to its storage (does `ls` of it return? are network, mount, rights, credentials as they "
        f"were?), and start again: it goes on from there. {DEADLINE}, in seconds, is how long a read is tried. To go "
        "on from an older one knowingly, give this one up: everstep checkpoint rm DIR --step N"
    )


def _nothing() -> None:
    """Nobody is told."""


class Retry:
    """Makes a call again, with back-off, while it fails and that is no answer. Any thread.

    limit_s: seconds from the first attempt of a call in which another is begun; 0: each is made once. moving: called
    whenever a call has come back. worth: whether an error is worth another attempt.
    """

    def __init__(
        self,
        limit_s: float,
        moving: Callable[[], None] = _nothing,
        clock: Clock = SYSTEM,
        *,
        worth: Callable[[OSError], bool] = is_none,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._limit_s, self._moving, self._clock = limit_s, moving, clock
        self._worth, self._chance = worth, chance

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what `call` does; raise its error where that is worth no other attempt, or the limit has passed."""
        until, pause = self._clock.now() + self._limit_s, FIRST_S
        while True:
            try:
                return call()
            except OSError as error:
                left = until - self._clock.now()
                if left <= 0 or not self._worth(error):
                    raise
            finally:
                self._moving()
            self._clock.sleep(min(left, pause * (1 - self._chance() / 2)))
            pause = min(MOST_S, 2 * pause)

    def once(self) -> "Retry":
        """Return what makes each call once, and tells of it as this one does."""
        return Retry(0.0, self._moving, self._clock, worth=self._worth)


class Wearing(Retry):
    """Makes calls again as another does until one has failed for all of its time; each that follows is made once.

    For the many calls of one look at a place: what is away is waited for once, not for every file.
    """

    def __init__(self, retry: Retry) -> None:
        self._inner = retry

    def __call__(self, call: Callable[[], T]) -> T:
        """See `Retry`."""
        try:
            return self._inner(call)
        except OSError as error:
            if is_none(error):
                self._inner = self._inner.once()
            raise

    def once(self) -> Retry:
        """See `Retry.once`."""
        return self._inner.once()


ONCE = Retry(0.0)
"""Each call is made once."""
