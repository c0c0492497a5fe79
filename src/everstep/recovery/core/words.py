"""The words of the recovery protocol.

Rule 1: all bookkeeping is by incarnation, never by count (EXPERIMENTS P3, E13).
Rule 2: a rank is held only by an incarnation that the current roster names.
Rule 3: facts may come late, twice, and in any order; each is true for ever once it is known.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple


class Incarnation(NamedTuple):
    """One process, told apart from every other that ever ran: node boot id, pid, start time (ticks since boot).

    A tuple, since each is hashed and compared several times for every roster: that is ten times cheaper so.
    """

    boot_id: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.boot_id}.{self.pid}.{self.start}"

    @classmethod
    def parse(cls, text: str) -> "Incarnation":
        """Read what `str` prints; ValueError for anything else."""
        boot, pid, start = text.rsplit(".", 2)
        return cls(boot, int(pid), int(start))


@dataclass(frozen=True, slots=True)
class Facts:
    """What an incarnation brings to a roster."""

    node: str
    slot: int  # its place on the node; a spare's lies above those of the ranks
    fresh: bool  # a process that has not begun the user's script: warm to the imports
    former_rank: int | None = None
    dirt: tuple[str, ...] = ()  # process-global state that differs from a fresh process (P9): such a rank is replaced


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a generation ended. The first record opens the fault; a death seen later may name the cause better."""

    generation: int
    kind: str  # exception | death | stall | wedged | left | script (its top level failed before the wrapped call)
    noticed_by: str
    incarnation: Incarnation | None = None
    rank: int | None = None
    step: int | None = None  # last step done in the world when it happened
    text: str = ""
    attempted: bool = True  # False: a member was dead before the generation was entered
    victim: bool = False  # it says no more than that another member is gone


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a roster, and why this incarnation holds it."""

    rank: int
    incarnation: Incarnation
    node: str
    slot: int
    fresh: bool
    why: str  # kept | spare | started


@dataclass(frozen=True, slots=True)
class Roster:
    """The published assignment of one generation. `members` is sorted by rank and covers 0 … world_size-1.

    One without members says that there is no such generation: the one before it is finished. It is published like any
    other, so that one compare-and-set decides between a late fault and the end.
    """

    epoch: int
    generation: int
    members: tuple[Member, ...]
    standby: tuple[Incarnation, ...] = ()
    reason: str = ""
    shortfall: str = ""  # of the end: what was given up on the way to it

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def rank_of(self, incarnation: Incarnation) -> int | None:
        """Return the rank that `incarnation` holds here, or None."""
        return next((m.rank for m in self.members if m.incarnation == incarnation), None)

    def to_json(self) -> dict[str, Any]:
        """Return the wire form; at most 40 bytes a rank go to the store (P13), facts stay with the planner."""
        members = [[m.rank, str(m.incarnation), m.node, m.slot, m.fresh, m.why] for m in self.members]
        return asdict(self) | {"members": members, "standby": [str(i) for i in self.standby]}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Roster":
        """Read what `to_json` wrote."""
        members = tuple(Member(r, Incarnation.parse(i), n, s, f, w) for r, i, n, s, f, w in body["members"])
        standby = tuple(Incarnation.parse(i) for i in body["standby"])
        return cls(body["epoch"], body["generation"], members, standby, body["reason"], body.get("shortfall", ""))


# What the world machine hears. Each may come again; an event of an old generation is void (P17).


@dataclass(frozen=True, slots=True)
class Announced:
    """A fresh process stands ready to take a rank."""

    incarnation: Incarnation
    facts: Facts


@dataclass(frozen=True, slots=True)
class Arrived:
    """A member of the last roster has unwound and stands ready for `generation`.

    `others` have too, and are told of together with it (a node's, say): the same as one after another, in one step.
    """

    generation: int
    incarnation: Incarnation
    facts: Facts
    others: tuple[tuple[Incarnation, Facts], ...] = ()


Stage = Literal["fresh", "running", "completed"]
"""How far a process had come: never had a rank; has one; its function has returned in the present generation."""


UNKNOWN_STATUS = 256
"""Of a process that has ended without its parent's telling how: no exit code is so large."""


@dataclass(frozen=True, slots=True)
class Died:
    """A process is gone: seen by pidfd, said by anyone. `status` is its exit code or minus the signal.

    `stage` is what its own agent knew of it (`World.death_of` fills it in): elsewhere its completion may come after
    its death, and its death before news of the generation that it completed.
    """

    incarnation: Incarnation
    status: int
    stage: Stage = "running"
    step: int | None = None  # last step done in the world, as its own agent saw it
    generation: int | None = None  # that `stage` speaks of, the last that its own agent entered; None: the present one
    unasked: bool = False  # it was ending by itself before our own order to end it came
    text: str = ""  # what its agent knows of it beyond the status
    gone: str = ""  # the node that is lost, and this process with it: the last of its processes of which that is told


@dataclass(frozen=True, slots=True)
class Faulted:
    """Somebody reports a fault of a generation."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Completed:
    """This member's function has returned (or its unwrapped script has ended with 0)."""

    generation: int
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Published:
    """The roster of a generation stands in the store: the one that won."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class Wedged:
    """An agent has evidence that a member cannot hear us: stopped, or silent to a probe."""

    incarnation: Incarnation
    text: str = ""
    step: int | None = None  # last step done in the world


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Every checkpoint that the world intended is durable, or given up by name (P14)."""

    generation: int | None = None  # of the `Drain` that it answers; None: of the present one


@dataclass(frozen=True, slots=True)
class EndRequested:
    """The operator or the scheduler asked for the end (SIGTERM, Ctrl-C): exit code 128 + n."""

    code: int
    reason: str


Event = Announced | Arrived | Died | Faulted | Completed | Published | Wedged | Ticked | Drained | EndRequested

# What the world machine wants done.


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell this member to leave its function: the generation has a fault. A member that cannot be told is killed."""

    incarnation: Incarnation
    generation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End this process; its death comes back as `Died`."""

    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class Spawn:
    """Have `count` fresh processes on their way to this node's announcements, those already started included.

    A level, not an edge: it may be said again, and asks for nothing more where as many are already starting.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Report:
    """The generation's fault, or a better cause of it, is known: write it to the ledger."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this roster with compare-and-set; the winner comes back as `Published`. It may have no members."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class Enter:
    """Act on the published roster: tell each member on this node its rank; a fresh one begins the script."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class Drain:
    """All members have completed: see to the last intended checkpoints; answer with `Drained`."""

    generation: int


@dataclass(frozen=True, slots=True)
class Finish:
    """All is durable: let the members return from the call, and the spares go."""

    generation: int


@dataclass(frozen=True, slots=True)
class End:
    """The job is over: stop what still runs and exit with `code`."""

    code: int
    reason: str


Command = Stop | Kill | Spawn | Report | Publish | Enter | Drain | Finish | End


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator asked for."""

    world_size: int
    max_restarts: int | None = None  # None: a fault with progress since the last is free
    same_step_limit: int = 3  # faults alike without progress that end the job
    patience: int = 10  # faults of any kind without progress that end it
    deaf: bool = False  # members cannot be told to leave (a script without the wrapper): a stop ends them
    stop_deadline_s: float = 10.0  # from Stop to Arrived; then Kill
    start_deadline_s: float = 600.0  # for the first processes, for fresh ones, and for the store; then End
    death_deadline_s: float = 120.0  # after `stop_deadline_s`, for deaths of those that are killed; then End
    drain_deadline_s: float = 600.0  # for the last intended checkpoints
    finish_deadline_s: float = 1800.0  # for the others to come to their ends where one has ended badly after the end
    local_world_size: int | None = None  # ranks that this node starts with; None: all of them
    shares: tuple[tuple[str, int], ...] = ()  # of all nodes: how many each starts with; empty: whoever comes first
    by_node: bool = False  # a standby of a node without ranks takes one of a lost node, never one of a node that lives
    whole: bool = False  # and ranks never move otherwise: a node has all of its ranks or none
    min_world_size: int | None = None  # survivors go on while they are so many; None: a world never shrinks
    replace_deadline_s: float | None = None  # for a fresh process in the place of one that is lost; then the world
    # shrinks, or ends where it may not. None: at once where it may shrink, else `start_deadline_s`

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.min_world_size is not None and not 1 <= self.min_world_size <= self.world_size:
            raise ValueError(
                f"a world of {self.world_size} ranks that goes on with {self.min_world_size} cannot be meant; give 1 "
                f"to {self.world_size}, or None for a world that never shrinks"
            )
        if self.world_size < 1:
            raise ValueError(f"a world of {self.world_size} ranks cannot run; give at least one (--nproc-per-node)")
