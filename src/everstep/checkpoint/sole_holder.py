"""Has a Checkpointer's directory from its beginning to its end, in a process of its own: the keeper never touches it.

A file system can take a call and never return. Whoever might make one is a process that nobody waits for beyond a
limit: the writers, the readers of a restore, and this one. It waits for a holder that is ending, claims the directory,
sweeps it, reads the newest checkpoint against its checksums, tells what it found, and keeps the claim until its line
closes.

    keeper ◀─ moving                     at most once a second while the directory answers
    keeper ◀─ waiting {text}             its holder is ending
    keeper ◀─ stock {lock, findings} | refused {text, code}
    keeper ─▶ ending                     the ranks have ended: who comes now may wait
"""

import json
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from everstep.checkpoint.directory import Claim
from everstep.checkpoint.series import settle
from everstep.checkpoint.sole import POLL_S, SoleUse
from everstep.checkpoint.sole_objects import SoleObjects
from everstep.checkpoint.stocktaking import take_stock
from everstep.checkpoint.storage import opening
from everstep.checkpoint.unreachable import Retry, unopened
from everstep.clock import SYSTEM, Clock
from everstep.errors import ConfigurationError, EverstepError
from everstep.recovery.link import Link, LinkClosed

ENTRY = "everstep.checkpoint.sole_holder:main"
TELL_S = 1.0
CLOSE_S = 1.0


class Sole(Protocol):
    """The claim of one Checkpointer."""

    lock: str

    def take(self, who: str, wait_s: float, say: Callable[[str], None]) -> list[str]:
        """Have the place; return what was swept."""
        ...

    def ending(self) -> None:
        """The ranks have ended."""
        ...

    def close(self) -> None:
        """Give it up."""
        ...


class _SoleDirectory:
    """Of a path: the lock that says who is ending, and the claim that every job has."""

    def __init__(self, place: str, job: str, who: str, clock: Clock, moving: Callable[[], None]) -> None:
        self._use = SoleUse(place, who, clock)
        self._claim = Claim(place, clock=clock, moving=moving, job=job)
        self._clock, self._moving = clock, moving
        self.lock = self._claim.lock

    def take(self, who: str, wait_s: float, say: Callable[[str], None]) -> list[str]:
        """See `Sole.take`."""
        while not self._use.take(wait_s, say):
            self._moving()
            self._clock.sleep(POLL_S)
        self._moving()
        return self._claim.take(who)

    def ending(self) -> None:
        """See `Sole.ending`."""
        self._use.ending()

    def close(self) -> None:
        """See `Sole.close`."""
        self._claim.close()
        self._use.close()


def sole(place: str, job: str, who: str, clock: Clock, moving: Callable[[], None]) -> Sole:
    """Return the claim on a path or a URL; nothing has been asked of it yet."""
    if opening.is_url(place):
        return SoleObjects(place, job, clock, moving)
    return _SoleDirectory(place, job, who, clock, moving)


class _Voice:
    """The process's side of the line."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._next_s = 0.0

    def say(self, kind: str, **facts: Any) -> None:
        try:
            self._link.send({"kind": kind, **facts})
        except LinkClosed:
            os._exit(0)  # nobody is there any more

    def moving(self) -> None:
        if SYSTEM.now() >= self._next_s:
            self._next_s = SYSTEM.now() + TELL_S
            self.say("moving")


def main(
    link: Link,
    *,
    directory: str,
    job: str,
    who: str,
    wait_s: float,
    grace_s: float,
    series: str | None = None,
    training: Mapping[str, str] | None = None,
) -> None:
    """Entry of the process.

    grace_s: so long a call that fails is made again. series: of which training the directory must be (series.py);
    None: not asked.
    """
    del training
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # a terminal's, or a scheduler's: the keeper decides
    threading.Thread(target=_end_with, args=(link.fileno(),), name="everstep-holder-line", daemon=True).start()
    voice = _Voice(link)
    held: Sole | None = None
    try:
        held = sole(directory, job, who, SYSTEM, voice.moving)
        told = held.take(who, wait_s, lambda text: voice.say("waiting", text=text))
        own = "" if series is None else settle(directory, series, job, retry=Retry(grace_s, voice.moving))
        findings = replace(take_stock(directory, told, voice.moving, limit_s=grace_s), series=own)
        voice.say("stock", lock=held.lock, findings=json.loads(findings.to_json()))
    except EverstepError as error:
        voice.say("refused", text=str(error), code=int(error.exit_code))
    except OSError as error:
        unhad = unopened(directory, error)
        voice.say("refused", text=str(unhad), code=int(unhad.exit_code))
    except Exception as error:  # noqa: BLE001 - a client library of a store raises what it likes
        refused = ConfigurationError(
            f"the checkpoint storage {directory} cannot be used: {type(error).__name__}: {error}"
        )
        voice.say("refused", text=str(refused), code=int(refused.exit_code))
    _serve(link, held)


def _serve(link: Link, held: Sole | None) -> None:
    while True:
        try:
            message, _ = link.receive()
        except LinkClosed:
            break
        if message["kind"] == "ending" and held is not None:
            held.ending()
    if held is not None:
        held.close()
    os._exit(0)


def _end_with(line: int) -> None:
    """Leave the claim to whoever comes next where the main thread does not come to give it up."""
    gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    poll = select.poll()
    poll.register(line, select.POLLRDHUP)
    while not any(what & gone for _, what in poll.poll()):
        continue
    SYSTEM.sleep(CLOSE_S)
    os._exit(1)
