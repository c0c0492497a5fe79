"""Backends that are ended by their own `abort`: NCCL above all. Kept apart, for it is proven on GPUs alone.

Rule 1: all groups at the same time: one abort may wait for a kernel that waits for another group (IR-05).
Rule 2: never while the main thread is inside `destroy_process_group` (a deadlock: seen); its own deadline ends that.
"""

import functools
import sys
import threading
from typing import Any

from torch.distributed import distributed_c10d as c10d

from everstep.resources import Ender

_SEVERED = ("gloo", "fake", "threaded")
"""Backends that `abort()` does not end; gloo's sockets are severed instead."""


def enders() -> dict[str, Ender]:
    """Return one ender for each backend of each living group that has an abort of its own."""
    if _destroying():
        return {}
    found: dict[str, Ender] = {}
    names: dict[Any, str] = dict(c10d._world.pg_names)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    for group, name in names.items():
        for backend in _backends(group):
            kind = str(backend.name()).lower()
            if kind not in _SEVERED:
                found[f"{kind} group {name}"] = functools.partial(_abort, backend)
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


def _abort(backend: Any, deadline_s: float) -> None:
    backend.abort()


def _destroying() -> bool:
    """Tell whether the main thread is inside `destroy_process_group`."""
    main = threading.main_thread().ident or 0
    frame = sys._current_frames().get(main)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    code = c10d.destroy_process_group.__code__
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
