"""What the world's table does when it moves: each effect returns the next view and the commands to a driver.

Notes keep facts. Orders are given once: a view remembers whom it has had killed and how many it has asked for.
"""

from collections.abc import Iterable
from dataclasses import replace

from everstep.ranks import brief
from everstep.recovery.core import assignment, policy
from everstep.recovery.core.assignment import Standby, Standbys
from everstep.recovery.core.guards import blame, cause
from everstep.recovery.core.state import NOBODY, Phase, World, awaited, dirty, staying
from everstep.recovery.core.words import (
    Announced,
    Arrived,
    Command,
    Completed,
    Died,
    Drain,
    End,
    EndRequested,
    Enter,
    Faulted,
    Finish,
    Incarnation,
    Kill,
    Publish,
    Published,
    Report,
    Roster,
    Spawn,
    Stop,
    Wedged,
)

Outcome = tuple[World, tuple[Command, ...]]


# Facts.


def note_announced(world: World, event: Announced, now: float) -> Outcome:
    """A fresh process is standby."""
    standbys = {**world.standbys, event.incarnation: Standby(event.facts, world.generation)}
    answered = event.facts.node == world.node
    gone = world.gone - {event.facts.node}
    return replace(world, standbys=standbys, asked=max(0, world.asked - answered), gone=gone), ()


def note_arrived(world: World, event: Arrived, now: float) -> Outcome:
    """Members are back; the first arrival of each counts."""
    before = world.arrived.get(event.generation, NOBODY)
    new = [(i, facts) for i, facts in ((event.incarnation, event.facts), *event.others) if i not in before]
    if not new:
        return world, ()
    taint = [(event.generation, i) for i, facts in new if facts.dirt]
    arrived = {**world.arrived, event.generation: before.plus(new)}
    return replace(world, arrived=arrived, tainted=world.tainted.union(taint)), ()


def note_died(world: World, event: Died, now: float) -> Outcome:
    """A process is gone, whatever it was; and its node with it, where that is lost."""
    who = event.incarnation
    if event.gone:
        world = replace(world, gone=world.gone | {event.gone})
        if who in world.dead:
            return world, ()
    world = replace(world, dead={**world.dead, who: event}, bereft=now)
    if world.listed(who):
        return replace(world, lost=world.lost | {who}), ()
    # It may have been one that we asked for. Asking is a level, so asking again costs nothing.
    world = replace(world, standbys=_without(world.standbys, [who]), asked=0)
    if event.stage == "fresh" and event.status != 0:
        return replace(world, false_starts=(*world.false_starts, event)), ()
    return world, ()


def note_faulted(world: World, event: Faulted, now: float) -> Outcome:
    """Somebody reports a fault of this generation or of a later one."""
    return replace(world, faults=(*world.faults, event.fault)), ()


def note_wedged(world: World, event: Wedged, now: float) -> Outcome:
    """A member that cannot hear us is a fault of its generation."""
    return replace(world, faults=(*world.faults, blame(world, event))), ()


def note_completed(world: World, event: Completed, now: float) -> Outcome:
    """A member's function has returned."""
    done = world.completed.get(event.generation, frozenset()) | {event.incarnation}
    return replace(world, completed={**world.completed, event.generation: done}), ()


def note_published(world: World, event: Published, now: float) -> Outcome:
    """A roster won; it is acted upon when its turn comes."""
    return replace(world, published={**world.published, event.roster.generation: event.roster}), ()


# Orders.


def kill_wedged(world: World, event: Wedged, now: float) -> Outcome:
    """A process that cannot hear us is ended; its death frees its rank."""
    known = event.text.partition("\n")[0]  # a stack may follow
    return _kill(world, [event.incarnation], f"it cannot hear its agent: {known or 'no answer'}")


def kill_overdue(world: World, event: object, now: float) -> Outcome:
    """Whoever has not left in time is ended before its rank is given away (P5)."""
    limit = world.policy.stop_deadline_s
    return _kill(world, staying(world), f"it has not left generation {world.generation - 1} within {limit:g} s")


def kill_unfit(world: World, event: object, now: float) -> Outcome:
    """Whoever differs from a fresh process is replaced (P9)."""
    unfit = sorted(dirty(world), key=lambda i: world.ranks[i])
    texts = "; ".join(f"rank {world.ranks[i]}: {', '.join(world.here[i].dirt)}" for i in unfit)
    return _kill(world, unfit, f"it differs from a fresh process ({texts})")


def spawn(world: World, event: object, now: float) -> Outcome:
    """Ask this node for what it lacks."""
    return replace(world, asked=world.wanting_here), (Spawn(world.wanting_here),)


def report(world: World, event: object, now: float) -> Outcome:
    """Tell the ledger why this generation ended, and keep it for the next judgement."""
    found = cause(world)
    return (replace(world, causes=(*world.causes, found)), (Report(found),)) if found else (world, ())


def report_better(world: World, event: Died | Wedged, now: float) -> Outcome:
    """A death or a wedged process explains the exception that somebody else reported first."""
    old = world.causes[-1]
    better = blame(world, event)
    if better.step is None:
        better = replace(better, step=old.step)
    return replace(world, causes=(*world.causes[:-1], better)), (Report(better),)


def stop(world: World, event: object, now: float) -> Outcome:
    """Send every living member back. Where that ends them, their deaths explain nothing."""
    living = [i for i in world.ranks if i not in world.lost and i not in world.killed]
    killed = world.killed | set(living) if world.policy.deaf else world.killed
    return replace(world, killed=killed), tuple(Stop(i, world.generation) for i in living)


def open_next(world: World, event: object, now: float) -> Outcome:
    """Open the roster of the next generation, and forget what only concerned this one."""
    generation = world.generation + 1
    opened = replace(
        world,
        generation=generation,
        since=now,
        arrived={g: who for g, who in world.arrived.items() if g >= generation},
        tainted=frozenset((g, who) for g, who in world.tainted if g >= generation),
        completed={g: who for g, who in world.completed.items() if g >= world.generation},
        published={g: roster for g, roster in world.published.items() if g >= generation},
        faults=tuple(f for f in world.faults if f.generation >= generation),
        asked=0,
        false_starts=(),
    )
    return opened, ()


def publish(world: World, event: object, now: float) -> Outcome:
    """Propose the roster that follows from what is known here."""
    if world.roster is None:
        roster = assignment.first(world.epoch, world.policy.world_size, world.standbys, world.policy.shares)
    else:
        roster = assignment.following(world.roster, world.survivors, world.standbys, world.nodes)
    return replace(world, since=now), (Publish(roster),)


def publish_end(world: World, event: object, now: float) -> Outcome:
    """Propose that the generation is finished; called with the next one open."""
    return world, (Publish(assignment.final(_last(world), world.shortfall)),)


def give_up_draining(world: World, event: object, now: float) -> Outcome:
    """The last checkpoints have not become durable in time: the end comes all the same, and says so."""
    return replace(
        world, shortfall=f"the last checkpoints were not durable within {now - (world.since or 0.0):g} s"
    ), ()


def enter(world: World, event: object, now: float) -> Outcome:
    """Act on the roster that won. Whom it leaves out is dead: nobody may publish otherwise (P5)."""
    roster = world.published[world.generation]
    ranks = {m.incarnation: m.rank for m in roster.members}
    left_out = {i: Died(i, 0) for i in world.ranks if i not in ranks}
    dead = {**left_out, **world.dead}
    own = tuple(m.incarnation for m in roster.members if m.node == world.node)
    entered = replace(
        world,
        roster=roster,
        ranks=ranks,
        own=own,
        homes=assignment.homes(roster),
        dead=dead,
        lost=frozenset(i for i in dead if i in ranks),
        standbys=_without(world.standbys, ranks),
        false_starts=(),
    )
    return entered, (Enter(roster),)


def drain(world: World, event: object, now: float) -> Outcome:
    """See to the last intended checkpoints."""
    return replace(world, since=now), (Drain(world.generation),)


def finish(world: World, event: object, now: float) -> Outcome:
    """Let the members return."""
    return world, (Finish(_last(world).generation),)


# Ends.


def end_hopeless(world: World, event: object, now: float) -> Outcome:
    """No restart is left; called after `report`, which has put the fault among the causes."""
    return world, (End(1, policy.decide(world.policy, world.generation, world.causes).reason),)


def end_unstartable(world: World, event: object, now: float) -> Outcome:
    """Fresh processes fail before they have a rank."""
    times, last = len(world.false_starts), world.false_starts[-1]
    return world, (
        End(1, f"{times} fresh processes in a row ended before they had a rank, the last with status {last.status}"),
    )


def end_too_late(world: World, event: object, now: float) -> Outcome:
    """A wait is over. A world that has run before is not at fault: its node is to be replaced."""
    if world.phase is Phase.PUBLISHING:
        lacking = "an answer from the store that holds the rosters"
    elif missing := list(awaited(world)):
        lacking = "the death of " + ", ".join(f"rank {world.ranks[i]} ({i})" for i in missing)
    else:
        size, least = len(world.ranks) or world.policy.world_size, world.policy.min_world_size
        lacking = f"fresh processes for {world.vacant} of {size} ranks"
        lacking += f" and may not go on with fewer than {least}" if least is not None else ""
    text = f"generation {world.generation} waited {now - (world.since or 0.0):g} s for {lacking}"
    story = f"; before it, {policy.told(world.causes[-1:])}" if world.causes else ""
    return world, (End(75 if world.roster else 1, text + story),)


def end_failed_exit(world: World, event: object, now: float) -> Outcome:
    """The work is done and durable, but a member did not exit well: no restart (P14). The others had time to end."""
    bad = sorted((world.ranks[i], world.dead[i].status) for i in world.lost if world.dead[i].status != 0)
    who = " and ".join(f"rank {rank} ended with status {status}" for rank, status in bad)
    lost = "the function's results stand, the rest of its script does not"
    left = [rank for i, rank in world.ranks.items() if i not in world.lost]
    late = f"; rank {brief(left)} had not ended {now - world.bereft:g} s later" if left else ""
    return world, (End(1, f"{who} after all had completed: {lost}{late}"),)


def end_done(world: World, event: object, now: float) -> Outcome:
    """All members have ended with 0; whether anything is missing was published with the end."""
    end = world.published[world.generation]
    return world, (End(1, end.shortfall) if end.shortfall else End(0, end.reason),)


def end_requested(world: World, event: EndRequested, now: float) -> Outcome:
    """Somebody outside wants it so."""
    return world, (End(event.code, event.reason),)


def _kill(world: World, whom: Iterable[Incarnation], reason: str) -> Outcome:
    new = [i for i in whom if world.may_kill(i)]
    killed = replace(world, killed=world.killed | set(new), standbys=_without(world.standbys, new))
    return killed, tuple(Kill(i, reason) for i in new)


def _without(standbys: Standbys, whom: Iterable[Incarnation]) -> Standbys:
    gone = set(whom)
    return {i: s for i, s in standbys.items() if i not in gone}


def _last(world: World) -> Roster:
    assert world.roster is not None, "a generation that was never entered cannot end"
    return world.roster
