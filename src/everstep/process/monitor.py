"""A rank monitor's words in shared memory: heartbeats and sections that a script stores, and its agent judges.

They lie behind the words of the progress page, in the same memory of the agent's. Each field is one aligned 8-byte
word; a heartbeat is two stores. Nothing is sent, nothing is answered, and nobody is waited for.

Rule 1: one writer, the client of the rank's own process; the agent reads, and never writes here.
Rule 2: what stands here belongs to the generation that it names: with the next one it is over, and says nothing.
Rule 3: a section is its number in the settings; names are for people, and only their first 48 bytes stand here.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

SETTINGS = "EVERSTEP_FAULT_TOLERANCE"
"""Where a worker finds the settings of its monitor: a JSON object of those that are given."""
PAGE = "EVERSTEP_MONITOR_PAGE"
"""Where a process that is no fork of ours (--no-python, a child of a worker's) finds its rank's page."""
AT, SIZE = 4096, 12_288
"""Where the words begin in the page's memory, and how many bytes they are."""
_WORD = struct.Struct("=q")
_TEXT_AT, _TEXT_BYTES = 128, 384
_SECTIONS_AT, _SECTION = 512, struct.Struct("=qq48s")
MOST_SECTIONS = (SIZE - _SECTIONS_AT) // _SECTION.size
_LONGEST_S = 1e9
_OWNER, _PID, _STARTED, _BEATS, _BEAT, _INITIAL, _SUBSEQUENT, _OUTSIDE, _OUTSIDE_LIMIT = range(9)
_EVENTS, _EVENT, _SIGNAL, _REQUEST, _ACTION = range(9, 14)


@dataclass(frozen=True, slots=True)
class Section:
    """A section that is open."""

    name: str
    opened_s: float
    limit_s: float  # 0: none


@dataclass(frozen=True, slots=True)
class Monitoring:
    """What a client has said. Times are monotonic seconds; a limit of 0 is none."""

    generation: int
    pid: int
    started_s: float  # when monitoring began in this generation
    beats: int
    beat_s: float  # the last heartbeat
    initial_s: float  # limits of heartbeats
    subsequent_s: float
    outside_s: float  # since when no section is open; 0: one is
    outside_limit_s: float
    events: int  # sections opened and closed
    event_s: float  # the last of all: of heartbeats, too
    signal: int  # makes the process write its stacks behind the page; 0: it listens to none
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What a script asks of its launcher."""

    number: int  # of all requests of this process, from 1
    action: int
    text: str


class Monitor:
    """The words of one rank's monitor, in the page's memory. Any thread may call, one at a time for each method."""

    def __init__(self, memory: mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory)[AT : AT + _TEXT_AT].cast("q")

    def release(self) -> None:
        """Nothing is read or written any more: the memory may be unmapped."""
        self._words.release()

    # -- written by the client -----------------------------------------------------------------------------------

    def begin(self, generation: int, pid: int, names: Sequence[str], now: float) -> None:
        """Monitoring begins: no heartbeat has come, no section is open, and no limit holds."""
        words, then = self._words, int(now * 1e9)
        words[_OWNER] = 0
        for word in (_BEATS, _BEAT, _EVENTS, _INITIAL, _SUBSEQUENT, _OUTSIDE_LIMIT):
            words[word] = 0
        for number in range(MOST_SECTIONS):
            name = (names[number].encode()[:48] or b" ") if number < len(names) else b""
            _SECTION.pack_into(self._memory, self._section(number), 0, 0, name)
        words[_STARTED] = words[_OUTSIDE] = words[_EVENT] = then
        words[_PID] = pid
        words[_OWNER] = generation + 1

    def listen(self, signal: int) -> None:
        """A signal of this number makes this process write its stacks behind the page."""
        self._words[_SIGNAL] = signal

    def end(self) -> None:
        """Monitoring is over."""
        self._words[_OWNER] = 0

    def beat(self, number: int, now: float) -> None:
        """The `number`th heartbeat of this generation, at `now` monotonic seconds."""
        self._words[_BEAT] = int(now * 1e9)
        self._words[_BEATS] = number

    def limits(self, initial_s: float, subsequent_s: float, outside_s: float, sections_s: Sequence[float]) -> None:
        """Limits from here on, in seconds; 0 is none."""
        self._words[_INITIAL] = _ns(initial_s)
        self._words[_SUBSEQUENT] = _ns(subsequent_s)
        self._words[_OUTSIDE_LIMIT] = _ns(outside_s)
        for number, limit_s in enumerate(sections_s):
            self.limit(number, limit_s)

    def limit(self, section: int, limit_s: float) -> None:
        """The limit of one section, in seconds; 0 is none."""
        _WORD.pack_into(self._memory, self._section(section) + 8, _ns(limit_s))

    def open(self, section: int, now: float) -> None:
        """It is open from `now` on."""
        _WORD.pack_into(self._memory, self._section(section), int(now * 1e9))
        self._words[_OUTSIDE] = 0
        self._said(now)

    def close(self, sections: Sequence[int], now: float, *, last: bool) -> None:
        """They are closed; with the `last` that was open begins what is outside of all."""
        if last:
            self._words[_OUTSIDE] = int(now * 1e9)
        for section in sections:
            _WORD.pack_into(self._memory, self._section(section), 0)
        self._said(now)

    def _said(self, now: float) -> None:
        self._words[_EVENTS] += 1
        self._words[_EVENT] = int(now * 1e9)

    def request(self, action: int, text: str) -> None:
        """Ask something of the launcher; it looks five times a second, and once more when this process has ended."""
        told = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        self._memory[AT + _TEXT_AT : AT + _TEXT_AT + _TEXT_BYTES] = told
        self._words[_ACTION] = action
        self._words[_REQUEST] += 1

    # -- read by the agent ---------------------------------------------------------------------------------------

    @property
    def owner(self) -> tuple[int, int] | None:
        """The generation in which monitoring was begun last, and by which process; None where it is over."""
        generation = self._words[_OWNER] - 1
        return (generation, self._words[_PID]) if generation >= 0 else None

    @property
    def requested(self) -> Request | None:
        """The last request of this process."""
        number = self._words[_REQUEST]
        if not number:
            return None
        text = self._memory[AT + _TEXT_AT : AT + _TEXT_AT + _TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
        return Request(number, self._words[_ACTION], text)

    def read(self) -> Monitoring | None:
        """Return what has been said in the generation that it names; None where nothing is monitored."""
        words = self._words.tolist()
        if words[_OWNER] <= 0:
            return None
        beat_s, event_s = words[_BEAT] / 1e9, words[_EVENT] / 1e9
        return Monitoring(
            generation=words[_OWNER] - 1, pid=words[_PID], started_s=words[_STARTED] / 1e9,
            beats=words[_BEATS], beat_s=beat_s,
            initial_s=words[_INITIAL] / 1e9, subsequent_s=words[_SUBSEQUENT] / 1e9,
            outside_s=words[_OUTSIDE] / 1e9, outside_limit_s=words[_OUTSIDE_LIMIT] / 1e9,
            events=words[_EVENTS], event_s=max(beat_s, event_s), signal=words[_SIGNAL], sections=self._open(),
        )  # fmt: skip

    def _open(self) -> tuple[Section, ...]:
        found: list[Section] = []
        for number in range(MOST_SECTIONS):
            opened, limit, name = _SECTION.unpack_from(self._memory, self._section(number))
            if not name[0]:
                break  # there are no more
            if opened:
                text = name.rstrip(b"\0").decode(errors="replace")
                found.append(Section(text, opened / 1e9, limit / 1e9))
        return tuple(found)

    @staticmethod
    def _section(number: int) -> int:
        return AT + _SECTIONS_AT + number * _SECTION.size


def _ns(limit_s: float) -> int:
    return int(min(limit_s, _LONGEST_S) * 1e9)
