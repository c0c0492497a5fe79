"""`Compose`: several callbacks as one, the last listed runs first, as functions compose.

Rule 1: the class of the result is the lowest common ancestor of its members' classes, so that it passes wherever one
        of them passes (`isinstance(Compose(A(), B()), Abort)`).
Rule 2: it pickles as its members do: the classes are made on demand, and found again by their members.
Rule 3: a member that returns nothing is warned about, and what it was given goes on to the next.
"""

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def find_common_ancestor(*instances: object) -> type:
    """Return the most special class that all `instances` are of; `object` where they share nothing."""
    first, *rest = (type(one).__mro__ for one in instances)
    return next((kind for kind in first if all(kind in others for others in rest)), object)


class Compose:
    """Callbacks in one; call it as you would call each of them."""

    instances: tuple[Callable[[Any], Any], ...]

    def __new__(cls, *instances: Callable[[T], T]) -> "Compose":
        """Choose the class by rule 1."""
        return object.__new__(_composed(find_common_ancestor(*instances)) if instances else cls)

    def __init__(self, *instances: Callable[[T], T]) -> None:
        self.instances = instances

    def __call__(self, *args: Any) -> Any:
        """Hand the arguments to the last member, its answer to the one before it, and so on; return the last answer."""
        for instance in reversed(self.instances):
            answer = instance(*args)
            if answer is None:
                warnings.warn(f"{instance!r} returned None inside Compose: return what it was given", stacklevel=2)
            else:
                args = (answer,)
        return args[0] if args else None

    def __reduce__(self) -> tuple[type["Compose"], tuple[Callable[[Any], Any], ...]]:
        """Rule 2."""
        return Compose, self.instances

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"


@functools.cache
def _composed(ancestor: type) -> type[Compose]:
    if ancestor is object:
        return Compose
    bases = (Compose,) if issubclass(ancestor, Compose) else (Compose, ancestor)
    try:
        return types.new_class("DynamicCompose", bases)
    except TypeError:  # functions, builtins: classes that cannot be derived from
        return Compose
