"""`torch.save` in the background: `TorchAsyncCheckpoint`, NVRx's name.

    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save(state, "step-100.pt")          returns when the state is copied
    checkpoint.finalize_async_save(blocking=False)       now and then; raises what failed
    checkpoint.close()

The file is what `torch.load` reads. It is written beside its name, fsynced and renamed: until then what had the name is
untouched, and a save that fails leaves it so (W44). Its end holds a checksum of all of it (`archive_file.verify`).
"""

import os
import pickle
from typing import Any

import torch

from everstep.checkpoint.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from everstep.checkpoint.async_ckpt.jobs import WriteArchive


class TorchAsyncCheckpoint:
    """Saves in a worker's process: one for all saves, or (`persistent_queue=False`) one for each.

    Used on one thread. Instances share nothing. Tensors on the host and on devices alike are copied before `async_save`
    returns, into shared memory that serves the next save again; the file holds them as tensors of the host.
    """

    async_fn: WriteArchive | None = None

    def __init__(self, persistent_queue: bool = True) -> None:
        self._async_calls_queue = AsyncCallsQueue(persistent=persistent_queue)

    def save(
        self,
        obj: Any,
        f: Any,
        pickle_module: Any = pickle,
        pickle_protocol: int = 2,
        _use_new_zipfile_serialization: bool = True,
        _disable_byteorder_record: bool = False,
    ) -> None:
        """Save here and now: the file that `async_save` would write, in the same way (CS-40).

        Takes `torch.save`'s arguments; an open file and the old format are left to `torch.save` itself.
        """
        if not isinstance(f, str | os.PathLike) or not _use_new_zipfile_serialization:
            torch.save(
                obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record
            )
            return
        WriteArchive(os.fspath(f), pickle_module, pickle_protocol, not _disable_byteorder_record)(obj)

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """Save in the background; takes `torch.save`'s arguments. Returns when all of `state_dict` is copied.

        Raises TypeError for what is no path and for the old format, MemoryShortage where the copy does not fit, and
        what pickling raises. A failure to write is raised by `finalize_async_save` or `close`.
        """
        self.async_fn = _writer(*args, **kwargs)
        self._async_calls_queue.schedule_async_request(AsyncRequest(self.async_fn, (state_dict,), []))

    def finalize_async_save(self, blocking: bool = False, no_dist: bool = True, terminate: bool = False) -> None:
        """See which saves are done; wait for all with `blocking`, and let the worker go with `terminate`.

        Raises CheckpointError for one that failed: its file is not there, or is what it was before. With
        `no_dist=False` all ranks call it together, and it raises on all of them.
        """
        self._async_calls_queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        if terminate:
            self._async_calls_queue.finish(no_dist=no_dist)

    def close(self, abort: bool = False) -> None:
        """Wait for all saves and let the worker go; with `abort` drop them and end it now. Raises what failed.

        No other rank takes part. It may be used again.
        """
        self._async_calls_queue.finish(no_dist=True, abort=abort)


def _writer(
    f: Any = None,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
) -> WriteArchive:
    """Take the arguments of `torch.save` that follow the object."""
    if not isinstance(f, str | os.PathLike):
        raise TypeError(
            f"async_save needs a path to save to and was given {f!r}: what is written to an object of this process "
            "cannot be written by another. Give a path, or use save()."
        )
    if not _use_new_zipfile_serialization:
        raise TypeError("async_save writes torch's zip format; the one before it is written by save() alone")
    return WriteArchive(os.fspath(f), pickle_module, pickle_protocol, not _disable_byteorder_record)
