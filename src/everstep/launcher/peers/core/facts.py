"""The world machine's events as they travel between peers: one JSON object each, and back.

Rule 1: whatever is read may come from anybody who reaches the port: what is not a fact of ours raises ValueError.
Rule 2: what rides on a fact (`RIDING`: a store's address, a companion's words) is not of it.
Rule 3: `Ticked` and `Drained` are each watcher's own and do not travel.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from everstep.recovery.core import words
from everstep.recovery.core.words import Incarnation

Body = dict[str, Any]
RIDING = ("store", "told")
_KINDS: Mapping[str, Callable[..., words.Event]] = {
    kind.__name__: kind
    for kind in (
        words.Announced,
        words.Arrived,
        words.Died,
        words.Faulted,
        words.Completed,
        words.Published,
        words.Wedged,
        words.EndRequested,
    )
}


def encode(event: words.Event) -> Body:
    """Return what `decode` reads."""
    name = type(event).__name__
    if name not in _KINDS:
        raise ValueError(f"{event!r} does not travel: it is each watcher's own")
    return {"is": name} | {field.name: _plain(getattr(event, field.name)) for field in fields(event)}


def decode(body: Mapping[str, Any]) -> words.Event:
    """Read what `encode` wrote. Raises ValueError for anything else."""
    try:
        told = {name: _READERS.get(name, _same)(value) for name, value in body.items() if name not in ("is", *RIDING)}
        return _KINDS[body["is"]](**told)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a fact of peers: {str(body)[:200]} ({error!r})") from None


def _plain(value: object) -> object:
    match value:
        case Incarnation():
            return str(value)
        case words.Roster():
            return value.to_json()
        case words.Facts():
            return asdict(value)
        case tuple():
            told: tuple[tuple[Incarnation, words.Facts], ...] = value
            return [[str(who), asdict(brought)] for who, brought in told]
        case words.Fault():
            return asdict(value) | {"incarnation": None if value.incarnation is None else str(value.incarnation)}
        case _:
            return value


def _same(value: Any) -> Any:
    return value


def _facts(told: Mapping[str, Any]) -> words.Facts:
    read: Body = {**told, "dirt": tuple(told["dirt"])}
    return words.Facts(**read)


def _others(told: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[tuple[Incarnation, words.Facts], ...]:
    return tuple((Incarnation.parse(who), _facts(brought)) for who, brought in told)


def _fault(told: Mapping[str, Any]) -> words.Fault:
    who = told["incarnation"]
    read: Body = {**told, "incarnation": None if who is None else Incarnation.parse(who)}
    return words.Fault(**read)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "incarnation": Incarnation.parse,
    "facts": _facts,
    "others": _others,
    "fault": _fault,
    "roster": words.Roster.from_json,
}
