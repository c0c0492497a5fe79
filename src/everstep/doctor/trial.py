"""A child that tries what may hang or crash, and is given up after so many seconds.

Rule 1: who asks never waits for longer than `limit_s`, whatever the child stands in: a process that a dead mount holds
        (state D) cannot be ended, and is left to end when the mount answers.
Rule 2: a child says what it is about to do before it does it; whatever else it prints is not heard.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everstep.clock import SYSTEM, Clock

MARK = "everstep-doctor "
"""What a line of the child's begins with that is for us: JSON follows, `doing` or facts."""
_REAP_S = 1.0


class Trial:
    """One child; it has been started when this returns, where a process can be."""

    def __init__(
        self,
        name: str,
        asked: Mapping[str, object],
        limit_s: float,
        *,
        command: Sequence[str] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """Try `name` of `everstep.doctor.child`, or run `command`."""
        words = command or [sys.executable, "-m", "everstep.doctor.child", name, json.dumps(asked)]
        self._clock, self._limit_s, self._until = clock, limit_s, clock.now() + limit_s
        self._popen: subprocess.Popen[bytes] | None = None
        self._unborn = ""
        try:
            self._popen = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._unborn = f"no process can be started to try it: {error.strerror}"

    @property
    def pid(self) -> int:
        """Of the child; 0 where none could be started."""
        return self._popen.pid if self._popen is not None else 0

    def collect(self) -> tuple[dict[str, Any], str]:
        """Wait for the child's end, and return what it said, and what went wrong with the child itself, or nothing."""
        if self._popen is None:
            return {}, self._unborn
        text, ended = self._read(self._popen)
        facts, doing = heard(text.splitlines())
        where = f", in: {doing}" if doing else ""
        if not ended:
            self._popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_S)
        if not ended:
            return facts, f"no answer within {self._limit_s:g} s{where}"
        code = self._popen.returncode
        return facts, f"the process that tried it ended with {code}{where}" if code else ""

    def _read(self, popen: subprocess.Popen[bytes]) -> tuple[str, bool]:
        """All that it prints, and whether it came to its end."""
        assert popen.stdout is not None
        fd, parts = popen.stdout.fileno(), list[bytes]()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        with popen.stdout:
            while (left := self._until - self._clock.now()) > 0:
                if poll.poll(left * 1000):
                    part = os.read(fd, 1 << 16)
                    if not part:
                        return b"".join(parts).decode(errors="replace"), True
                    parts.append(part)
        return b"".join(parts).decode(errors="replace"), False


def heard(lines: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Return the facts among what a child has printed, and what it was doing last."""
    facts: dict[str, Any] = {}
    for line in lines:
        if line.startswith(MARK):
            with contextlib.suppress(ValueError):  # cut in its middle
                facts |= json.loads(line.removeprefix(MARK))
    return facts, str(facts.pop("doing", ""))
