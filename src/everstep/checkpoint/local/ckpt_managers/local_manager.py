"""Checkpoints on the node's own disk, under NVRx's name: `LocalCheckpointManager`.

    <root>/<session>/<rank>/iter_0000100_<rank>_local.pt     one file a rank and iteration, and those kept for others

A file is an archive that `torch.load` reads: written beside its name, fsynced, renamed, with a checksum of all of it at
its end (`archive_file.py`), and with the world that it is a part of: another number of ranks is refused, not loaded.
"""

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from everstep.checkpoint.archive_file import FOLDER, is_whole, verify
from everstep.checkpoint.async_ckpt import agreement
from everstep.checkpoint.async_ckpt.core import AsyncRequest
from everstep.checkpoint.async_ckpt.jobs import WriteArchives, writer_of
from everstep.checkpoint.async_ckpt.packing import Packed, pack, with_record
from everstep.checkpoint.async_ckpt.region import Pool
from everstep.checkpoint.local.base_state_dict import TensorAwareStateDict
from everstep.checkpoint.local.basic_state_dict import BasicTensorAwareStateDict
from everstep.checkpoint.local.ckpt_managers.base_manager import BaseCheckpointManager, CheckpointingException, CkptID
from everstep.checkpoint.local.replication.group_utils import GroupWrapper
from everstep.checkpoint.local.replication.strategies import ReplicationStrategy, clique_of
from everstep.errors import CheckpointError, DamagedCheckpoint, UsageError
from everstep.telemetry import say

FACTS = "everstep.json"
KEEP = 2
"""Iterations that are kept: the newest, and the one before it, to fall back to."""
_NAME = re.compile(r"iter_(\d{7,})_(\d+)_local\.pt\Z")
_BEGUN = re.compile(r"\.(iter_\d{7,}_\d+_local\.pt)\.[0-9a-f]{16}\.tmp\Z")


class LocalCheckpointManager(BaseCheckpointManager):
    """Saves each rank's state to its own disk, and keeps the newest `keep` iterations of it.

    `root_local_ckpt_dir` is a place on the node, `session_id` a folder in it, by which jobs are told apart.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep: int = KEEP,
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: at least one iteration must be kept")
        super().__init__(session_id, repl_strategy)
        self.root_local_ckpt_dir = root_local_ckpt_dir
        self.keep = keep
        self._pool = Pool()
        self._made: set[Path] = set()
        self._of_others: dict[int, int] = {}  # iteration → the number of ranks that it was saved by

    @property
    def local_ckpt_dir(self) -> Path:
        """Where this rank's files lie."""
        return Path(self.root_local_ckpt_dir, str(self.session_id), str(self.rank))

    def _folder(self) -> Path:
        """Return it, made if need be, without what a process that has ended was writing there."""
        folder = self.local_ckpt_dir
        if folder not in self._made or not folder.is_dir():  # a node's disk may be emptied under a living process
            folder.mkdir(parents=True, exist_ok=True)
            for found in list(folder.iterdir()):
                begun = _BEGUN.match(found.name)
                writer = writer_of(os.path.realpath(folder / begun[1])) if begun else None
                if begun and (writer is None or not writer.writes(os.path.realpath(folder / begun[1]))):
                    found.unlink(missing_ok=True)
            self._made.add(folder)
        return folder

    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """Return what lies here whole, of a world of this size. Only the ends of files are read."""
        found: list[CkptID] = []
        world = GroupWrapper().world_size
        for path in sorted(self._folder().iterdir()):
            match = _NAME.match(path.name)
            facts = _facts(path) if match else None
            if match is None or facts is None:
                continue
            if facts["world_size"] == world:
                found.append((int(match[1]), int(match[2]), self.session_id))
            else:
                self._of_others[int(match[1])] = facts["world_size"]
        return found

    def _nothing(self) -> str:
        if not self._of_others:
            return super()._nothing()
        newest = max(self._of_others)
        return (
            f"the local checkpoints in {self.local_ckpt_dir} are of a world of {self._of_others[newest]} ranks (the "
            f"newest of iteration {newest}), and this world has {GroupWrapper().world_size}: a rank's local part fits "
            "no other number of ranks. Load a global checkpoint, or start as many ranks."
        )

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Read one against its checksum, then unpickle it: it is of this job's own user."""
        path = self._local_ckpt_path_from_id(ckpt_id)
        if not path.exists():
            raise CheckpointingException(f"{path} is not there")
        verify(str(path))
        try:
            state: TensorAwareStateDict = torch.load(path, map_location="cpu", weights_only=False)
        except Exception as error:
            raise DamagedCheckpoint(f"{path}: is as it was written, and cannot be unpickled here: {error}") from error
        return state

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Write one here and now."""
        WriteArchives([(self._packed(state_dict, ckpt_id), self._path_for(ckpt_id))], self._pool)()

    def _request(self, state_dict: TensorAwareStateDict, iteration: int, *, is_async: bool) -> AsyncRequest:
        """See `BaseCheckpointManager._request`: our own states and cliques go without a copy in between."""
        clique = clique_of(self.repl_strategy)
        if self.repl_strategy is not None and clique is None:
            return super()._request(state_dict, iteration, is_async=is_async)
        own = self._ckpt_id(iteration)
        if not isinstance(state_dict, BasicTensorAwareStateDict):
            state_dict.copy_tensors_to_cpu(non_blocking=False)  # it notes where its tensors came from
        packed = self._packed(state_dict, own)
        files = [(packed, self._path_for(own))]
        others = clique.exchange(packed, own, self._pool) if clique is not None else iter(())
        kept = ((other, self._path_for(id_)) for id_, other in others)
        if is_async or clique is None:
            return AsyncRequest(WriteArchives([*files, *kept], self._pool), (), [])
        return AsyncRequest(partial(self._write_each, packed, files[0][1], kept), (), [])

    def _write_each(self, own: Packed, path: str, kept: Iterator[tuple[Packed, str]]) -> None:
        """Write what is kept for others one at a time, as it comes, and then our own, which is sent until the end.

        All of it is received although something cannot be written: the others would wait.
        """
        first: Exception | None = None
        for packed, where in kept:
            first = self._write_one(packed, where) or first
        first = self._write_one(own, path) or first
        if first is not None:
            raise first

    def _write_one(self, packed: Packed, path: str) -> Exception | None:
        try:
            WriteArchives([(packed, path)], self._pool)()
        except (OSError, CheckpointError, TypeError) as error:
            return error
        return None

    def _mend(
        self, iteration: int, state: TensorAwareStateDict | None, missing: set[int]
    ) -> TensorAwareStateDict | None:
        """See `BaseCheckpointManager._mend`. Files go as they are, and are put back where they were lost (W48)."""
        clique = clique_of(self.repl_strategy)
        if clique is None:
            return super()._mend(iteration, state, missing)
        own = self._ckpt_id(iteration)
        mine = [id_ for id_ in self._my_ckpt_ids() if id_[0] == iteration and id_[1] in missing - {self.rank}]
        plan = self._planned([id_ for id_ in mine if self._is_sound(id_)], [own] if state is None else [])
        if plan is None:
            return None
        for entry in plan.entries:
            if entry.sender == self.rank:
                clique.local_group.send_file(str(self._local_ckpt_path_from_id(entry.id_)), entry.receiver)
            elif entry.receiver == self.rank:
                clique.local_group.receive_file(self._path_for(own), entry.sender)
        state = state or self._sound(own)
        return state if all(agreement.gathered(int(state is not None))) else None

    def _is_sound(self, ckpt_id: CkptID) -> bool:
        try:
            verify(str(self._local_ckpt_path_from_id(ckpt_id)))
        except DamagedCheckpoint as error:
            say(str(error))
            return False
        return True

    def _packed(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> Packed:
        facts = {"v": 1, "iteration": ckpt_id[0], "rank": ckpt_id[1], "world_size": GroupWrapper().world_size}
        return with_record(pack(state_dict, self._pool), FACTS, json.dumps(facts).encode())

    def _cleanup(self, iteration: int) -> None:
        """Remove iterations before the newest `keep` that are whole here. What cannot be removed is told."""
        kept = sorted({id_[0] for id_ in self._my_ckpt_ids() if id_[1] == self.rank and id_[0] <= iteration})
        oldest = kept[-self.keep :][0] if kept else iteration
        self._remove(lambda found: found < oldest)

    def _cleanup_failed_save(self, iteration: int) -> None:
        """Remove what is here of that iteration."""
        self._remove(lambda found: found == iteration)

    def _remove(self, condemned: Callable[[int], bool]) -> None:
        for path in self._folder().iterdir():
            match = _NAME.match(path.name)
            if match and condemned(int(match[1])):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    say(f"{path} could not be removed: {error.strerror}")

    def _filename_from_template(self, iteration: int | str, rank: int | str, extra_suffix: str = "") -> str:
        return f"iter_{str(iteration).zfill(7)}_{rank}_local{extra_suffix}.pt"

    def _local_ckpt_path_from_id(self, ckpt_id: CkptID, is_dirty: bool = False) -> Path:
        return self.local_ckpt_dir / self._filename_from_template(ckpt_id[0], ckpt_id[1], ".dirty" if is_dirty else "")

    def _path_for(self, ckpt_id: CkptID) -> str:
        self._folder()
        return str(self._local_ckpt_path_from_id(ckpt_id))

    def _filename_to_id(self, filename: str) -> CkptID:
        match = _NAME.match(filename)
        if match is None:
            raise CheckpointingException(f"{filename} is not the name of a local checkpoint")
        return int(match[1]), int(match[2]), self.session_id


def _facts(path: Path) -> dict[str, Any] | None:
    """Return what a file says of itself; None where it is not whole, or none of ours."""
    if not is_whole(str(path)):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            facts: dict[str, Any] = json.loads(archive.read(f"{FOLDER}/{FACTS}"))
            return facts if isinstance(facts.get("world_size"), int) else None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
