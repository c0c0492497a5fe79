"""Where a function wants its `CallWrapper`: parameters annotated with it, however the annotation is written.

Rule 1: `CallWrapper`, `Optional[CallWrapper]`, `CallWrapper | None`, the same as text or under postponed annotations;
        in functions, methods, partials, objects with `__call__`, and what `functools.wraps` made of them (IR-02).
Rule 2: a value that the caller gives wins. A callable that has no place for one gets none.
"""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any


def wanted(function: Callable[..., Any], kind: type) -> tuple[str, ...]:
    """Return the parameters of `function` that are annotated with `kind`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return ()
    hints, given = _hints(function), _given(function)
    return tuple(n for n, p in parameters.items() if n not in given and _is(hints.get(n, p.annotation), kind))


def fill(
    function: Callable[..., Any], names: tuple[str, ...], value: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `value` for each of `names` that the caller has not given."""
    missing = [name for name in names if name not in kwargs]
    if not missing:
        return args, kwargs
    signature = inspect.signature(function)
    rest = signature.replace(parameters=[p for n, p in signature.parameters.items() if n not in missing])
    try:
        bound = rest.bind(*args, **kwargs)
    except TypeError:  # one of them is given by its position: rule 2
        bound = signature.bind_partial(*args, **kwargs)
        return args, kwargs | {name: value for name in missing if name not in bound.arguments}
    full = inspect.BoundArguments(signature, _ordered(signature, bound.arguments, dict.fromkeys(missing, value)))
    return full.args, full.kwargs


def _ordered(signature: inspect.Signature, given: Mapping[str, Any], added: Mapping[str, Any]) -> "dict[str, Any]":
    together = {**given, **added}
    return {name: together[name] for name in signature.parameters if name in together}


def _hints(function: Any) -> dict[str, Any]:
    """Resolve annotations; where one cannot be, those that can be, and the text of the others."""
    target = _target(function)
    try:
        return typing.get_type_hints(target)
    except Exception:  # noqa: BLE001 - a name that exists only for type checkers, or anything a user's text may raise
        return dict(getattr(target, "__annotations__", {}))


def _given(function: Any) -> set[str]:
    """Return what partials have been given by name: rule 2."""
    names: set[str] = set()
    while isinstance(function, functools.partial):
        names.update(function.keywords)
        function = function.func
    return names


def _target(function: Any) -> Any:
    """Return the function whose annotations count."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if inspect.isfunction(function) or inspect.ismethod(function) or inspect.isbuiltin(function):
        return function
    return type(function).__call__ if not inspect.isclass(function) else function.__init__


def _is(annotation: Any, kind: type) -> bool:
    """Tell whether an annotation is `kind`, or that or None."""
    if isinstance(annotation, str):
        annotation = annotation.strip("'\" ")  # text under postponed annotations is text twice over
        pattern = rf"(?:[\w.]*\.)?{kind.__name__}"
        return bool(
            re.fullmatch(
                rf"\s*(?:[\w.]*Optional\[\s*{pattern}\s*\]|(?:None\s*\|\s*)?{pattern}(?:\s*\|\s*None)?)\s*", annotation
            )
        )
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set(typing.get_args(annotation)) == {kind, type(None)}
    return annotation is kind
