"""Checkpoints that never make training wait: `Checkpointer` for a plain loop, and what the other surfaces are made of.

Importing this package is light; torch comes with the first name that needs it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.checkpoint.checkpointer import Checkpointer as Checkpointer
    from everstep.checkpoint.core.retention import Keep as Keep
    from everstep.checkpoint.handles import Fate as Fate
    from everstep.checkpoint.handles import Handle as Handle
    from everstep.checkpoint.restored import Restored as Restored
    from everstep.checkpoint.tier_settings import Local as Local

_NAMES = {
    "Checkpointer": "checkpointer",
    "Fate": "handles",
    "Handle": "handles",
    "Keep": "core.retention",
    "Local": "tier_settings",
    "Restored": "restored",
}
__all__ = ["Checkpointer", "Fate", "Handle", "Keep", "Local", "Restored"]


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
