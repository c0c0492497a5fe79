"""What happened, as frozen values: the one vocabulary that features emit and sinks read.

Rule 1: features emit, sinks subscribe; nobody emits for one reader alone.
Rule 2: wire and disk form is JSON with a version, written here and nowhere else: no repr, no pickle.
Rule 3: a field is added with a default or not at all; a reader of version 1 must read tomorrow's file.
"""

import enum
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from everstep.errors import LedgerError

VERSION = 1
T = TypeVar("T")
_SHAPES: dict[type[Any], tuple[tuple[str, bool], ...]] = {}
_print: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode


class Category(enum.Enum):
    """What a second of a slot was spent on. The innermost open span owns the time (EXPERIMENTS L2)."""

    STARTUP = "start-up"  # process start, imports, the script's own top level before its first step
    SCRIPT = "script"  # inside a script without the library: what it spends its time on is not known here
    STEP = "step"  # inside a training step, first time it is done
    DATA_WAIT = "data wait"  # waiting for the next batch
    SNAPSHOT = "snapshot"  # the loop is blocked while its state is copied
    CHECKPOINT_STALL = "checkpoint stall"  # the loop is blocked by a slower tier
    DETECTION = "detection"  # from the injured rank's last mark to the record of the fault
    STOP = "stop"  # abort and unwinding, until this rank has arrived for the next generation
    REGROUP = "regroup"  # roster, assignment, process groups
    REBUILD = "rebuild"  # the user's own set-up in a later generation
    RESTORE = "restore"  # state read back
    REDO = "redo"  # a step done again
    LOST = "lost"  # work that a rollback undid
    IDLE_SPARE = "idle spare"
    PAUSED = "paused"  # declared by run.paused()
    PHASE = "phase"  # declared by run.phase(): evaluation and the like
    COMPLETION = "completion"  # this rank is done and waits for the others
    TAIL = "tail"  # after the function, until the process ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """When and where something happened. `mono_s` compares within one boot only."""

    mono_s: float
    wall_s: float
    boot_id: str
    pid: int
    role: str  # agent | worker | writer | zygote | store
    slot: int | None = None  # the worker's place on its node, kept by whoever takes it over
    rank: int | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    known: ClassVar[dict[str, type["Event"]]] = {}

    def __init_subclass__(cls) -> None:
        Event.known[cls.__name__] = cls


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """The agent has read its flags; first line of a run, and again when the same run folder is taken up."""

    job: str
    argv: tuple[str, ...]
    world_size: int
    spares: int
    nodes: int = 1
    wrapped: bool = True  # False: the script names everstep nowhere
    script: str = ""  # its path, or the module's name
    arguments: tuple[str, ...] = ()  # the script's own


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The agent is about to exit with `code`."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted(Event):
    """The agent owns a new process."""

    name: str  # worker-0, spare-2, writer-1, zygote, store
    child_pid: int
    incarnation: str
    child_slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded(Event):
    """A process of ours is gone. `status` is its exit code, or minus the signal."""

    name: str
    child_pid: int
    status: int
    expected: bool
    child_slot: int | None = None
    child_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted(Event):
    """A roster was published: who holds which rank, from which state."""

    epoch: int
    number: int
    world_size: int
    members: tuple[tuple[int, int, int, str], ...]  # (rank, slot, pid, why: kept | spare | started)
    restore_step: int | None = None  # last step done in the restored state; None: from the beginning
    restored_from: str | None = None  # memory | peer | local | disk: the furthest that any rank went to
    reason: str = ""
    decided: bool = True  # False: nodes had still to agree on `restore_step` when the roster was entered
    node: str = ""  # whose agent says so
    nodes: tuple[str, ...] = ()  # where each of `members` stands; their pids are those of that node
    allowed: int | None = None  # restarts of the whole job (--max-restarts); None: as many as make progress


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultNoticed(Event):
    """The generation has a fault; the first record wins, a death seen later may name the cause better."""

    number: int  # the generation that it ended
    kind: str  # exception | death | stall | wedged | left
    noticed_by: str  # worker | pidfd | page | …
    injured_rank: int | None = None
    injured_slot: int | None = None
    step: int | None = None
    text: str = ""
    last_mark_s: float | None = None  # monotonic time of the injured rank's last sign of progress
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitLearned(Event):
    """How long a rank may be silent, and the step times that this was learned from; or the same of one place."""

    text: str
    idle_s: float  # inside a step, standing still and idle: the shortest limit there is
    step_s: float  # what nine of ten recent steps did not exceed
    longest_s: float  # step
    steps: int  # that were looked at
    place: str = ""  # a line of the user's own: "file:line in function"
    place_s: float = 0.0  # its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected(Event):
    """Our own injector is about to do harm (written before it does)."""

    fault: int  # index in the plan
    type: str
    step: int
    injured_rank: int
    position: str  # forward | backward | optimizer | boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOpened(Event):
    """This slot's time belongs to `category` until the span is closed or another opens inside it."""

    category: str
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanClosed(Event):
    """The innermost span of this slot ends; the one around it owns the time again."""

    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """A step is done on this rank: control came back to the loop. Steps count from 1."""

    step: int
    seconds: float  # of the step alone, without data wait and snapshot
    values: Mapping[str, float] = field(default_factory=dict[str, float])  # what run.log was given, exact floats
    snapshot_bytes: int = 0  # of its state, copied to memory; 0: none was taken
    snapshot_s: float = 0.0  # that the loop was held for it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues(Event):
    """What an earlier step logged, read from the device one step later so that no step waited for it."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class StopBegun(Event):
    """This rank has left or is leaving the function of a faulted generation."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived(Event):
    """This rank stands ready for the next generation."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """State was read back; training goes on after `step`."""

    step: int
    tier: str
    bytes: int
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics(Event):
    """What this rank's sums depend on beside the code, as its loop begins (EXPERIMENTS B4)."""

    world_size: int
    facts: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class TierEvent(Event):
    """What became of one save: planned, taken, coalesced, committed, failed, skipped, damaged."""

    tier: str  # memory | peer | local | disk
    what: str
    step: int
    bytes: int = 0
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """A sentence that an operator should see; also printed."""

    text: str
    level: str = "info"  # info | warning | error
    closing: bool = False  # the job ends, and this is why


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a ledger file."""

    stamp: Stamp
    event: Event

    def to_json(self) -> str:
        """Return the line, without its newline."""
        event, stamp = self.event, self.stamp
        place = _place(stamp.boot_id, stamp.pid, stamp.role, stamp.slot, stamp.rank, stamp.generation)
        body = _print({name: getattr(event, name) for name, _ in _shape(type(event))})
        return (
            f'{{"v":{VERSION},"event":"{type(event).__name__}","at":{{"mono_s":{stamp.mono_s!r},"wall_s":{stamp.wall_s!r},'
            f'{place}}},"is":{body}}}'
        )

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """Read what `to_json` wrote; unknown fields are dropped. Raises LedgerError for anything else."""
        try:
            body = json.loads(line)
            kind = Event.known[body["event"]]
            return cls(stamp=_build(Stamp, body["at"]), event=_build(kind, body["is"]))
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"not an event of version {VERSION}: {line[:120]!r} ({error})") from error


@functools.lru_cache(maxsize=64)
def _place(*place: object) -> str:
    """Where events of a process happen changes with its generation, not with its steps."""
    names = ("boot_id", "pid", "role", "slot", "rank", "generation")
    return _print(dict(zip(names, place, strict=True)))[1:-1]


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    shape = _shape(kind)
    missing = [name for name, required in shape if required and name not in values]
    if missing:
        raise KeyError(f"{kind.__name__} lacks {', '.join(missing)}")
    return kind(**{name: _tuples(values[name]) for name, _ in shape if name in values})


def _shape(kind: type[Any]) -> tuple[tuple[str, bool], ...]:
    """Each field of a dataclass, and whether it must be given; asked once a class, not once a line."""
    known = _SHAPES.get(kind)
    if known is None:
        required = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(kind)}
        known = _SHAPES[kind] = tuple(required.items())
    return known


def _tuples(value: Any) -> Any:
    """JSON has no tuples; frozen events have no lists."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]
