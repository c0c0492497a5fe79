"""Backends that are ended by their own `abort`: NCCL above all. Kept apart, for it is proven on GPUs alone.

Rule 1: all groups at the same time: one abort may wait for a kernel that waits for another group (IR-05).
Rule 2: never while a thread is inside `destroy_process_group` (a deadlock: seen); pursuit ends that, by having
        the process replaced where nothing else helps.
Rule 3: what is handed out holds its group: the group must outlive its abort (`behind.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d as c10d

from everstep.inprocess.frames import inside

_SEVERED = ("gloo", "fake", "threaded")
"""Backends that `abort()` does not end; gloo's sockets are severed instead."""


def aborts() -> dict[str, Callable[[], object]]:
    """Return the abort of each backend of each living group that has one of its own; none while rule 2 holds."""
    if _destroying():
        return {}
    found: dict[str, Callable[[], object]] = {}
    names: dict[Any, str] = dict(c10d._world.pg_names)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    for group, name in names.items():
        for backend in _backends(group):
            kind = str(backend.name()).lower()
            if kind not in _SEVERED:
                found[f"{kind} group {name}"] = functools.partial(_abort, group, backend)
    return found


def _backends(group: Any) -> list[Any]:
    """Return the backends of a group, each once; a group that was never used has none."""
    found: dict[int, Any] = {}
    for device in getattr(group, "_device_types", ()):
        try:
            backend = group._get_backend(device)  # noqa: SLF001
        except RuntimeError:
            continue
        found[id(backend)] = backend
    return list(found.values())


def _abort(group: Any, backend: Any) -> None:
    """End one backend. `group` is held for rule 3."""
    del group
    backend.abort()


def _destroying() -> bool:
    """Tell whether a thread is inside `destroy_process_group`."""
    destroy = c10d.destroy_process_group.__code__
    return inside(lambda code: code is destroy)
