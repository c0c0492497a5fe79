"""DCP in the background under NVRx's names: `FileSystemWriterAsync`.

    writer, metadata, wrapper = save_state_dict_async_plan(state, FileSystemWriterAsync(path), …)
    fn, preload_fn, args = writer.get_save_function_and_args()
    finalize = partial(save_state_dict_async_finalize, writer, metadata, wrapper)
    queue.schedule_async_request(AsyncRequest(fn, args, [finalize], preload_fn=preload_fn))

Files are written into a folder of this rank's own beside `path`, and become the checkpoint `path` in the finalize
function: the format, the checksums and the commit are those of `everstep.checkpoint.dcp_storage`. What was written is
told from process to process by a file in that folder; there is no Manager and no queue (W51, W53). All buckets are
written at the same time (W45).
"""

import dataclasses
import json
import os
import queue
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StoragePrefix  # pyright: ignore[reportPrivateUsage] - DCP's own plans hold it
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from everstep.checkpoint.core.manifest import FileFact
from everstep.checkpoint.dcp_files import Item, Written, write_file
from everstep.checkpoint.dcp_storage import FileSystemWriter, item_of, result_of, split
from everstep.checkpoint.fileops import PosixFiles, put
from everstep.errors import CheckpointError, ConfigurationError, UsageError

Contents = tuple[list[tuple[WriteItem, Any]], list[tuple[WriteItem, Tensor]]]
WriteBucket = tuple[str, str, Contents]
"""Path and name of one file; the values and the tensors that go into it."""
RESULTS = ".results"


class WorkerFailure(CheckpointError, RuntimeError):
    """What should have been written has not been."""


@dataclasses.dataclass(frozen=True)
class ConsistentDataIdentifier:
    """Names data that stays the same from save to save."""

    key: str


class Results:
    """Where a worker says what it has written: a file of JSON in the folder that it writes to. Picklable."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def put(self, written: Sequence[Sequence[Written]]) -> None:
        """Say it, durably; once."""
        told = [[dataclasses.asdict(one) for one in bucket] for bucket in written]
        put(PosixFiles(), os.path.join(self.folder, RESULTS), json.dumps(told).encode())

    def get_nowait(self) -> list[list[Written]]:
        """Return what was said. Raises `queue.Empty` where nothing was yet."""
        try:
            with open(os.path.join(self.folder, RESULTS), "rb") as file:
                told = json.loads(file.read())
        except FileNotFoundError as error:
            raise queue.Empty from error
        return [[_written(one) for one in bucket] for bucket in told]


def _written(told: dict[str, Any]) -> Written:
    known: dict[str, Any] = told | {"sizes": tuple(told["sizes"]), "fact": FileFact(**told["fact"])}
    return Written(**known)


class FileSystemWriterAsync(FileSystemWriter):
    """Plans a save, hands out the function that writes, and publishes what it has written. One for each save.

    Takes the arguments of torch's `FileSystemWriter`; `thread_count` files are written at the same time. With
    `separation_hint` tensors whose names begin so go into files of their own. `is_multiproc_io` and the two caches of
    HEAD are accepted and change nothing: one worker with threads writes, and its memory is used again anyway.
    Raises ConfigurationError for `use_msc=True`: there is no Multi-Storage Client here.
    """

    def __init__(
        self, path: str | os.PathLike[str], *args: Any, separation_hint: str | None = None, use_msc: bool = False,
        is_multiproc_io: bool = False, use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        kwargs.pop("open_file", None)
        if use_msc:
            raise ConfigurationError("use_msc=True: the Multi-Storage Client is not supported; give a mounted path")
        super().__init__(path, *args, **kwargs)
        if not self.single_file_per_rank:
            raise NotImplementedError("FileSystemWriterAsync writes a file for each thread: single_file_per_rank=True")
        if separation_hint and self.thread_count < 2:  # noqa: PLR2004 - one bucket for each side of the hint
            raise UsageError(
                f"separation_hint={separation_hint!r} needs thread_count >= 2, and it is {self.thread_count}"
            )
        self.checkpoint_dir = path
        self.use_msc, self.is_multiproc_io = use_msc, is_multiproc_io
        self.use_cached_data_structure = use_cached_data_structure
        self.use_cpu_shm_for_gpu_tensors = use_cpu_shm_for_gpu_tensors
        self.can_run_decentralized_global_plan = True
        self.write_buckets: list[WriteBucket] | None = None
        self.results_queue: Results | None = None
        self.separation_hint = separation_hint

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Say what goes into which file of this rank; nothing is copied and nothing written yet."""
        named = [(name, items) for name, items in self.buckets(plan) if items]
        folder = self.begin().folder if named else ""
        self.write_buckets = [
            (os.path.join(folder, name), name, _contents(items, planner)) for name, items in named
        ]  # fmt: skip
        self.results_queue = Results(folder) if named else None

    def buckets(self, plan: SavePlan) -> list[tuple[str, list[WriteItem]]]:
        """See `FileSystemWriter.buckets`; with a hint, half of the files are of what it names."""
        if not self.separation_hint:
            return super().buckets(plan)
        hint, prefix = self.separation_hint, plan.storage_data.prefix
        apart = [item for item in plan.items if item.index.fqn.startswith(hint)]
        rest = [item for item in plan.items if not item.index.fqn.startswith(hint)]
        found: list[tuple[str, list[WriteItem]]] = []
        for lead, items in (("", rest), (re.sub(r"\W", "_", hint), apart)):
            for bucket in split(items, self.thread_count // 2):
                found.append((f"{lead}{prefix}{len(found)}.distcp", bucket))
        return found

    def get_save_function_and_args(self) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None, Any]:
        """Return what writes, what brings tensors to the host, and the arguments of the first.

        (None, None, ()) where this rank has nothing to write. The second argument is what the second function's result
        replaces; a queue of ours copies tensors itself, on the host too, before it returns.
        """
        if not self.write_buckets:
            return None, None, ()
        rank = dist.get_rank() if dist.is_initialized() else 0
        return (
            partial(self.write_preloaded_data_multithread, [self.transforms], self.use_msc),
            partial(self.preload_tensors, self.write_buckets, True),
            [rank, self.write_buckets, self.results_queue],
        )

    @staticmethod
    def preload_tensors(write_buckets: list[WriteBucket], non_blocking: bool = True) -> list[WriteBucket]:
        """Return the buckets with their tensors on the host, when they have arrived there."""
        moved = [
            (path, name, (values, [(item, tensor.to("cpu", non_blocking=non_blocking)) for item, tensor in tensors]))
            for path, name, (values, tensors) in write_buckets
        ]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return moved

    @staticmethod
    def write_preloaded_data_multithread(
        transform_list: list[Any], use_msc: bool, rank: int, write_buckets: list[WriteBucket],
        global_results_queue: Results,
    ) -> None:  # fmt: skip
        """Write all buckets at the same time; say what was written where when all of it is durable.

        Raises what a write raises; then nothing is said, and nothing can be finalized.
        """
        del transform_list, use_msc, rank
        with ThreadPoolExecutor(max(1, len(write_buckets))) as pool:
            global_results_queue.put(list(pool.map(_write, write_buckets)))

    @staticmethod
    def write_preloaded_data_multiproc(
        transform_list: list[Any], use_msc: bool, rank: int, write_buckets: list[WriteBucket],
        global_results_queue: Results,
    ) -> None:  # fmt: skip
        """The same: processes of their own would be forks."""
        FileSystemWriterAsync.write_preloaded_data_multithread(
            transform_list, use_msc, rank, write_buckets, global_results_queue
        )

    @staticmethod
    def write_preloaded_data(
        transform_list: list[Any], local_proc_idx: int, write_bucket: WriteBucket, results_queue: Any,
        count_queue: Any, use_fsync: bool, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Write one bucket; put its number and its results, or what was raised, into `results_queue`."""
        del transform_list, use_fsync, kwargs
        try:
            values, tensors = write_bucket[2]
            written = _write(write_bucket)
            told: Any = [result_of(item, at) for (item, _), at in zip([*values, *tensors], written, strict=True)]
        except Exception as error:  # noqa: BLE001 - it is handed to whoever collects
            told = error
        results_queue.put((local_proc_idx, told))
        count_queue.get()
        count_queue.task_done()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Not for `dcp.save`: that is `everstep.checkpoint.dcp_storage.FileSystemWriter`."""
        raise NotImplementedError(
            "FileSystemWriterAsync writes through get_save_function_and_args; for dcp.save and dcp.async_save give "
            "everstep.checkpoint.dcp_storage.FileSystemWriter"
        )

    def retrieve_write_results(self) -> list[WriteResult]:
        """Return what the worker has written. Raises WorkerFailure (a RuntimeError) where it has not."""
        if self.write_buckets is None:
            raise WorkerFailure("nothing was planned: call save_state_dict_async_plan first")
        if self.results_queue is None:
            return []
        try:
            written = self.results_queue.get_nowait()
        except queue.Empty as error:
            raise WorkerFailure(
                f"what was to be written for {self.checkpoint_dir} was not: its worker has said nothing of it"
            ) from error
        self.files.unlink(os.path.join(self.results_queue.folder, RESULTS))
        items = [[item for part in bucket[2] for item, _ in part] for bucket in self.write_buckets]
        if [len(one) for one in written] != [len(one) for one in items]:
            raise WorkerFailure(f"{self.checkpoint_dir}: its worker has written something other than what was planned")
        pairs = zip([i for one in items for i in one], [w for one in written for w in one], strict=True)
        return [result_of(item, at) for item, at in pairs]

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Name this rank's files without asking the others: by its rank."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return dataclasses.replace(local_plan, storage_data=_StoragePrefix(f"__{rank}_"))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: publish what all ranks have written."""
        super().finish(metadata, results)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See `FileSystemWriter.prepare_local_plan`."""
        return super().prepare_local_plan(plan)

    @property
    def checkpoint_id(self) -> str:
        """The path of the checkpoint."""
        return str(self.checkpoint_dir)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        del checkpoint_id
        return True

    @staticmethod
    def cleanup_tensor_caches() -> None:
        """Nothing is cached from save to save."""

    @staticmethod
    def register_shm_drain_callback(fn: Callable[[], Any]) -> None:
        """Shared memory is given back by whoever took it; `fn` is never needed."""
        del fn


def _contents(items: Sequence[WriteItem], planner: SavePlanner) -> Contents:
    values = [(item, planner.resolve_data(item)) for item in items if item.type == WriteItemType.BYTE_IO]
    tensors = [(item, _detached(planner.resolve_data(item))) for item in items if item.type != WriteItemType.BYTE_IO]
    return values, tensors


def _detached(data: Any) -> Tensor:
    tensor: Tensor = data.detach()
    return tensor


def _write(bucket: WriteBucket) -> list[Written]:
    path, name, (values, tensors) = bucket
    items: list[Item] = [item_of(item, data) for item, data in [*values, *tensors]]
    return write_file(PosixFiles(), os.path.dirname(path), name, items)


_results: list[Any] = []


def get_write_results_queue(mp_mode: str = "spawn") -> Any:
    """Return a queue of this process. Nothing of ours uses it, and no process is started for it."""
    del mp_mode
    if not _results:
        _results.append(queue.Queue())
    return _results[0]
