"""Who keeps copies of whose checkpoint, under NVRx's names: cliques, whose members keep one another's.

Any world size is served (`parse_group_sequence`). A manager of ours exchanges packed states one after the other:
beside its own a rank holds those that it is to keep and no more, and one at a time where it saves at once (W48).
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from everstep import environ
from everstep.checkpoint.async_ckpt.packing import Packed
from everstep.checkpoint.async_ckpt.region import Pool
from everstep.checkpoint.local.base_state_dict import TensorAwareStateDict
from everstep.checkpoint.local.replication.group_utils import (
    ExchangePlan,
    GroupWrapper,
    ProcessGroupLike,
    parse_group_sequence,
)
from everstep.errors import CheckpointError

Available = Mapping[int, Sequence[Any]] | Sequence[Sequence[Any]]


class NoReplicasAvailableError(CheckpointError):
    """Nobody of the group holds what is wanted."""


class ReplicationStrategy(ABC):
    """How checkpoints get to other ranks, and back."""

    @abstractmethod
    def replicate(self, local_ckpt: TensorAwareStateDict, id_: Any) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """Return the states that this rank is to keep, its own included, and their ids. All ranks together."""

    @abstractmethod
    def retrieve_plan(self, globally_available_ids: Available, wanted: Sequence[Any]) -> ExchangePlan:
        """Return who sends what to whom so that every rank gets what it wants. All ranks together."""

    @abstractmethod
    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """Do what a plan says: (plan, what this rank holds by id) → what it receives by id. All ranks together."""


class CliqueReplicationStrategy(ReplicationStrategy):
    """Every member of `local_group` keeps the checkpoints of all of them, on `target_device`."""

    def __init__(self, local_group: ProcessGroupLike, target_device: Any = "cpu") -> None:
        self.local_group = GroupWrapper.wrap(local_group)
        self.target_device = target_device

    def replicate(self, local_ckpt: TensorAwareStateDict, id_: Any) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """See `ReplicationStrategy.replicate`. `local_ckpt` is hollow afterwards; its state is among those returned."""
        tensors = local_ckpt.pop_tensors()
        hollow = self.local_group.all_gather_object((local_ckpt, id_))
        filled = self.local_group.all_gather_batch(tensors, target_device=self.target_device)
        for (state, _), own in zip(hollow, filled, strict=True):
            if not state.is_hollow:  # a group of one hands back the very object
                raise CheckpointError("a state that was to be replicated is not hollow after pop_tensors()")
            state.insert_tensors(own)
        return [state for state, _ in hollow], [name for _, name in hollow]

    def exchange(self, packed: Packed, id_: Any, pool: Pool) -> Iterator[tuple[Any, Packed]]:
        """Return what the other members have packed, one after the other, each in a region of `pool`. All together."""
        mine = dataclasses.replace(packed, region=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        told = self.local_group.all_gather_object((id_, mine, packed.used))
        own = torch.frombuffer(packed.region.map, dtype=torch.uint8)
        for group_rank, (other, described, used) in enumerate(told):
            sender = self.local_group.get_global_rank(group_rank)
            if group_rank == self.local_group.my_group_rank:
                self.local_group.broadcast_bytes(own[:used], sender)
                continue
            region = pool.take(used)
            self.local_group.broadcast_bytes(torch.frombuffer(region.map, dtype=torch.uint8)[:used], sender)
            yield other, dataclasses.replace(described, region=region)

    def retrieve_plan(self, globally_available_ids: Available, wanted: Sequence[Any]) -> ExchangePlan:
        """See `ReplicationStrategy.retrieve_plan`. Raises NoReplicasAvailableError, on all members."""
        plan = ExchangePlan(group=self.local_group)
        for receiver, ids in zip(self.local_group.ranks, self.local_group.all_gather_object(list(wanted)), strict=True):
            for one in ids:
                holders = [rank for rank in self.local_group.ranks if one in globally_available_ids[rank]]
                if not holders:
                    raise NoReplicasAvailableError(
                        f"no member of the group of ranks {list(self.local_group.ranks)} holds a sound copy of {one}, "
                        f"which rank {receiver} wants"
                    )
                busy = [entry.sender for entry in plan.entries]
                sender = receiver if receiver in holders else min(holders, key=lambda rank: (busy.count(rank), rank))
                plan.plan(sender=sender, receiver=receiver, id_=one)
        return plan

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """See `ReplicationStrategy.retrieve_execute`."""
        return self.local_group.execute_plan(*args, **kwargs)

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2
    ) -> "CliqueReplicationStrategy":
        """Make the groups, of ranks `replication_jump` apart, `replication_factor` each. All ranks together.

        A jump of None is the number of ranks of a node, so that copies lie on different nodes: its devices, else
        LOCAL_WORLD_SIZE, else 1.
        """
        ranks = parse_group_sequence(replication_jump or ranks_of_a_node(), replication_factor, dist.get_world_size())
        groups = [dist.new_group(list(group)) for group in ranks]
        return cls(GroupWrapper.from_list_of_groups(groups), target_device="cpu")

    @property
    def usable(self) -> bool:
        """False once the process groups that it was made with are gone: after a restart in the process."""
        try:
            return self.local_group.group is None or bool(dist.get_process_group_ranks(self.local_group.group))
        except (ValueError, RuntimeError, KeyError):
            return False


def ranks_of_a_node() -> int:
    """Return how many ranks a node has, as far as can be told."""
    devices = torch.accelerator.device_count()
    return devices or int(environ.get("LOCAL_WORLD_SIZE") or 1)


EagerT = TypeVar("EagerT", bound=ReplicationStrategy)


class LazyReplicationStrategyBuilder(ReplicationStrategy, ABC, Generic[EagerT]):
    """A strategy that is made when it is first needed, and again when its process groups are gone."""

    def __init__(self) -> None:
        self._replication_strategy: EagerT | None = None

    @property
    def replication_strategy(self) -> EagerT:
        """The strategy; made now where there is none. All ranks together."""
        if self._replication_strategy is None or not getattr(self._replication_strategy, "usable", True):
            self._replication_strategy = self._eager_build()
        return self._replication_strategy

    def replicate(self, local_ckpt: TensorAwareStateDict, id_: Any) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """See `ReplicationStrategy.replicate`."""
        return self.replication_strategy.replicate(local_ckpt, id_)

    def retrieve_plan(self, globally_available_ids: Available, wanted: Sequence[Any]) -> ExchangePlan:
        """See `ReplicationStrategy.retrieve_plan`."""
        return self.replication_strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """See `ReplicationStrategy.retrieve_execute`."""
        return self.replication_strategy.retrieve_execute(*args, **kwargs)

    @abstractmethod
    def _eager_build(self) -> EagerT:
        """Make the strategy."""


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder[CliqueReplicationStrategy]):
    """`CliqueReplicationStrategy.from_replication_params`, once it is needed."""

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        super().__init__()
        self.replication_jump = replication_jump
        self.replication_factor = replication_factor

    def _eager_build(self) -> CliqueReplicationStrategy:
        return CliqueReplicationStrategy.from_replication_params(self.replication_jump, self.replication_factor)


def clique_of(strategy: ReplicationStrategy | None) -> CliqueReplicationStrategy | None:
    """Return the clique behind a strategy, made now if need be; None for another kind."""
    if isinstance(strategy, LazyReplicationStrategyBuilder):
        strategy = strategy.replication_strategy
    return strategy if isinstance(strategy, CliqueReplicationStrategy) else None
