"""Checkpoints that never make training wait: `Checkpointer` for a plain loop, and what the other surfaces are made of.

NVRx's names stand in its submodules (`async_ckpt.core`, `local.ckpt_managers.local_manager`, …) and here too.
Importing this package is light; torch comes with the first name that needs it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.checkpoint.async_ckpt.core import AsyncCallsQueue as AsyncCallsQueue
    from everstep.checkpoint.async_ckpt.core import AsyncRequest as AsyncRequest
    from everstep.checkpoint.async_ckpt.filesystem_async import FileSystemWriterAsync as FileSystemWriterAsync
    from everstep.checkpoint.async_ckpt.state_dict_saver import (
        save_state_dict_async_finalize as save_state_dict_async_finalize,
    )
    from everstep.checkpoint.async_ckpt.state_dict_saver import save_state_dict_async_plan as save_state_dict_async_plan
    from everstep.checkpoint.async_ckpt.torch_ckpt import TorchAsyncCheckpoint as TorchAsyncCheckpoint
    from everstep.checkpoint.checkpointer import Checkpointer as Checkpointer
    from everstep.checkpoint.core.retention import Keep as Keep
    from everstep.checkpoint.handles import Fate as Fate
    from everstep.checkpoint.handles import Handle as Handle
    from everstep.checkpoint.local.basic_state_dict import BasicTensorAwareStateDict as BasicTensorAwareStateDict
    from everstep.checkpoint.local.ckpt_managers.local_manager import LocalCheckpointManager as LocalCheckpointManager
    from everstep.checkpoint.local.replication.strategies import CliqueReplicationStrategy as CliqueReplicationStrategy
    from everstep.checkpoint.local.replication.strategies import (
        LazyCliqueReplicationStrategy as LazyCliqueReplicationStrategy,
    )
    from everstep.checkpoint.restored import Restored as Restored
    from everstep.checkpoint.tier_settings import Local as Local

_NAMES = {
    "AsyncCallsQueue": "async_ckpt.core",
    "AsyncRequest": "async_ckpt.core",
    "BasicTensorAwareStateDict": "local.basic_state_dict",
    "Checkpointer": "checkpointer",
    "CliqueReplicationStrategy": "local.replication.strategies",
    "Fate": "handles",
    "FileSystemWriterAsync": "async_ckpt.filesystem_async",
    "Handle": "handles",
    "Keep": "core.retention",
    "LazyCliqueReplicationStrategy": "local.replication.strategies",
    "Local": "tier_settings",
    "LocalCheckpointManager": "local.ckpt_managers.local_manager",
    "Restored": "restored",
    "TorchAsyncCheckpoint": "async_ckpt.torch_ckpt",
    "save_state_dict_async_finalize": "async_ckpt.state_dict_saver",
    "save_state_dict_async_plan": "async_ckpt.state_dict_saver",
}
__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "BasicTensorAwareStateDict",
    "Checkpointer",
    "CliqueReplicationStrategy",
    "Fate",
    "FileSystemWriterAsync",
    "Handle",
    "Keep",
    "LazyCliqueReplicationStrategy",
    "Local",
    "LocalCheckpointManager",
    "Restored",
    "TorchAsyncCheckpoint",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
