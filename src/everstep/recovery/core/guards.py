"""Questions that the world's table asks before it moves. Each is named as the diagram shows it.

A guard reads; it changes nothing and orders nothing. Which of two that hold goes first is said in the table.
"""

from everstep.recovery.core import policy
from everstep.recovery.core.state import World, accounted, dirty, finish_by, give_up_by, replace_by, staying, stop_by
from everstep.recovery.core.words import UNKNOWN_STATUS, Died, Fault, Wedged

FALSE_STARTS = 3
"""So many fresh processes in a row that fail before they have a rank end the job: the next would fail too."""


def always(world: World, event: object, now: float) -> bool:
    """Nothing is asked."""
    return True


def published(world: World, event: object, now: float) -> bool:
    """It is known which roster won for the open generation."""
    return world.generation in world.published


def finished(world: World, event: object, now: float) -> bool:
    """It is published that the generation before the open one is finished."""
    return world.generation in world.published and not world.published[world.generation].members


def succeeded(world: World, event: object, now: float) -> bool:
    """The next roster stands already: others know of a fault, or of the end, that we have not heard of."""
    return world.generation + 1 in world.published


def faulted(world: World, event: object, now: float) -> bool:
    """The generation has a fault."""
    return cause(world) is not None


def hopeless(world: World, event: object, now: float) -> bool:
    """The generation has a fault, and there will be no restart."""
    found = cause(world)
    return found is not None and not policy.decide(world.policy, world.generation, (*world.causes, found)).go_on


def all_completed(world: World, event: object, now: float) -> bool:
    """Every member's function has returned."""
    enough = len(world.returners) + len(world.lost) >= len(world.ranks)  # cheap, and most of the time the answer
    return enough and all(world.has_completed(i) for i in world.ranks)


def complete(world: World, event: object, now: float) -> bool:
    """Every member of the last roster has arrived or is dead; every gap has a standby, or none is awaited any more."""
    return (world.vacant == 0 or _shrinks(world, now)) and accounted(world)


def _shrinks(world: World, now: float) -> bool:
    """Those that are left may go on without the others, and no replacement is awaited any longer."""
    return world.wanting == 0 and (now >= replace_by(world) or len(world.false_starts) >= FALSE_STARTS)


def unfit(world: World, event: object, now: float) -> bool:
    """Somebody of this node has arrived whose process differs from a fresh one (P9)."""
    return any(world.may_kill(i) for i in dirty(world))


def overdue(world: World, event: object, now: float) -> bool:
    """Somebody of this node has not left the old generation within the deadline."""
    return now >= stop_by(world) and any(True for _ in staying(world))


def short(world: World, event: object, now: float) -> bool:
    """This node should find more fresh processes than it was asked for."""
    return world.wanting_here > world.asked


def cannot_start(world: World, event: object, now: float) -> bool:
    """Processes are wanted, and the last ones all failed before they had a rank."""
    return world.wanting > 0 and len(world.false_starts) >= FALSE_STARTS


def unreplaced(world: World, event: object, now: float) -> bool:
    """No replacement has come in the time that the operator gives it, and too few are left."""
    given = world.roster is not None and world.policy.replace_deadline_s is not None
    return given and world.wanting > 0 and now >= replace_by(world) and accounted(world)


def too_late(world: World, event: object, now: float) -> bool:
    """What was waited for has not come within the deadline."""
    return now >= give_up_by(world)


def failed_exit(world: World, event: object, now: float) -> bool:
    """A member of the finished generation did not end with 0, and the others have ended, or had the time to."""
    late = finish_by(world)
    return late is not None and (all_gone(world, event, now) or now >= late)


def all_gone(world: World, event: object, now: float) -> bool:
    """Every member of the finished generation has ended."""
    return len(world.lost) == len(world.ranks)


def member(world: World, event: Wedged, now: float) -> bool:
    """It is a member of the roster."""
    return world.listed(event.incarnation)


def explains(world: World, event: Died | Wedged, now: float) -> bool:
    """The gathering began with the exception of somebody else who has only lost a connection: to this one, perhaps."""
    last = world.causes[-1] if world.causes else None
    unasked = isinstance(event, Died) and event.unasked
    return (
        last is not None
        and last.victim
        and (last.generation, last.kind) == (world.generation - 1, "exception")
        and last.incarnation != event.incarnation
        and world.listed(event.incarnation)
        and (unasked or (event.incarnation not in world.here and event.incarnation not in world.killed))
    )


def cause(world: World) -> Fault | None:
    """Return the first fault of the present generation that concerns its roster (P17), or the death of a member.

    What a victim says counts where nothing else is known.
    """
    if not world.faults and not world.lost:  # most of the time
        return None
    told = [
        f for f in world.faults
        if f.generation == world.generation and (f.incarnation is None or world.listed(f.incarnation))
    ]  # fmt: skip
    if first := next((f for f in told if not f.victim), None):
        return first
    gone = [i for i in world.lost if not world.has_completed(i)]
    if gone:
        return blame(world, world.dead[min(gone, key=lambda i: world.ranks[i])])
    return told[0] if told else None


def blame(world: World, event: Died | Wedged) -> Fault:
    """Put a death or a wedged process into a fault record of the roster that lists it."""
    roster = world.roster
    assert roster is not None, "only members are blamed"
    early = False
    if isinstance(event, Wedged):
        kind, text = "wedged", event.text
    else:
        kind, text = "left" if event.status == 0 else "death", event.text or _ending(event.status)
        early = event.stage == "fresh" or (event.generation is not None and event.generation < roster.generation)
    rank = world.ranks[event.incarnation]
    by = f"agent {world.node}"
    return Fault(roster.generation, kind, by, event.incarnation, rank, event.step, text, attempted=not early)


def _ending(status: int) -> str:
    if status == UNKNOWN_STATUS:
        return "its process has ended"
    return f"ended with status {status}" if status >= 0 else f"ended by signal {-status}"
