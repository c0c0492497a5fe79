"""A DCP save in two halves under NVRx's names: planned now, finalized when the files are written.

With `enable_cache` the plan of all ranks is used again while every rank's own plan is what it was: that is looked at in
each save, by each rank, and agreed in one small exchange. NVRx looks once, and would write a changed state by the old
plan. All ranks call each function together.
"""

import copy
import dataclasses
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper  # pyright: ignore[reportPrivateUsage] - NVRx's interface hands it out

from everstep.checkpoint.async_ckpt import agreement
from everstep.checkpoint.async_ckpt.filesystem_async import FileSystemWriterAsync

Planned = tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]


class CheckpointMetadataCache:
    """The plan of the last save, and what was learned from it."""

    def __init__(self) -> None:
        self.cached_central_plan: SavePlan | None = None
        self.cached_local_plan: SavePlan | None = None
        self.cached_global_metadata: Metadata | None = None
        self.validated_cache_reuse = False
        self.validated_loaded_metadata_reuse = False
        self.loaded_all_plans: list[SavePlan] | None = None

    def set_cached_global_metadata(self, cached_global_metadata: Metadata | None) -> None:
        """Take the metadata of a checkpoint that was loaded, and the ranks' plans in it, if it holds them."""
        self.cached_global_metadata = cached_global_metadata
        self.loaded_all_plans = getattr(cached_global_metadata, "all_local_plans", None)

    def set_cache_metadata(self, central_plan: SavePlan, local_plan: SavePlan, global_md_verify_reuse: bool) -> None:
        """Note what a save was planned like."""
        self.validated_loaded_metadata_reuse = global_md_verify_reuse
        self.validated_cache_reuse = self.cached_central_plan is not None and central_plan == self.cached_central_plan
        self.cached_central_plan, self.cached_local_plan = central_plan, local_plan

    def prepare_save_state_dict_ret(self, rank: int, coordinator: int, save_state_dict_ret: Any) -> Any:
        """Return the result of planning, on the coordinator with the metadata that is used again, if it is."""
        writer, metadata, *rest = save_state_dict_ret
        if metadata is not None:
            self.cached_global_metadata = copy.copy(metadata)
        elif rank == coordinator and self.cached_global_metadata is not None:
            metadata = copy.copy(self.cached_global_metadata)
        return (writer, metadata, *rest)

    def get_cache_metadata(self) -> tuple[SavePlan | None, SavePlan | None, bool, list[SavePlan] | None]:
        """Return the plan of all, this rank's plan, whether the last two were equal, and the loaded plans."""
        return self.cached_central_plan, self.cached_local_plan, self.validated_cache_reuse, self.loaded_all_plans

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """Return whether the last plan was that of the save before, and whether that of the loaded checkpoint."""
        return self.validated_cache_reuse, self.validated_loaded_metadata_reuse


_cache: list[CheckpointMetadataCache] = []


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Make the cache of this process, if there is none, and give it the metadata of a loaded checkpoint."""
    if not _cache:
        _cache.append(CheckpointMetadataCache())
    _cache[0].set_cached_global_metadata(cached_global_metadata)


def get_metadata_caching_status() -> tuple[bool, bool] | None:
    """See `CheckpointMetadataCache.get_metadata_caching_status`; None where there is no cache."""
    return _cache[0].get_metadata_caching_status() if _cache else None


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> Planned:
    """Plan a save; return the writer, on the coordinator the metadata (else None), and DCP's wrapper of the group.

    Nothing is copied yet: that is when the request is scheduled. Raises CheckpointException, on all ranks, where
    planning fails on one.
    """
    wrapper = _DistWrapper(process_group, dist.is_available() and dist.is_initialized(), coordinator_rank)
    planner = planner or DefaultSavePlanner()
    cache = (metadata_cache or next(iter(_cache), None)) if enable_cache else None
    planning = _Planning(state_dict, storage_writer, planner, wrapper, cache)
    agreement.gathered(0, process_group)  # nobody waits below for one that will not come
    central, metadata = planning.plan()
    central = planner.finish_plan(central)
    storage_writer.prepare_write_data(central, planner)
    if cache is None:
        return storage_writer, metadata, wrapper
    assert planning.local is not None
    cache.set_cache_metadata(central, planning.local, planning.loaded)
    rank = dist.get_rank(process_group) if wrapper.use_dist else 0
    planned: Planned = cache.prepare_save_state_dict_ret(rank, coordinator_rank, (storage_writer, metadata, wrapper))
    return planned


@dataclasses.dataclass
class _Planning:
    """One save's plan in the making."""

    state: dict[str, Any]
    writer: FileSystemWriterAsync
    planner: Any
    wrapper: _DistWrapper
    cache: CheckpointMetadataCache | None
    local: SavePlan | None = None
    metadata: Metadata | None = None
    loaded: bool = False

    def plan(self) -> tuple[SavePlan, Metadata | None]:
        """Return this rank's part of the plan of all, and on the coordinator the metadata, if it was made anew."""
        if self.cache is not None:
            # Every rank says so, one without a plan too: a process that was replaced has none where the others have.
            same = all(agreement.gathered(int(self._same(self.cache)), self.wrapper.group))
            if same and self.cache.cached_central_plan is not None:
                return self.cache.cached_central_plan, None
        if getattr(self.planner, "can_run_decentralized_global_plan", False):
            return self._apart()
        return self.wrapper.reduce_scatter("plan", self.local_step, self.global_step), self.metadata

    def _same(self, cache: CheckpointMetadataCache) -> bool:
        """True where the plan of the last save serves this rank again, and what else is needed of it is there."""
        metadata = cache.cached_global_metadata is not None or not self.wrapper.is_coordinator
        if cache.cached_central_plan is None or not metadata:
            return False
        return bool(self.local_step().items == getattr(cache.cached_local_plan, "items", None))

    def local_step(self) -> SavePlan:
        """Plan for this rank."""
        self.planner.set_up_planner(self.state, is_coordinator=self.wrapper.is_coordinator)
        self.writer.set_up_storage_writer(self.wrapper.is_coordinator)
        self.local = self.writer.prepare_local_plan(self.planner.create_local_plan())
        return self.local

    def global_step(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: plan for all."""
        made, self.metadata = self.planner.create_global_plan(plans)
        return list(self.writer.prepare_global_plan(made))

    def _apart(self) -> tuple[SavePlan, Metadata | None]:
        """Each rank plans for itself; the coordinator gathers plans for the metadata alone, unless those are known."""
        local = self.local_step()
        plans = self.cache.loaded_all_plans if self.cache is not None else None
        rank = dist.get_rank(self.wrapper.group) if self.wrapper.use_dist else 0
        self.loaded = verify_global_md_reuse(plans, local, rank, self.wrapper)
        if not self.loaded:
            every = self.wrapper.gather_object(local)
            if self.wrapper.is_coordinator and every is not None:
                _, made = self.planner.create_global_plan(every)
                made.all_local_plans = every
                self.metadata = made
        return self.writer.prepare_decentralized_global_plan(
            self.planner.create_decentralized_global_plan(local)
        ), self.metadata


def verify_global_md_reuse(
    loaded_all_plans: list[SavePlan] | None, local_plan: SavePlan, rank: int, dist_wrapper: _DistWrapper
) -> bool:
    """Say whether every rank's plan is that of the loaded checkpoint. All ranks together."""
    same = loaded_all_plans is not None and len(loaded_all_plans) == dist_wrapper.get_world_size()
    if same and loaded_all_plans is not None:
        before = loaded_all_plans[rank]
        same = all(
            getattr(local_plan, field.name) == getattr(before, field.name)
            for field in dataclasses.fields(local_plan)
            if field.name != "storage_data"
        )
    return all(agreement.gathered(int(same), dist_wrapper.group))


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: _DistWrapper
) -> None:
    """Publish what all ranks have written: the checkpoint has its name when this has returned, on any rank.

    Raises CheckpointException("write", …) on all ranks where one has failed; then nothing is published.
    """

    def finish(results: list[list[WriteResult]]) -> None:
        assert global_metadata is not None
        storage_writer.finish(global_metadata, results)

    agreement.gathered(0, dist_wrapper.group)  # nobody waits below for one that will not come
    try:
        dist_wrapper.all_reduce("write", storage_writer.retrieve_write_results, finish)
    finally:
        storage_writer.drop()
