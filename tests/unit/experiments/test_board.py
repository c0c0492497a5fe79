"""Agents over a store whose old keys are deleted at any moment: nobody hangs, nothing is decided twice.

One step of an actor is one call of the store. A late agent is one that is hardly ever drawn: it may miss generation
after generation, and propose for one that was over long ago.
"""

import random

import pytest

from everstep.experiments.bench import board
from everstep.experiments.bench.board import Ask, bell, following, heard, newest, propose
from everstep.store import MemoryStore, keys

GENERATIONS, MEMBERS = 12, ("a", "b")
FIRST = b"0 first"


def generation(roster):
    return int(roster.split()[0])


class Agent:
    """A node. Those with members report their arrivals; those that propose gather all of them first."""

    def __init__(self, name, *, proposes, ways=(propose, following)):
        self.name, self.proposes, self.propose, self.following = name, proposes, *ways
        self.entered = [FIRST]

    def live(self):
        while generation(self.entered[-1]) < GENERATIONS:
            self.entered.append((yield from self.next_roster(self.entered[-1])))

    def next_roster(self, known):
        here, then = generation(known), generation(known) + 1
        if self.name == MEMBERS[0]:
            yield Ask("create", (board.fault(0, here), b"death"))
        if (yield from heard(0, board.fault(0, here), known)) is not None:
            if self.name in MEMBERS:
                yield Ask("create", (board.arrived(0, then, self.name), b"here"))
            if self.proposes and (yield from self.all_arrived(then, known)):
                stands = yield from self.propose(0, then, known, b"%d by %s" % (then, self.name.encode()))
                if stands is not None:
                    return stands
        return (yield from self.following(0, then, known))

    def all_arrived(self, then, known):
        for who in MEMBERS:
            if (yield from heard(0, board.arrived(0, then, who), known)) is None:
                return False
        return True


def sweeper(over):
    """Deletes what is past, one key after another, as the store's host does."""
    while not over():
        stands = yield Ask("get", (newest(0),))
        for key in (yield Ask("list", (f"{keys.OURS}/",))):
            if keys.past(key, 0, generation(stands)):
                yield Ask("delete", (key,))


class WaitsForEverError(AssertionError):
    """Somebody does not come to the end."""


def simulate(seed, agents, most=100_000):
    """Let chance say who is next; return the store."""
    rng, store = random.Random(seed), MemoryStore()
    store.set(newest(0), FIRST)
    living = [(agent, agent.live()) for agent in agents]
    slow, how_slow = rng.choice(agents[1:]), rng.choice((0.7, 0.9, 0.95))
    everybody = {id(steps): None for _, steps in living}
    sweep = sweeper(lambda: not living)
    everybody[id(sweep)] = None
    for _ in range(most):
        if not living:
            return store
        agent, steps = rng.choice([*living, (None, sweep)])
        if agent is slow and rng.random() < how_slow:
            continue
        try:
            ask = steps.send(everybody[id(steps)])
        except StopIteration:
            living.remove((agent, steps))
            continue
        more = {"timeout_s": 0} if ask.call == "wait" else {}  # a slice that ends at once
        everybody[id(steps)] = getattr(store, ask.call)(*ask.arguments, **more)
    raise WaitsForEverError(f"seed {seed}: {[(a.name, a.entered[-1]) for a, _ in living]}")


def laws(agents):
    """Everybody goes on to later rosters only."""
    for agent in agents:
        passed = [generation(roster) for roster in agent.entered]
        assert passed == sorted(set(passed)), (agent.name, passed)
        assert passed[-1] == GENERATIONS
    assert decided_once(agents)


def decided_once(agents):
    """Tell whether there is one roster of each generation."""
    rosters = {roster for agent in agents for roster in agent.entered}
    return len(rosters) == len({generation(roster) for roster in rosters})


def cast(**ways):
    """Two nodes with members and two of spares; one of each proposes."""
    return [Agent(name, proposes=name in "bc", **ways) for name in "abcd"]


@pytest.mark.parametrize("seed", range(40))
def test_however_late_one_reads_a_later_roster_and_none_is_decided_twice(seed):
    agents = cast()
    store = simulate(seed, agents)
    laws(agents)
    ours = [key for key in store.list(f"{keys.OURS}/") if not keys.past(key, 0, GENERATIONS)]
    assert set(ours) <= {newest(0), bell(0, GENERATIONS), *(board.arrived(0, GENERATIONS, who) for who in MEMBERS)}


def a_key_for_each(epoch, generation, known, mine):
    """Decide by a create-only key of the generation, as is safe where no key is ever deleted."""
    return (yield Ask("create", (bell(epoch, generation), mine)))


def by_the_key_for_each(epoch, generation, known):
    while True:
        if (yield Ask("wait", ([bell(epoch, generation)],))) and (
            stands := (yield Ask("get", (bell(epoch, generation),)))
        ):
            yield Ask("set", (newest(epoch), stands))
            return stands


def test_with_a_key_for_each_generation_it_would_go_wrong():
    """What the rules are against, in the same world: a key that was deleted is made, and its generation decided, again,
    or waited for in vain.
    """
    broken = set()
    for seed in range(40):
        agents = cast(ways=(a_key_for_each, by_the_key_for_each))
        try:
            simulate(seed, agents, most=8000)
        except WaitsForEverError:
            broken.add("waits")
        if not decided_once(agents):
            broken.add("decided twice")
        if len(broken) > 1:
            break
    assert broken == {"waits", "decided twice"}


def test_a_real_call_puts_what_is_asked_to_a_store():
    store = MemoryStore()
    store.set(newest(0), FIRST)
    assert board.run(store, propose(0, 1, FIRST, b"1 mine")) == b"1 mine"
    assert board.run(store, propose(0, 1, FIRST, b"1 late")) == b"1 mine"
    assert board.run(store, following(0, 1, FIRST), 0.01) == b"1 mine"
    assert board.run(store, heard(0, board.fault(0, 0), FIRST), 0.01) is None
