"""In-process restart under NVRx's names: `Wrapper`, `CallWrapper`, `Compose`, `State`, and the modules of callbacks.

Importing this package is light; torch comes with the first name that needs it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.inprocess.compose import Compose as Compose
    from everstep.inprocess.state import FrozenState as FrozenState
    from everstep.inprocess.state import Mode as Mode
    from everstep.inprocess.state import State as State
    from everstep.inprocess.wrap import CallWrapper as CallWrapper
    from everstep.inprocess.wrap import Wrapper as Wrapper

_NAMES = {
    "Compose": "compose",
    "FrozenState": "state",
    "Mode": "state",
    "State": "state",
    "CallWrapper": "wrap",
    "Wrapper": "wrap",
}
_MODULES = frozenset(
    (
        "abort",
        "attribution",
        "completion",
        "compose",
        "exception",
        "finalize",
        "health_check",
        "initialize",
        "monitor_thread",
        "nested_restarter",
        "progress_watchdog",
        "rank_assignment",
        "rank_filter",
        "state",
        "store",
        "terminate",
        "tools",
        "wrap",
    )
)
__all__ = ["CallWrapper", "Compose", "FrozenState", "Mode", "State", "Wrapper"]


def __getattr__(name: str) -> object:
    """Load a public name, or a module of this package, at its first use."""
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    """The public names, and the modules of callbacks."""
    return sorted({*globals(), *_NAMES, *_MODULES})
