"""The world of the control-plane benchmark: who its ranks are, and the planner's side of a fault.

One rank of node 0 dies in every generation and a standby of its node takes its rank; all others are kept. The machine
is the product's own (`recovery.core.world`), fed with one fact after another as an agent feeds it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from everstep.errors import ProtocolError
from everstep.recovery.core import world
from everstep.recovery.core.words import (
    Announced,
    Arrived,
    Died,
    Facts,
    Incarnation,
    Member,
    Policy,
    Publish,
    Published,
    Roster,
)
from everstep.recovery.core.world import World

PID, START = 4_000_000, 100_000_000
"""Of the largest that a machine has, lest the measured messages be smaller than real ones."""


def node_name(number: int) -> str:
    """Name a node."""
    return f"node-{number}"


def incarnation(node: int, slot: int, life: int = 0) -> Incarnation:
    """Return the process of a slot; `life` counts those that were there before it."""
    return Incarnation(f"{node:08x}-0000-4000-8000-{node:012x}", PID + slot, START + life)


def facts(node: int, slot: int, *, fresh: bool = False) -> Facts:
    """Return what a process brings."""
    return Facts(node_name(node), slot, fresh)


def first_roster(ranks: int, per_node: int) -> Roster:
    """Return generation 0: every node has `per_node` ranks, the last one what is left."""
    places = [divmod(rank, per_node) for rank in range(ranks)]
    return Roster(
        0, 0, tuple(Member(r, incarnation(n, s), node_name(n), s, True, "started") for r, (n, s) in enumerate(places))
    )


def running(roster: Roster) -> World:
    """Return the view of an agent of node 0 that has entered `roster`."""
    members = {m.incarnation: m.rank for m in roster.members}
    begun = world.begin(node_name(0), Policy(roster.world_size, max_restarts=1 << 30))
    own = tuple(m.incarnation for m in roster.members if m.node == begun.node)
    return replace(
        begun, phase=world.Phase.RUNNING, generation=roster.generation, since=0.0, roster=roster, ranks=members, own=own
    )


def struck(view: World, dead: Incarnation, standby: Incarnation) -> World:
    """Return the view after a death on node 0, its standby announced."""
    view, _ = world.step(view, Announced(standby, facts(0, standby.pid - PID + 1, fresh=True)), 0.0)
    view, _ = world.step(view, Died(dead, -9), 0.0)
    return view


def gathered(view: World, nodes: Iterable[Sequence[tuple[Incarnation, Facts]]]) -> tuple[World, Roster]:
    """Feed the arrivals, a node's together, as a driver would; return the roster that is to be published."""
    wanted: Roster | None = None
    for (who, brought), *others in nodes:
        view, commands = world.step(view, Arrived(view.generation, who, brought, tuple(others)), 0.0)
        wanted = next((c.roster for c in commands if isinstance(c, Publish)), wanted)
        world.wake_at(view)
    if wanted is None:
        raise ProtocolError(f"generation {view.generation} is not complete after all have arrived: a bug of the bench")
    return view, wanted


def entered(view: World, roster: Roster) -> World:
    """Return the view after the roster that won was entered."""
    view, _ = world.step(view, Published(roster), 0.0)
    return view
