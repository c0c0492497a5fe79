"""Every way in which one cell of a table can be wrong: lost, redirected, its guard stuck, an effect left out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from everstep.recovery.core import guards, member, world

Table = Mapping[Any, Mapping[Any, Any]]


def of_world() -> Iterator[tuple[str, Table]]:
    """Yield each mutant of the world's table, with its name."""
    table = world.TRANSITIONS  # whoever takes the mutants one by one puts each in its place
    for phase, row in table.items():
        for event, rules in row.items():
            cell = f"{phase.value} × {event.__name__}"
            yield f"{cell}: lost", _without(table, phase, event)
            for at, rule in enumerate(rules):
                for what, other in _rules(phase, rule):
                    mutant = (*rules[:at], *other, *rules[at + 1 :])
                    yield f"{cell} [{rule.when.__name__}]: {what}", _with(table, phase, event, mutant)


def _rules(here: world.Phase, rule: world.Row) -> Iterator[tuple[str, tuple[world.Row, ...]]]:
    yield "never", ()
    if rule.when is not guards.always:
        yield "always", (replace(rule, when=guards.always),)
    for at, effect in enumerate(rule.do):
        yield f"without {effect.__name__}", (replace(rule, do=rule.do[:at] + rule.do[at + 1 :]),)
    for phase in world.Phase:
        if phase is not (rule.then or here):
            yield f"to {phase.value}", (replace(rule, then=phase),)


def of_member() -> Iterator[tuple[str, Table]]:
    """Yield each mutant of the member's table, with its name."""
    table = member.TRANSITIONS  # whoever takes the mutants one by one puts each in its place
    for phase, row in table.items():
        for event, (then, actions) in row.items():
            cell = f"{phase.value} × {event.__name__}"
            yield f"{cell}: lost", _without(table, phase, event)
            for other in member.Phase:
                if other is not then:
                    yield f"{cell}: to {other.value}", _with(table, phase, event, (other, actions))
            for at, action in enumerate(actions):
                fewer = (then, actions[:at] + actions[at + 1 :])
                yield f"{cell}: without {action.value}", _with(table, phase, event, fewer)


def _without(table: Table, phase: Any, event: Any) -> Table:
    return {**table, phase: {e: cell for e, cell in table[phase].items() if e is not event}}


def _with(table: Table, phase: Any, event: Any, cell: Any) -> Table:
    return {**table, phase: {**table[phase], event: cell}}
