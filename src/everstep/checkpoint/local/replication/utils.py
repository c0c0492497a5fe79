"""A helper under NVRx's name."""

from collections.abc import Iterable, Iterator
from typing import Any


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Return tuples of the arguments' items. Raises ValueError with the lengths where these differ."""
    rows = [list(one) for one in args]
    lengths = [len(row) for row in rows]
    if len(set(lengths)) > 1:
        raise ValueError(f"rows of different lengths cannot be zipped: {lengths}")
    return zip(*rows, strict=True)
