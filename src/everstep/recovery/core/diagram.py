"""The tables, drawn: pages of the documentation contain what these functions print, and a test compares.

python scripts/draw_tables.py       # writes them into the pages anew
"""

from collections.abc import Callable, Iterable, Iterator

from everstep.recovery.core import guards, member, world

MERMAID = "stateDiagram-v2\n    [*] --> {start}"


def draw_world() -> str:
    """Return the world's table as a mermaid state diagram: what moves it from phase to phase."""
    arrows = list(_world_arrows())
    return "\n".join([MERMAID.format(start="gathering"), *arrows, "    ended --> [*]"])


def _world_arrows() -> Iterator[str]:
    for phase, row in world.TRANSITIONS.items():
        for event, rules in row.items():
            for rule in rules:
                if rule.then is not None:
                    named = [] if event is world.Settled else [event.__name__]
                    asked = [] if rule.when is guards.always else [_words(rule.when.__name__)]
                    orders = ", ".join(_words(effect.__name__) for effect in rule.do)
                    yield f"    {phase.value} --> {rule.then.value}: {': '.join(named + asked)} / {orders}"


def draw_member(*, actions: bool = False) -> str:
    """Return the member's table as a mermaid diagram, but for the lost link, which leads out from everywhere.

    With `actions` an arrow also says what is done.
    """
    arrows = [
        f"    {phase.value} --> {then.value}: {event.__name__}" + _orders(done if actions else ())
        for phase, row in member.TRANSITIONS.items()
        for event, (then, done) in row.items()
        if event is not member.LinkLost and then is not phase
    ]
    return "\n".join([MERMAID.format(start="fresh"), *arrows, "    left --> [*]"])


def _orders(done: Iterable[member.Action]) -> str:
    words = ", ".join(action.value for action in done)
    return f" / {words}" if words else ""


def tabulate_world() -> str:
    """Return what each phase of the world does with what it hears, as a table."""
    events = sorted({e for row in world.TRANSITIONS.values() for e in row}, key=lambda e: e.__name__)
    rows = [[_title(event), *(_cell(phase, event) for phase in world.Phase)] for event in events]
    return _table(["", *(phase.value for phase in world.Phase)], rows)


def _title(event: type) -> str:
    return "*by itself*" if event is world.Settled else event.__name__


def _cell(phase: world.Phase, event: type) -> str:
    rules = world.TRANSITIONS[phase].get(event)
    if rules is None:
        return "" if event is world.Settled else "**illegal**"
    return "<br>".join(_rule(rule) for rule in rules) or "void"


def _rule(rule: world.Row) -> str:
    orders = ", ".join(_words(effect.__name__) for effect in rule.do)
    asked = "" if rule.when is guards.always else f"*{_words(rule.when.__name__)}*: "
    return asked + orders + (f" → {rule.then.value}" if rule.then else "")


def tabulate_member() -> str:
    """Return what a member does when it hears something, as a table."""
    rows = [
        [phase.value, event.__name__, then.value, ", ".join(action.value for action in actions) or "nothing"]
        for phase, row in member.TRANSITIONS.items()
        if phase is not member.Phase.LEFT
        for event, (then, actions) in row.items()
    ]
    return _table(["in", "hears", "then", "and does"], rows)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


PARTS: dict[str, Callable[[], str]] = {
    "world diagram": lambda: f"```mermaid\n{draw_world()}\n```",
    "world table": tabulate_world,
    "member diagram": lambda: f"```mermaid\n{draw_member()}\n```",
    "member table": tabulate_member,
    "call diagram": lambda: f"```mermaid\n{draw_member(actions=True)}\n```",
}
PAGES = {
    "docs/recovery.md": ("world diagram", "world table", "member diagram", "member table"),
    "docs/inprocess.md": ("call diagram",),
}
"""Which page holds which parts."""


def fill(page: str, names: Iterable[str]) -> str:
    """Return a page of the documentation with its generated parts renewed."""
    for name in names:
        part = PARTS[name]
        start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}\n{part()}\n{end}{after}"
    return page
