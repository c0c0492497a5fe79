"""Everstep keeps PyTorch training stepping through faults.

Importing this package is light: no torch, no thread, no handler, no socket. The native surface is handed on lazily, and
so are the packages that users reach by name (`everstep.checkpoint`, `everstep.inprocess`, `everstep.data`).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep import checkpoint as checkpoint
    from everstep import data as data
    from everstep import inprocess as inprocess
    from everstep.training import Run as Run
    from everstep.training import resilient as resilient

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "checkpoint", "data", "inprocess", "resilient"]


def __getattr__(name: str) -> object:
    """Load the native surface, and with it torch, at the first use of one of its names."""
    if name in ("checkpoint", "data", "inprocess"):
        return importlib.import_module(f"everstep.{name}")
    if name in ("Run", "resilient"):
        from everstep import training  # noqa: PLC0415 - the lazy door that keeps `import everstep` light

        return getattr(training, name)
    raise AttributeError(f"module 'everstep' has no attribute {name!r}; it offers {', '.join(__all__)}")
