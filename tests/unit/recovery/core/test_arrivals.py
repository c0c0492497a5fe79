"""Arrivals that are told together come to what they come to one after another."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.launcher.peers.core import facts as codec
from everstep.recovery.core.words import (
    Announced,
    Arrived,
    Died,
    Facts,
    Incarnation,
    Policy,
    Publish,
    Published,
    Ticked,
)
from everstep.recovery.core.world import Phase, begin, step, wake_at

RANKS, NODES = 12, 3


def process(number):
    return Incarnation("boot", number, 0)


def brought(number, dirty=()):
    dirt = ("a random state",) if number in dirty else ()
    return Facts(f"node-{number % NODES}", number // NODES, fresh=False, dirt=dirt)


def running():
    world, _ = step(begin("node-0", Policy(RANKS, local_world_size=RANKS // NODES)), Ticked(), 0.0)
    for number in range(RANKS + 2):  # two of them standbys
        facts = Facts(f"node-{number % NODES}", number // NODES, fresh=True)
        world, commands = step(world, Announced(process(number), facts), 0.0)
        for roster in (c.roster for c in commands if isinstance(c, Publish)):
            world, _ = step(world, Published(roster), 0.0)
    assert world.phase is Phase.RUNNING
    return world


def told(world, events):
    """Return the view after these events, and all that was ordered; when a driver must wake up, each time."""
    orders = []
    for event in events:
        world, commands = step(world, event, 1.0)
        orders += commands
    return world, orders, wake_at(world)


def together(arrivals):
    (who, facts), *others = arrivals
    return Arrived(1, who, facts, tuple(others))


@st.composite
def gatherings(draw):
    """Who dies, who comes back unfit and who does not come; in which order and with whom the others are told of."""
    dead = draw(st.sets(st.integers(0, RANKS - 1), min_size=1, max_size=2))
    dirty = draw(st.sets(st.integers(0, RANKS - 1), max_size=2)) - dead
    late = draw(st.sets(st.integers(0, RANKS - 1), max_size=1))
    order = draw(st.permutations([n for n in range(RANKS) if n not in late]))  # the dead may have arrived before
    again = order + draw(st.lists(st.sampled_from(order), max_size=3)) if order else order
    cuts = sorted(draw(st.sets(st.integers(1, len(again) - 1), max_size=5))) if len(again) > 1 else []
    groups = [again[a:b] for a, b in zip([0, *cuts], [*cuts, len(again)], strict=True)]
    return dead, dirty, groups


@given(gatherings())
def test_one_after_another_or_together_they_come_to_the_same(gathering):
    dead, dirty, groups = gathering
    deaths = [Died(process(n), -9) for n in sorted(dead)]
    told_of = [[(process(n), brought(n, dirty)) for n in group] for group in groups]
    one_by_one = [Arrived(1, who, facts) for group in told_of for who, facts in group]
    world = running()
    left, right = told(world, deaths + one_by_one), told(world, deaths + [together(group) for group in told_of])
    assert left[0] == right[0]
    assert left[2] == right[2]
    assert [o for o in left[1] if isinstance(o, Publish)] == [o for o in right[1] if isinstance(o, Publish)]
    assert {o.incarnation for o in left[1] if hasattr(o, "reason")} == {
        o.incarnation for o in right[1] if hasattr(o, "reason")
    }
    assert told(world, deaths)[0].here == {}  # what a view holds does not change with those that follow it


def test_those_that_are_told_together_travel_together():
    event = together([(process(n), brought(n, {2})) for n in range(3)])
    assert codec.decode(codec.encode(event)) == event


def test_the_first_of_two_arrivals_counts_within_one_event_too():
    facts = Facts("node-0", 0, fresh=False)
    other = Facts("node-0", 5, fresh=False)
    world, _, _ = told(running(), [Died(process(1), -9), Arrived(1, process(0), facts, ((process(0), other),))])
    assert world.here == {process(0): facts}
