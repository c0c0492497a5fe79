"""THE protocol: the machine that every agent runs, as a table.

Rule 1: every fact about what may follow what lives in TRANSITIONS: phase × event → rows. The first row whose guard
        holds is taken; where none holds the event is void; an event that a phase does not list is illegal and raises.
Rule 2: after every event the rows of `Settled` are taken for as long as one holds: what follows by itself.
Rule 3: facts may reach an agent late, twice and in any order. What is old is void, what is early is kept. Rosters are
        taken in the order of their generations.
Rule 4: a roster closes over incarnations, never counts: every member of the last one has arrived or is dead (P3). A
        rank is given away only after its holder's death has been seen (P5).
Rule 5: whether a late fault or the end came first is decided by the same compare-and-set as every roster: the end is
        published as a roster without members.
Rule 6: every agent gives every order but `Kill`, and each driver acts on the processes of its own node. Kill is
        ordered only by the agent of the node, which alone knows first-hand whether a process has arrived.

What it does not know: a store, a socket, a clock, how a process is stopped, and what rides on the agent. The guards
and effects that the table names are in `guards` and `effects`, the state in `state`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from everstep.errors import ProtocolError
from everstep.recovery.core import effects as do
from everstep.recovery.core import guards as when
from everstep.recovery.core.state import Phase, World, wake_at
from everstep.recovery.core.words import (
    Announced,
    Arrived,
    Command,
    Completed,
    Died,
    Drained,
    EndRequested,
    Event,
    Fault,
    Faulted,
    Policy,
    Published,
    Roster,
    Ticked,
    Wedged,
)

__all__ = ["TRANSITIONS", "Phase", "Row", "Settled", "World", "begin", "step", "wake_at"]


class Settled:
    """Not an event: what the table lists under it follows from what is known already."""


# Events are handed to guards and effects by the table's own key, which the type checker cannot follow: hence Any.
MOST_MOVES = 1000
"""More moves than that after one event are a bug of the table: two rows that undo each other."""

Guard = Callable[[World, Any, float], bool]
Effect = Callable[[World, Any, float], do.Outcome]


@dataclass(frozen=True, slots=True)
class Row:
    """If `when` holds, do `do` in order, then stand in `then` (None: stay)."""

    when: Guard
    do: tuple[Effect, ...] = ()
    then: Phase | None = None


Rows = tuple[Row, ...]

VOID: Rows = ()
ANNOUNCED: Rows = (Row(when.always, (do.note_announced,)),)
ARRIVED: Rows = (Row(when.always, (do.note_arrived,)),)
DIED: Rows = (Row(when.always, (do.note_died,)),)
FAULTED: Rows = (Row(when.always, (do.note_faulted,)),)
COMPLETED: Rows = (Row(when.always, (do.note_completed,)),)
PUBLISHED: Rows = (Row(when.always, (do.note_published,)),)
KILL: Rows = (Row(when.always, (do.kill_wedged,)),)
END: Rows = (Row(when.always, (do.end_requested,), Phase.ENDED),)

P = Phase
TRANSITIONS: Mapping[Phase, Mapping[type, Rows]] = {
    P.GATHERING: {
        Announced: ANNOUNCED,
        Arrived: ARRIVED,
        Died: (Row(when.explains, (do.report_better, do.note_died)), *DIED),
        Faulted: FAULTED,
        Completed: COMPLETED,
        Published: PUBLISHED,
        Wedged: (Row(when.explains, (do.report_better, do.kill_wedged)), *KILL),
        Ticked: VOID,
        EndRequested: END,
        Settled: (
            Row(when.finished, (do.finish,), P.FINISHING),
            Row(when.published, (do.enter,), P.RUNNING),
            Row(when.unfit, (do.kill_unfit,)),
            Row(when.complete, (do.publish,), P.PUBLISHING),
            Row(when.cannot_start, (do.end_unstartable,), P.ENDED),
            Row(when.overdue, (do.kill_overdue,)),
            Row(when.unreplaced, (do.end_too_late,), P.ENDED),
            Row(when.short, (do.spawn,)),
            Row(when.too_late, (do.end_too_late,), P.ENDED),
        ),
    },
    P.PUBLISHING: {
        Announced: ANNOUNCED,
        Arrived: ARRIVED,
        Died: DIED,
        Faulted: FAULTED,
        Completed: COMPLETED,
        Published: PUBLISHED,
        Wedged: KILL,
        Ticked: VOID,
        Drained: VOID,  # said twice
        EndRequested: END,
        Settled: (
            Row(when.finished, (do.finish,), P.FINISHING),
            Row(when.published, (do.enter,), P.RUNNING),
            Row(when.too_late, (do.end_too_late,), P.ENDED),
        ),
    },
    P.RUNNING: {
        Announced: ANNOUNCED,
        Arrived: ARRIVED,
        Died: DIED,
        Faulted: FAULTED,
        Completed: COMPLETED,
        Published: PUBLISHED,
        Wedged: (Row(when.member, (do.note_wedged, do.kill_wedged)), *KILL),
        Ticked: VOID,
        EndRequested: END,
        Settled: (
            Row(when.succeeded, (do.open_next,), P.GATHERING),
            Row(when.hopeless, (do.report, do.end_hopeless), P.ENDED),
            Row(when.faulted, (do.report, do.stop, do.open_next), P.GATHERING),
            Row(when.all_completed, (do.drain,), P.DRAINING),
        ),
    },
    P.DRAINING: {
        Announced: ANNOUNCED,
        Arrived: ARRIVED,
        Died: DIED,
        Faulted: FAULTED,
        Completed: COMPLETED,
        Published: PUBLISHED,
        Wedged: (Row(when.member, (do.note_wedged, do.kill_wedged)), *KILL),
        Ticked: (Row(when.too_late, (do.give_up_draining, do.open_next, do.publish_end), P.PUBLISHING),),
        Drained: (Row(when.always, (do.open_next, do.publish_end), P.PUBLISHING),),
        EndRequested: END,
        Settled: (
            Row(when.succeeded, (do.open_next,), P.GATHERING),
            Row(when.hopeless, (do.report, do.end_hopeless), P.ENDED),
            Row(when.faulted, (do.report, do.stop, do.open_next), P.GATHERING),
        ),
    },
    P.FINISHING: {
        Announced: VOID,
        Arrived: VOID,
        Died: DIED,
        Published: VOID,
        Wedged: KILL,
        Ticked: VOID,
        Drained: VOID,
        EndRequested: END,
        Settled: (
            Row(when.failed_exit, (do.end_failed_exit,), P.ENDED),
            Row(when.all_gone, (do.end_done,), P.ENDED),
        ),
    },
    P.ENDED: dict.fromkeys(Event.__args__, VOID),  # the others may be a moment behind
}


def begin(node: str, policy: Policy, epoch: int = 0, generation: int = 0) -> World:
    """Return the view of an agent that has just started; a first `Ticked` makes it ask for processes.

    `generation`: of a world that runs already, whose roster it hears next.
    """
    return World(node, policy, epoch, generation=generation)


def step(world: World, event: Event, now: float) -> tuple[World, tuple[Command, ...]]:
    """Return the next view and what to do. Raises ProtocolError, with `world` still good, for what cannot follow."""
    if world.since is None:
        world = replace(world, since=now)
    if _stale(world, event):
        return world, ()
    if world.phase is not Phase.ENDED and (refusal := _refusal(world, event)):
        raise _illegal(world, event, refusal)
    rows = TRANSITIONS[world.phase].get(type(event))
    if rows is None:
        names = sorted(e.__name__ for e in TRANSITIONS[world.phase] if e is not Settled)
        raise _illegal(world, event, ", ".join(names))
    world, commands, _ = _take(world, rows, event, now)
    for _ in range(MOST_MOVES):
        world, more, moved = _take(world, TRANSITIONS[world.phase].get(Settled, VOID), event, now)
        if not moved:
            return world, commands
        commands += more
    raise _illegal(world, event, f"to settle within {MOST_MOVES} moves")


def _take(world: World, rows: Rows, event: Event, now: float) -> tuple[World, tuple[Command, ...], bool]:
    """Take the first row whose guard holds."""
    for row in rows:
        if row.when(world, event, now):
            commands: tuple[Command, ...] = ()
            for effect in row.do:
                world, more = effect(world, event, now)
                commands += more
            if row.then is not None:
                world = replace(world, phase=row.then)
            return world, commands, True
    return world, (), False


def _stale(world: World, event: Event) -> bool:
    """Tell whether this is known already, or concerns what is over (P16, P17)."""
    match event:
        case Announced(who, _):
            return who in world.standbys or who in world.ranks or who in world.dead or who in world.killed
        case Died(who, gone=gone):
            return who in world.dead and (not gone or gone in world.gone)
        case Wedged(who):
            return who in world.dead or who in world.killed
        case Arrived(generation) | Completed(generation) | Faulted(Fault(generation)):
            return generation < world.generation
        case Published(Roster(_, generation)) | Drained(int(generation)):
            return generation < world.generation
        case _:
            return False


def _refusal(world: World, event: Event) -> str:
    """Say what was expected instead of an event that contradicts itself or the world; empty if it does not."""
    match event:
        case Announced(facts=facts) if not facts.fresh:
            return "a fresh process; one that has begun its script arrives, it is not announced"
        case Published(roster):
            ranks, size = [m.rank for m in roster.members], _size(world, roster)
            known = world.published.get(roster.generation, roster)
            if roster.epoch != world.epoch or known != roster:
                return f"one roster for generation {roster.generation} of epoch {world.epoch}"
            if ranks and (ranks != list(range(size)) or len({m.incarnation for m in roster.members}) != size):
                return f"each of ranks 0-{size - 1} once, held by as many processes"
            return "" if ranks or roster.generation else "a generation to start with"
        case _:
            return ""


def _size(world: World, roster: Roster) -> int:
    """Say how many ranks a roster must have; one of a world that may shrink has as many as it lists, if enough."""
    least, most = world.policy.min_world_size, world.policy.world_size
    return most if least is None else min(most, max(least, roster.world_size))


def _illegal(world: World, event: object, expected: str) -> ProtocolError:
    return ProtocolError(
        f"{event!r} came to an agent ({world.node}) whose world is {world.phase.value} in generation "
        f"{world.generation} of epoch {world.epoch}. Expected: {expected}. "
        "A driver made an event up or sent it out of order: see docs/recovery.md."
    )
