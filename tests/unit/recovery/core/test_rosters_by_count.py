"""Why rosters close over identities (EXPERIMENTS E13, E14): the same timings, closed by counts and by the real table.

Four workers come back after a fault. One dies around its arrival, before it, after it or not at all; now and then the
reply to an arrival is lost and it is sent again; half of the time a spare announces itself meanwhile. A count cannot
tell who it counted. The table cannot be told wrong, and never leaves a living worker out.
"""

import random
from dataclasses import dataclass

import pytest

from everstep.recovery.core.words import (
    Announced,
    Arrived,
    Died,
    Facts,
    Fault,
    Faulted,
    Incarnation,
    Policy,
    Publish,
    Published,
    Ticked,
)
from everstep.recovery.core.world import begin, step

RANKS = 4
WORKERS = [Incarnation("boot", number, 0) for number in range(RANKS)]
SPARE = Incarnation("boot", RANKS, 0)


@dataclass(frozen=True)
class News:
    """One message, and what a barrier that counts would make of it."""

    at: float
    what: str  # arrival | death | spare
    who: Incarnation


def timing(seed: int) -> list[News]:
    """Draw what happens, in the order in which it is heard."""
    rng = random.Random(seed)
    news = [News(rng.uniform(0, 10), "arrival", worker) for worker in WORKERS]
    victim = rng.choice(news)
    death = victim.at + rng.uniform(-5, 5)
    if death < victim.at:
        news.remove(victim)
    news.append(News(death, "death", victim.who))
    news += [News(n.at + rng.uniform(0, 1), n.what, n.who) for n in news if n.what == "arrival" and rng.random() < 0.05]
    if rng.random() < 0.5:
        news.append(News(rng.uniform(-5, 10), "spare", SPARE))
    return sorted(news, key=lambda n: n.at)


def closed_by_count(news: list[News]) -> tuple[set[Incarnation], set[Incarnation]]:
    """Return who had arrived, and who was dead, when as many things were counted as there are ranks."""
    arrived: set[Incarnation] = set()
    dead: set[Incarnation] = set()
    for counted, one in enumerate(news, 1):
        (dead if one.what == "death" else arrived).add(one.who)  # an agent arrives for its dead
        if counted == RANKS:
            break
    return arrived, dead


def closed_by_table(news: list[News]) -> tuple[set[Incarnation], set[Incarnation], set[Incarnation]]:
    """Return the members of the next roster, and who was known to be dead then and now."""
    world = begin("a", Policy(RANKS))
    start = [Ticked(), *(Announced(w, Facts("a", w.pid, fresh=True)) for w in WORKERS)]
    for event in start:
        world, commands = step(world, event, 0.0)
    world, _ = step(world, Published(commands[-1].roster), 0.0)
    world, _ = step(world, Faulted(Fault(0, "stall", "page")), 0.0)
    dead: set[Incarnation] = set()
    events = [_event(one) for one in news]
    later = [Incarnation("boot", 100, 0), Incarnation("boot", 101, 0)]  # what is asked for comes after all else
    events += [Announced(process, Facts("a", process.pid, fresh=True)) for process in later]
    for event in events:
        if isinstance(event, Died):
            dead.add(event.incarnation)
        world, commands = step(world, event, 0.0)
        for command in commands:
            if isinstance(command, Publish):
                return {m.incarnation for m in command.roster.members}, dead, {n.who for n in news if n.what == "death"}
    raise AssertionError("no roster")


def _event(one: News):
    facts = Facts("a", one.who.pid, fresh=one.what == "spare")
    match one.what:
        case "arrival":
            return Arrived(1, one.who, facts)
        case "death":
            return Died(one.who, -9)
        case _:
            return Announced(one.who, facts)


def test_a_count_leaves_healthy_workers_out():
    wrong = 0
    for seed in range(1000):
        news = timing(seed)
        arrived, _ = closed_by_count(news)
        healthy = {n.who for n in news if n.what == "arrival"} - {n.who for n in news if n.what == "death"}
        wrong += not healthy <= arrived
    assert wrong / 1000 > 0.25


PARTS = [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 66))]  # 20,000 in all, as E14


@pytest.mark.parametrize("part", PARTS)
def test_identities_never_do(part):
    for seed in range(300 * part, 300 * (part + 1)):
        members, known_dead, ever_dead = closed_by_table(timing(seed))
        assert set(WORKERS) - ever_dead <= members, f"seed {seed}: a healthy worker is left out"
        assert not members & known_dead, f"seed {seed}: somebody known to be dead is listed"
