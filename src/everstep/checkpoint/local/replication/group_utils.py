"""Groups of ranks that keep copies for one another: who is with whom, and how bytes get from one to the other.

Bytes go in large stretches over whatever the group speaks: from the host where it can (gloo), through the current
device where it cannot (NCCL), each within the limit of `agreement` (W43, W48).
"""

import contextlib
import dataclasses
import itertools
import os
import secrets
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from everstep.checkpoint.archive_file import temporary_name, verify
from everstep.checkpoint.async_ckpt import agreement
from everstep.checkpoint.fileops import PosixFiles, sync, write_all
from everstep.checkpoint.local.base_state_dict import TensorAwareStateDict
from everstep.checkpoint.local.replication.torch_device_utils import TensorPlaceholder
from everstep.errors import DamagedCheckpoint, UsageError
from everstep.telemetry import say

T = TypeVar("T")
STRETCH = 64 << 20
"""Bytes that are sent at a time."""


@dataclasses.dataclass(frozen=True)
class ExchangePlanEntry:
    """One checkpoint that goes from one rank to another; ranks are those of the world."""

    sender: int
    receiver: int
    id_: Any


@dataclasses.dataclass
class ExchangePlan:
    """What goes from whom to whom, in order. The same on all ranks of the group."""

    group: "GroupWrapper"
    _entries: list[ExchangePlanEntry] = dataclasses.field(default_factory=list[ExchangePlanEntry])

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Add an `ExchangePlanEntry` of these arguments."""
        self._entries.append(ExchangePlanEntry(*args, **kwargs))

    @property
    def entries(self) -> tuple[ExchangePlanEntry, ...]:
        """All entries."""
        return tuple(self._entries)

    def required_ids(self, rank: int | None = None) -> set[Any]:
        """Return what a rank (this one where None) has to bring."""
        sender = self.group.my_global_rank if rank is None else rank
        return {entry.id_ for entry in self._entries if entry.sender == sender}


def batched(iterable: Iterable[T], n: int) -> Iterator[tuple[T, ...]]:
    """Return tuples of `n` items; the last may be shorter. ValueError below 1."""
    if n < 1:
        raise UsageError(f"batches of {n} items cannot be made: n must be at least 1")
    rest = iter(iterable)
    while batch := tuple(itertools.islice(rest, n)):
        yield batch


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[tuple[int, ...]]:
    """Return groups of ranks `replication_jump` apart, of `replication_factor` each; every rank is in one.

    Where the world does not divide, groups are of that size or larger, as even as can be; where there are too few
    ranks for the jump, they are as far apart as can be; nobody is left alone who has company anywhere.
    """
    if replication_jump < 1 or replication_factor < 1 or world_size < 1:
        raise UsageError(
            f"replication_jump={replication_jump}, replication_factor={replication_factor}, world_size={world_size}: "
            "each must be at least 1"
        )
    jump = replication_jump
    if jump * replication_factor > world_size:
        jump = max(1, world_size // replication_factor)
    groups: list[tuple[int, ...]] = []
    for first in range(jump):
        groups += _even(range(first, world_size, jump), replication_factor)
    if replication_factor > 1:
        groups = _in_company(groups)
    return sorted(groups)


def _even(ranks: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    count = max(1, len(ranks) // size)
    least, more = divmod(len(ranks), count)
    start = 0
    for n in range(count):
        end = start + least + (n < more)
        yield tuple(ranks[start:end])
        start = end


def _in_company(groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    alone = [group for group in groups if len(group) == 1]
    others: list[tuple[int, ...]] = [group for group in groups if len(group) > 1]
    if not others:
        return [tuple(sorted(rank for group in alone for rank in group))] if alone else []
    for group in alone:
        smallest = min(range(len(others)), key=lambda n: (len(others[n]), others[n]))
        others[smallest] = tuple(sorted((*others[smallest], *group)))
    return others


class GroupWrapper:
    """A process group, or (None) the whole world; a world of one where there is no process group at all."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @staticmethod
    def wrap(group: "GroupWrapper | dist.ProcessGroup") -> "GroupWrapper":
        """Return `group` wrapped. ValueError for what is no group."""
        if isinstance(group, GroupWrapper):
            return group
        given: Any = group
        if isinstance(given, dist.ProcessGroup):
            return GroupWrapper(given)
        raise UsageError(f"a ProcessGroup or a GroupWrapper is expected, not {type(group).__name__}")

    @staticmethod
    def from_list_of_groups(list_of_groups: list[Any]) -> "GroupWrapper":
        """Return the one group of the list that this rank is in. ValueError where that is none, or several."""
        rank = dist.get_rank()
        mine = [group for group in list_of_groups if _is_in(rank, group)]
        if len(mine) != 1:
            raise UsageError(
                f"rank {rank} must be in one of the groups, and is in {len(mine)} of {len(list_of_groups)}"
            )
        return GroupWrapper(mine[0])

    @property
    def group(self) -> Any:
        """The group itself."""
        return self._group

    @property
    def backend(self) -> str:
        """The name of its backend."""
        return str(dist.get_backend(self.group))

    @property
    def supported_devices(self) -> list[torch.device]:
        """The kinds of devices that it moves tensors of."""
        return [torch.device(part.split(":")[0]) for part in str(dist.get_backend_config(self.group)).split(",")]

    def get_device(self, wanted_device: Any = None) -> Any:
        """Return `wanted_device`, or the first that the group knows. ValueError for one that it does not know."""
        supported = self.supported_devices
        if wanted_device is not None and torch.device(wanted_device).type not in {one.type for one in supported}:
            raise UsageError(f"backend {self.backend} does not move tensors of {wanted_device}, but of {supported}")
        return supported[0] if wanted_device is None else wanted_device

    def get_group_rank(self, global_rank: int | None = None) -> int:
        """Return the rank within the group, of this process where None."""
        if not dist.is_initialized():
            return 0
        if global_rank is None:
            return int(dist.get_rank(self.group))
        return global_rank if self.group is None else int(dist.get_group_rank(self.group, global_rank))

    @property
    def my_group_rank(self) -> int:
        """This process's rank within the group."""
        return self.get_group_rank(None)

    def get_global_rank(self, group_rank: int | None = None) -> int:
        """Return the rank in the world, of this process where None."""
        if not dist.is_initialized():
            return 0
        if group_rank is None:
            return int(dist.get_rank())
        return group_rank if self.group is None else int(dist.get_global_rank(self.group, group_rank))

    @property
    def my_global_rank(self) -> int:
        """This process's rank in the world."""
        return self.get_global_rank(None)

    @property
    def ranks(self) -> Sequence[int]:
        """Its ranks, as the world counts them."""
        if self.group is None:
            return range(self.world_size)
        return list(dist.get_process_group_ranks(self.group))

    @property
    def world_size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    def __repr__(self) -> str:
        return f"<group of {self.world_size}, rank {self.my_group_rank}, in the world {self.my_global_rank}>"

    def all_gather_object(self, my_obj: T) -> list[T]:
        """Return every rank's object, in the group's order. CheckpointError where not all come in time."""
        if self.world_size == 1:
            return [my_obj]
        agreement.gathered(0, self.group)  # nobody waits below for one that will not come
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, my_obj, group=self.group)
        return typing.cast("list[T]", found)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.distributed.broadcast`, over this group."""
        return dist.broadcast(*args, **kwargs, group=self.group)

    def all_gather_batch(self, my_tensors: Sequence[Tensor], target_device: Any = None) -> list[list[Tensor]]:
        """Return every rank's tensors, in the group's order, on `target_device`, else each on a device of its kind."""
        described = self.all_gather_object([TensorPlaceholder(one) for one in my_tensors])
        found: list[list[Tensor]] = []
        for group_rank, placeholders in enumerate(described):
            mine, sender = group_rank == self.my_group_rank, self.get_global_rank(group_rank)
            held = list(my_tensors) if mine else [one.empty_like("cpu") for one in placeholders]
            for tensor in held:
                self.broadcast_bytes(tensor, sender)
            wanted = [target_device or one.device for one in placeholders]
            found.append([tensor.to(device) for tensor, device in zip(held, wanted, strict=True)])
        return found

    def broadcast_bytes(self, tensor: Tensor, sender: int) -> None:
        """Send a tensor's bytes from the rank `sender` of the world to all of the group, or receive them into it."""
        mine = sender == self.my_global_rank
        self._move(
            tensor, mine,
            lambda row: agreement.finished(dist.broadcast(row, sender, group=self.group, async_op=True)),
        )  # fmt: skip

    def send_bytes(self, tensor: Tensor, receiver: int) -> None:
        """Send a tensor's bytes to one rank of the world."""
        self._move(tensor, True, lambda row: agreement.transferred(dist.isend(row, receiver, group=self.group)))

    def receive_bytes(self, tensor: Tensor, sender: int) -> None:
        """Receive a tensor's bytes from one rank of the world."""
        self._move(tensor, False, lambda row: agreement.transferred(dist.irecv(row, sender, group=self.group)))

    def send_file(self, path: str, receiver: int) -> None:
        """Send a file's content to one rank of the world."""
        size = os.path.getsize(path)
        self.send_bytes(torch.tensor([size]), receiver)
        with open(path, "rb", buffering=0) as file:
            while size > 0:
                piece = bytearray(min(size, STRETCH))
                file.readinto(piece)  # what is cut from it meanwhile comes as zeros, and its checksum tells
                self.send_bytes(torch.frombuffer(piece, dtype=torch.uint8), receiver)
                size -= len(piece)

    def receive_file(self, path: str, sender: int) -> None:
        """Receive a file from one rank of the world, and give it the name `path` when it is whole and durable.

        All of it is received although it cannot be written, which is told: the sender would wait.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self.receive_bytes(size, sender)
        left, temporary, files = int(size.item()), temporary_name(path, secrets.token_hex(8)), PosixFiles()
        wrong: OSError | None = None
        fd = -1
        with contextlib.suppress(OSError):
            fd = files.create(temporary)
        while left > 0:
            piece = torch.empty(min(left, STRETCH), dtype=torch.uint8)
            self.receive_bytes(piece, sender)
            left -= piece.numel()
            try:
                raw: Any = piece.numpy()
                write_all(files, fd, memoryview(raw), temporary)
            except OSError as error:
                wrong = wrong or error
        try:
            sync(files, fd, temporary)
            os.close(fd)
            verify(temporary)
            files.rename(temporary, path)
            files.fsync_dir(os.path.dirname(path))
        except (OSError, DamagedCheckpoint) as error:
            say(f"a copy of {path} came and could not be put there: {wrong or error}")
            with contextlib.suppress(OSError):
                files.unlink(temporary)

    def _move(self, tensor: Tensor, sending: bool, move: Callable[[Tensor], None]) -> None:
        if tensor.numel() == 0:
            return
        where = agreement.device_of(self.group)
        whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
        for row in whole.reshape(-1).view(torch.uint8).split(STRETCH):
            passing = row.to(where) if sending else row if row.device == where else torch.empty_like(row, device=where)
            move(passing)
            if not sending and passing is not row:
                row.copy_(passing)
        if not sending and whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)

    def isend_state_dict(self, state_dict: TensorAwareStateDict, dst: int) -> dict[str, float]:
        """Send a state to one rank of the world; return {"data_sent": bytes}. The state is whole again afterwards."""
        tensors = state_dict.pop_tensors()
        try:
            self.send_object(state_dict, dst)
            for tensor in tensors:
                self.send_bytes(tensor, dst)
        finally:
            state_dict.insert_tensors(tensors)
        return {"data_sent": sum(tensor.nbytes for tensor in tensors)}

    def irecv_state_dict(self, src: int) -> tuple[TensorAwareStateDict, dict[str, float]]:
        """Receive a state from one rank of the world; return it and {"data_recv": bytes}."""
        state: TensorAwareStateDict = self.recv_object(src)
        state.init_tensors()
        tensors = list(state.tensors)
        for tensor in tensors:
            self.receive_bytes(tensor, src)
        return state, {"data_recv": sum(tensor.nbytes for tensor in tensors)}

    def recv_object(self, src: int) -> Any:
        """Receive one object from a rank of the world."""
        found: list[Any] = [None]
        dist.recv_object_list(found, src, group=self.group, device=agreement.device_of(self.group))
        return found[0]

    def send_object(self, obj: Any, dst: int) -> None:
        """Send one picklable object to a rank of the world."""
        dist.send_object_list([obj], dst, group=self.group, device=agreement.device_of(self.group))

    def execute_plan(
        self, exchange_plan: ExchangePlan, my_data: Mapping[Any, TensorAwareStateDict]
    ) -> dict[Any, TensorAwareStateDict]:
        """Do what the plan says; return what this rank receives, by id. UsageError where it lacks what it must send."""
        missing = exchange_plan.required_ids() - set(my_data)
        if missing:
            raise UsageError(
                f"the plan has rank {self.my_global_rank} send {sorted(map(str, missing))}, which it has not"
            )
        me, received = self.my_global_rank, dict[Any, TensorAwareStateDict]()
        for entry in exchange_plan.entries:
            if entry.sender == entry.receiver == me:
                received[entry.id_] = my_data[entry.id_]
            elif entry.sender == me:
                self.isend_state_dict(my_data[entry.id_], entry.receiver)
            elif entry.receiver == me:
                received[entry.id_], _ = self.irecv_state_dict(entry.sender)
        return received


def _is_in(rank: int, group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and rank in dist.get_process_group_ranks(group)


ProcessGroupLike: typing.TypeAlias = GroupWrapper | dist.ProcessGroup
