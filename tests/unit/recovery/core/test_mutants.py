"""Every way in which one cell of a table can be wrong must be found out by the simulated world.

A mutant is one cell of a table lost, redirected to another phase, its guard stuck, or one of its effects left out. The
seeds below are those, of several thousand tried, that between them tell every mutant from the real table; each mutant
meets only seeds that come to its cell. When a table changes, `python tests/unit/recovery/core/test_mutants.py` looks
for seeds anew.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from everstep.recovery.core import guards, member, world
from everstep.testing.world import Setting, SimulatedWorld
from everstep.testing.world import world as simulation

SEEDS = (
    123, 311, 399, 513, 640, 842, 846, 897, 947, 1082, 1097, 1210, 1218, 1239, 1488, 1502, 1552, 2017, 2088, 2202,
    2297, 2484, 2514, 3059, 3113, 3701, 3784, 3856, 4049, 4384, 4474, 5012, 5054, 5115, 5124, 5134, 5486, 5669, 5681,
    5818, 5831, 5919,
)  # fmt: skip
SHRINKING = (149, 165)  # of worlds that may shrink
WORLD, MEMBER = world.TRANSITIONS, member.TRANSITIONS
Cell = tuple[str, ...]

# What cannot be told apart, since the two phases do the same with what is then known.
SAME = {
    "running × Faulted [always] to draining": "both leave for a fault in the same way",
    "draining × Faulted [always] to running": "both leave for a fault in the same way",
    "running × Wedged [member] to draining": "both leave for a fault in the same way",
    "draining × Wedged [member] to running": "both leave for a fault in the same way",
    "running × Settled [succeeded] to publishing": "the next roster is known: both act on it at once",
    "draining × Settled [succeeded] to publishing": "the next roster is known: both act on it at once",
}


@dataclass(frozen=True)
class Mutant:
    """A table with one thing wrong, and what a run must come to for the difference to show."""

    name: str
    cell: Cell
    table: Any


def of_world() -> Iterator[Mutant]:
    for phase, row in WORLD.items():
        for event, rules in row.items():
            cell = ("world", phase.value, event.__name__)
            yield Mutant(f"{phase.value} × {event.__name__} lost", cell, _put(WORLD, phase, event, None))
            for at, rule in enumerate(rules):
                for what, other in _wrong(phase, rule):
                    reached = cell if what == "always" else (*cell, str(at))
                    table = _put(WORLD, phase, event, (*rules[:at], *other, *rules[at + 1 :]))
                    yield Mutant(f"{phase.value} × {event.__name__} [{rule.when.__name__}] {what}", reached, table)


def _wrong(here: world.Phase, rule: world.Row) -> Iterator[tuple[str, tuple[world.Row, ...]]]:
    yield "never", ()
    if rule.when is not guards.always:
        yield "always", (replace(rule, when=guards.always),)
    for at, effect in enumerate(rule.do):
        yield f"without {effect.__name__}", (replace(rule, do=rule.do[:at] + rule.do[at + 1 :]),)
    for phase in world.Phase:
        if phase is not (rule.then or here):
            yield f"to {phase.value}", (replace(rule, then=phase),)


def of_member() -> Iterator[Mutant]:
    for phase, row in MEMBER.items():
        for event, (then, actions) in row.items():
            cell = ("member", phase.value, event.__name__)
            yield Mutant(f"{phase.value} × {event.__name__} lost", cell, _put(MEMBER, phase, event, None))
            for other in member.Phase:
                if other is not then:
                    table = _put(MEMBER, phase, event, (other, actions))
                    yield Mutant(f"{phase.value} × {event.__name__} to {other.value}", cell, table)
            for at, action in enumerate(actions):
                table = _put(MEMBER, phase, event, (then, actions[:at] + actions[at + 1 :]))
                yield Mutant(f"{phase.value} × {event.__name__} without {action.value}", cell, table)


def _put(table: Any, phase: Any, event: Any, cell: Any) -> Any:
    row = {e: c for e, c in table[phase].items() if e is not event}
    return {**table, phase: row if cell is None else {**row, event: cell}}


class Seen(set[Cell]):
    """Notes every cell that a run comes to."""

    def tables(self) -> tuple[Any, Any]:
        """Return both tables, each with a spy in every cell."""
        worlds = {
            p: Spied(self, ("world", p.value), {e: self._rules(p, e, rules) for e, rules in row.items()})
            for p, row in WORLD.items()
        }
        return worlds, {p: Spied(self, ("member", p.value), row) for p, row in MEMBER.items()}

    def _rules(self, phase: world.Phase, event: type, rules: tuple[world.Row, ...]) -> tuple[world.Row, ...]:
        def spied(at: int, rule: world.Row) -> world.Row:
            def when(view: Any, heard: Any, now: float) -> bool:
                holds = rule.when(view, heard, now)
                if holds:
                    self.add(("world", phase.value, event.__name__, str(at)))
                return holds

            return replace(rule, when=when)

        return tuple(spied(at, rule) for at, rule in enumerate(rules))


class Spied(dict[Any, Any]):
    """A row of a table that notes what is looked up in it."""

    def __init__(self, seen: Seen, name: Cell, row: Any) -> None:
        super().__init__(row)
        self.seen, self.name = seen, name

    def __getitem__(self, event: type) -> Any:
        self.seen.add((*self.name, event.__name__))
        return super().__getitem__(event)

    def get(self, event: type, default: Any = None) -> Any:
        self.seen.add((*self.name, event.__name__))
        return super().get(event, default)


def settings_by_cell(settings: Iterable[Setting]) -> dict[Cell, list[Setting]]:
    """Run every setting once; return which come to which cell, cheap ones first."""
    came: dict[Cell, list[tuple[int, int, Setting]]] = defaultdict(list)
    for number, setting in enumerate(settings):
        seen = Seen()
        world.TRANSITIONS, member.TRANSITIONS = seen.tables()
        run = SimulatedWorld(setting)
        run.run()
        for cell in seen:
            came[cell].append((run.moves, number, setting))
    world.TRANSITIONS, member.TRANSITIONS = WORLD, MEMBER
    return {cell: [setting for _, _, setting in sorted(costs)] for cell, costs in came.items()}


def killer(mutant: Mutant, settings: Iterable[Setting]) -> Setting | None:
    """Return the first setting under which the mutant is found out."""
    of = world if mutant.cell[0] == "world" else member
    real, of.TRANSITIONS = of.TRANSITIONS, mutant.table
    try:
        for setting in settings:
            try:
                SimulatedWorld(setting).run()
            except Exception:  # noqa: BLE001  # whatever gives it away
                return setting
        return None
    finally:
        of.TRANSITIONS = real


@pytest.fixture(scope="module")
def came():
    return settings_by_cell([*map(Setting.drawn, SEEDS), *map(Setting.shrinking, SHRINKING)])


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A mutant that goes round in circles is found out sooner."""
    monkeypatch.setattr(simulation, "MOST_MOVES", 20_000)


@pytest.mark.parametrize(
    "cells", [*(f"world {p.value}" for p in world.Phase), *(f"member {p.value}" for p in member.Phase)]
)
def test_every_mutant_dies(cells, came):
    mutants = [m for m in (*of_world(), *of_member()) if f"{m.cell[0]} {m.cell[1]}" == cells and m.name not in SAME]
    living = [m.name for m in mutants if killer(m, came.get(m.cell, ())) is None]
    assert not living, f"{len(living)} of {len(mutants)} mutants live: {living}"


def test_what_is_said_to_be_the_same_is_a_mutant():
    assert set(SAME) <= {m.name for m in of_world()}


def look_for_seeds(most: int) -> None:
    """Print seeds that kill all mutants, and the mutants that none of `most` seeds kills."""
    simulation.MOST_MOVES = 20_000
    came = settings_by_cell(draw(seed) for draw in (Setting.drawn, Setting.shrinking) for seed in range(most))
    chosen: list[Setting] = []
    different = (m for m in (*of_member(), *of_world()) if m.name not in SAME)
    for mutant in sorted(different, key=lambda m: len(came.get(m.cell, ()))):
        there = came.get(mutant.cell, [])
        kill = killer(mutant, [s for s in chosen if s in there] + there)
        if kill is None:
            print("lives:", mutant.name, f"({len(there)} seeds come to its cell)", flush=True)
        elif kill not in chosen:
            chosen.append(kill)
    for shrinking in (False, True):
        print(sorted(s.seed for s in chosen if (s.policy.min_world_size is not None) is shrinking))


if __name__ == "__main__":
    look_for_seeds(6000)
