"""What every manager of local checkpoints does, under NVRx's names: which iteration is whole, how it is loaded.

Rule 1: an iteration counts where every rank of this world has its own sound part, or another holds a copy for it.
Rule 2: `load` reads what it hands out against its checksum. A part that is wounded is taken from a copy; where there is
none, all ranks fall back together to the iteration before, and say so. Nothing wounded is ever handed out.
Rule 3: ranks decide alike: every decision is a function of what all have told.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint.async_ckpt import agreement
from everstep.checkpoint.async_ckpt.core import AsyncRequest
from everstep.checkpoint.local.base_state_dict import TensorAwareStateDict
from everstep.checkpoint.local.replication.group_utils import ExchangePlan, GroupWrapper
from everstep.checkpoint.local.replication.strategies import ReplicationStrategy
from everstep.errors import CheckpointError
from everstep.telemetry import say

CkptID = tuple[int, int, Any]
"""(iteration, rank, session)."""


class CheckpointingException(CheckpointError):
    """A local checkpoint could not be saved or loaded."""


class SameMachineReplicationException(CheckpointingException):
    """A copy would take the place of the checkpoint that it is a copy of. Managers of users raise it; ours replaces."""

    def __init__(self, ckpt_id: Any) -> None:
        super().__init__(f"checkpoint {ckpt_id} is on this machine already")


class BaseCheckpointManager(ABC):
    """Saves and loads one state a rank and iteration, by what a subclass does with files. Used on one thread.

    `session_id` tells jobs apart that share a place. With `repl_strategy` ranks keep copies for one another.
    """

    def __init__(self, session_id: Any, repl_strategy: ReplicationStrategy | None = None) -> None:
        self.latest_iteration = -1
        self.globally_available_ids: list[list[CkptID]] = []
        self.repl_strategy = repl_strategy
        self.session_id = session_id

    @property
    def rank(self) -> int:
        """This process's rank, 0 where there is no process group."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _ckpt_id(self, iteration: int) -> CkptID:
        if iteration < 0:
            raise CheckpointingException(f"iteration {iteration}: iterations are counted from 0")
        return iteration, self.rank, self.session_id

    @abstractmethod
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """Return what lies here."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Read one, verified. Raises CheckpointError where it is not sound."""

    @abstractmethod
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Write one, durably and as a whole."""

    @abstractmethod
    def _cleanup(self, iteration: int) -> None:
        """Remove what is not needed any more now that this iteration is saved."""

    @abstractmethod
    def _cleanup_failed_save(self, iteration: int) -> None:
        """Remove what is here of an iteration that is not whole."""

    def find_latest(self) -> int:
        """Return the newest iteration that is whole (rule 1), -1 where none is. All ranks together.

        It is looked for once, until the next save. Raises CheckpointingException on all ranks, naming those that cannot
        look: what they hold is not known, and -1 would be taken for a fresh start.
        """
        if self.latest_iteration != -1:
            return self.latest_iteration
        mine: list[CkptID] | str
        try:
            mine = [id_ for id_ in self._my_ckpt_ids() if self.repl_strategy is not None or id_[1] == self.rank]
        except OSError as error:
            mine = f"rank {self.rank}: {error}"
        found: list[list[CkptID] | str] = GroupWrapper().all_gather_object(mine)
        if blind := [text for text in found if isinstance(text, str)]:
            raise CheckpointingException(f"local checkpoints cannot be looked for: {'; '.join(blind)}")
        self.globally_available_ids = [ids for ids in found if not isinstance(ids, str)]
        self.latest_iteration = max(self._whole(), default=-1)
        return self.latest_iteration

    def _whole(self) -> list[int]:
        covered: dict[int, set[int]] = {}
        for ids in self.globally_available_ids:
            for iteration, rank, _ in ids:
                covered.setdefault(iteration, set()).add(rank)
        everybody = set(GroupWrapper().ranks)
        return sorted(iteration for iteration, ranks in covered.items() if ranks >= everybody)

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """Return this rank's state of the newest whole iteration, and its id. All ranks together, after `find_latest`.

        Raises CheckpointingException where none is left that is sound, on all ranks.
        """
        if self.latest_iteration == -1:
            raise CheckpointingException(self._nothing())
        for iteration in reversed([one for one in self._whole() if one <= self.latest_iteration]):
            state = self._attempt(iteration)
            if state is not None:
                self.latest_iteration = iteration
                return state, self._ckpt_id(iteration)
            say(f"the local checkpoint of iteration {iteration} is not sound on all ranks, and no copy mends it")
        raise CheckpointingException(
            f"no local checkpoint of session {self.session_id!r} is sound on all ranks: see above what is wrong with "
            "each; load a global one"
        )

    def _nothing(self) -> str:
        return "call find_latest() first; where it returns -1 there is no local checkpoint to load"

    def _attempt(self, iteration: int) -> TensorAwareStateDict | None:
        """Return this rank's state; None where any rank cannot have its own, on all of them."""
        state = self._sound(self._ckpt_id(iteration))
        have = agreement.gathered(int(state is not None))
        if all(have):
            return state
        if self.repl_strategy is None:
            return None
        return self._mend(iteration, state, {rank for rank, there in enumerate(have) if not there})

    def _mend(
        self, iteration: int, state: TensorAwareStateDict | None, missing: set[int]
    ) -> TensorAwareStateDict | None:
        """Have those ranks sent what others keep for them; return this rank's state, None where one stays without."""
        held = {id_: found for id_ in self._my_ckpt_ids() if id_[0] == iteration and id_[1] in missing - {self.rank}
                if (found := self._sound(id_, restore=False)) is not None}  # fmt: skip
        return self._from_copies(self._ckpt_id(iteration), state, held)

    def _from_copies(
        self, wanted: CkptID, state: TensorAwareStateDict | None, held: Mapping[CkptID, TensorAwareStateDict]
    ) -> TensorAwareStateDict | None:
        assert self.repl_strategy is not None
        plan = self._planned(list(held), [] if state is not None else [wanted])
        if plan is None:
            return None
        received = self.repl_strategy.retrieve_execute(plan, dict(held))
        if state is None:
            copy: TensorAwareStateDict = received[wanted]
            self._save_again(copy, wanted)
            copy.restore_tensor_device(non_blocking=False)
            return copy
        return state

    def _planned(self, held: list[CkptID], wanted: list[CkptID]) -> ExchangePlan | None:
        """Return who sends what to whom; None, on all ranks, where nobody holds what one wants."""
        assert self.repl_strategy is not None
        plan = None
        available = GroupWrapper().all_gather_object(held)
        try:
            plan = self.repl_strategy.retrieve_plan(available, wanted)
        except CheckpointError as error:
            say(str(error))
        return plan if all(agreement.gathered(int(plan is not None))) else None

    def _save_again(self, state: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """A part that came from a copy is put back where it was lost: the next loss finds two again (W48)."""
        try:
            self._save(state, ckpt_id)
        except (OSError, CheckpointError) as error:
            say(f"local checkpoint {ckpt_id} was taken from a copy, and could not be written here again: {error}")

    def _sound(self, ckpt_id: CkptID, *, restore: bool = True) -> TensorAwareStateDict | None:
        try:
            return self._load_fn(ckpt_id) if restore else self._load(ckpt_id)
        except CheckpointError as error:
            say(f"local checkpoint {ckpt_id}: {error}")
            return None

    def _load_fn(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        state = self._load(ckpt_id)
        state.restore_tensor_device(non_blocking=False)
        return state

    def _save_fn(self, id_to_state_dict: Mapping[CkptID, TensorAwareStateDict]) -> None:
        for ckpt_id, state in id_to_state_dict.items():
            self._save(state, ckpt_id)

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Save this rank's state. All ranks together; `iteration` is newer than what was found or loaded last.

        With `is_async` the state is copied when it returns, and the request that writes it is returned: schedule it
        in an `AsyncCallsQueue`. Raises CheckpointingException, on all ranks, where one has failed.
        """
        if iteration <= self.latest_iteration:
            raise CheckpointingException(
                f"iteration {iteration} is not newer than {self.latest_iteration}, which is saved already"
            )
        request = self._request(state_dict, iteration, is_async=is_async)
        request.add_finalize_fn(partial(self._finalize, iteration, is_async))
        self.latest_iteration = -1
        if is_async:
            return request
        request.execute_sync()
        return None

    def _request(self, state_dict: TensorAwareStateDict, iteration: int, *, is_async: bool) -> AsyncRequest:
        """Copy what is to be written, the others' parts too where copies are kept; return what writes it."""
        del is_async
        states = {self._ckpt_id(iteration): state_dict}
        if self.repl_strategy is not None:
            kept, ids = self.repl_strategy.replicate(state_dict, self._ckpt_id(iteration))
            states = dict(zip(ids, kept, strict=True))
        states[self._ckpt_id(iteration)].copy_tensors_to_cpu(non_blocking=True)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # nothing is written before it has arrived (W49)
        return AsyncRequest(self._save_fn, (states,), [])

    def _finalize(self, iteration: int, is_async: bool) -> None:
        here = self._ckpt_id(iteration) in set(self._my_ckpt_ids())
        lacking = [rank for rank, there in enumerate(agreement.gathered(int(here))) if not there]
        self.latest_iteration = -1
        if lacking:
            self._cleanup_failed_save(iteration)
            raise CheckpointingException(
                f"the local checkpoint of iteration {iteration} is not there on ranks {lacking}: it was removed or not "
                "written; what there was before stands"
            )
        if is_async:
            threading.Thread(target=self._cleanup, args=(iteration,), name="everstep-retention", daemon=True).start()
        else:
            self._cleanup(iteration)
