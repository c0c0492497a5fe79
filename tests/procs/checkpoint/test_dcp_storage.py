"""DCP's save, load and async_save through our storage: whole or not there, wounds named, torch's own reader content."""

import contextlib
import errno
import fcntl
import os
import pickle
import random
import re
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

from everstep.checkpoint import catalog
from everstep.checkpoint.dcp_files import Staging
from everstep.checkpoint.dcp_storage import FileSystemReader, FileSystemWriter, split
from everstep.checkpoint.publish import read_manifest
from everstep.errors import DamagedCheckpoint, UsageError
from everstep.testing.disks import HostileFiles, PowerLoss, UnsyncedFiles, Wound

pytestmark = [pytest.mark.procs, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def state(k=1):
    base = torch.arange(1000.0) + k
    return {
        "model": {
            "w": torch.arange(12.0).view(3, 4) + k, "t": (torch.arange(6.0).view(2, 3) * k).t(), "view": base[5:9],
            "bf16": torch.ones(5, dtype=torch.bfloat16) * k, "fp8": torch.ones(3).to(torch.float8_e4m3fn),
            "zero": torch.tensor(k), "empty": torch.empty(0, 3),
            "complex": torch.ones(3, dtype=torch.complex64).conj() * k,
            "every": torch.arange(8.0)[::2] + k, "wide": torch.ones(1).expand(4) * k,
            "bool": torch.tensor([True, False]),
        },
        "step": k, "name": "x", "list": [k, torch.ones(2) * k],
    }  # fmt: skip


def blank():
    made = state(0)
    made["model"] = {name: torch.zeros_like(value) for name, value in made["model"].items()}
    return made


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return all(map(same, a, b)) if isinstance(a, list) else a == b


def save(path, k=1, files=None, **kwargs):
    writer = FileSystemWriter(path, **kwargs)
    writer.files = files or UnsyncedFiles()
    dcp.save(state(k), storage_writer=writer, no_dist=True)


def load(path, reader=None):
    into = blank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, storage_reader=reader or FileSystemReader(path), no_dist=True)
    return into


@pytest.mark.parametrize("threads", [1, 3])
def test_it_is_read_by_us_by_torch_and_by_verify(tmp_path, threads):
    path = tmp_path / "step-7"
    save(path, thread_count=threads)
    assert sorted(os.listdir(path)) == [".metadata", *(f"__0_{n}.distcp" for n in range(threads)), "manifest.json"]
    assert os.listdir(tmp_path) == ["step-7"]
    assert same(load(path), state())
    assert same(load(path, dcp.FileSystemReader(path)), state())
    assert catalog.newest_whole(str(tmp_path))[0].step == 7
    os.rename(path, tmp_path / "moved")
    assert same(load(tmp_path / "moved"), state())


def test_a_view_costs_what_it_shows(tmp_path):
    save(tmp_path / "x")
    assert sum(file.stat().st_size for file in (tmp_path / "x").iterdir()) < 30_000


def test_what_changes_after_async_save_has_returned_is_not_in_it(tmp_path):
    live = state()
    writing = dcp.async_save(live, storage_writer=FileSystemWriter(tmp_path / "x"), no_dist=True)
    for value in live["model"].values():
        value.zero_() if value.is_contiguous() else None
    writing.result()
    assert same(load(tmp_path / "x"), state())


def test_one_that_has_the_name_is_replaced_in_one_step_and_what_lies_beside_it_stays(tmp_path):
    path = tmp_path / "x"
    path.mkdir()
    save(path)
    (path / "config.json").write_text("{}")
    (path / "more").mkdir()
    save(path, 2)
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "config.json", "manifest.json", "more"]
    assert same(load(path), state(2))
    with pytest.raises(CheckpointException, match="overwrite=False"):
        save(path, 3, overwrite=False)
    (tmp_path / "link").symlink_to("x")
    save(tmp_path / "link", 4)
    assert same(load(path), state(4))
    (tmp_path / "link").unlink()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointException, match="no directory"):
        save(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["file", "x"]


def whole(folder):
    """The save that a fresh reader finds whole in a directory, every checksum compared; None where there is none."""
    found, _ = catalog.newest_whole(str(folder))
    return read_manifest(found.path).save if found is not None else None


@pytest.mark.parametrize("luck", [None, 0, 1, 2])
def test_power_lost_after_any_call_leaves_the_old_one_or_the_new(tmp_path, luck):
    (tmp_path / "d").mkdir()
    files, seen, count = PowerLoss(str(tmp_path / "d")), [None], [0]

    def lose_power():
        count[0] += 1
        files.after(str(tmp_path / "after"), None if luck is None else random.Random(luck * 1000 + count[0]))
        found = whole(tmp_path / "after")
        assert not (tmp_path / "after/step-7").exists() or found is not None, "something torn has the name"
        assert last is None or found is not None
        seen.append(found)

    files.watch, last = lose_power, None
    for k in (1, 2):
        save(tmp_path / "d/step-7", k, files)
        last = whole(tmp_path / "d")
        assert seen[-1] in (last, *seen[:-1])
    assert len(set(seen)) == 3
    assert count[0] > 40


def test_a_disk_that_fails_at_any_call_harms_nothing_that_was_there(tmp_path):
    save(tmp_path / "step-7")
    first = whole(tmp_path)
    counted = HostileFiles()
    save(tmp_path / "step-8", files=counted)
    shutil.rmtree(tmp_path / "step-8")
    for position in range(1, counted.calls["any"] + 1):
        try:
            save(tmp_path / "step-7", 2, HostileFiles({("any", position): Wound(errno.ENOSPC)}))
        except (CheckpointException, OSError) as error:
            told = str(error)
        else:
            told = os.strerror(errno.ENOSPC)
        assert os.strerror(errno.ENOSPC) in told
        assert whole(tmp_path) is not None
        for left in tmp_path.glob(".step-7.*"):  # where the disk failed at the clean-up itself
            shutil.rmtree(left)
        if whole(tmp_path) != first:
            shutil.rmtree(tmp_path / "step-7")
            save(tmp_path / "step-7")
            first = whole(tmp_path)
    assert os.listdir(tmp_path) == ["step-7"]


def test_every_wound_is_noticed_and_named(tmp_path):
    save(tmp_path / "x", thread_count=2)
    rng = random.Random(5)
    for name in sorted(os.listdir(tmp_path / "x")):
        file = tmp_path / "x" / name
        content = file.read_bytes()
        for at in rng.sample(range(len(content)), 8):
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
            try:
                found, told = load(tmp_path / "x"), ""
            except CheckpointException as error:
                found, told = None, str(error)
            if found is None:
                assert re.search(rf"/x/{re.escape(name)}: ", told), told
            else:  # between the entries of a shard, where nobody reads
                assert same(found, state()), (name, at)
                assert name.endswith(".distcp")
        for wounded in (content[: len(content) // 2], b""):
            file.write_bytes(wounded)
            with pytest.raises((CheckpointException, DamagedCheckpoint), match=name.replace(".", r"\.")):
                load(tmp_path / "x")
        file.unlink()
        with pytest.raises((CheckpointException, DamagedCheckpoint), match=name.replace(".", r"\.")):
            load(tmp_path / "x")
        file.write_bytes(content)
    assert same(load(tmp_path / "x"), state())


def test_a_checkpoint_of_torchs_own_is_read_when_that_is_asked_for(tmp_path):
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "x"), no_dist=True)
    with pytest.raises((CheckpointException, DamagedCheckpoint), match="verify=False"):
        load(tmp_path / "x")
    assert same(load(tmp_path / "x", FileSystemReader(tmp_path / "x", verify=False)), state())


def test_what_is_not_meant_is_refused(tmp_path):
    with pytest.raises(UsageError, match="use_collectives=True"):
        FileSystemWriter(tmp_path / "x").set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(UsageError, match="TORCH_SAVE"):
        FileSystemWriter(tmp_path / "x", serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS)
    assert pickle.loads(pickle.dumps(FileSystemWriter(tmp_path / "x"))).path == tmp_path / "x"


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_and_of_others_are_not(tmp_path):
    files = UnsyncedFiles()
    living = Staging(str(tmp_path / "x"), files)
    dead = Staging(str(tmp_path / "x"), files)
    (tmp_path / dead.folder / "__0_0.distcp").write_bytes(b"half")
    dead.published()  # its process ends: the lock is free, the files stay
    others = Staging(str(tmp_path / "x"), files)
    (tmp_path / others.folder / "notes.txt").write_text("mine")
    others.published()
    mine = Staging(str(tmp_path / "x"), files)
    assert not os.path.exists(dead.folder)
    assert os.path.exists(living.folder)
    assert os.listdir(others.folder) == ["notes.txt"]
    living.discard()
    mine.discard()
    mine.discard()
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == []


class LookedAt(UnsyncedFiles):
    """After each call another rank looks whether the owner is alive, and still holds its lock at the next one."""

    def __init__(self, parent):
        super().__init__()
        self.parent, self.looks, self.taken = parent, [], 0

    def _look(self):
        for found in self.parent.glob(".*.tmp/.owner"):
            fd = os.open(found, os.O_RDWR)
            self.looks.append(fd)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.taken += 1

    def create(self, path):
        fd = super().create(path)
        self._look()
        return fd

    def rename(self, old, new):
        super().rename(old, new)
        self._look()


def test_a_look_at_one_that_is_being_made_neither_fails_it_nor_takes_it_for_dead(tmp_path):
    files = LookedAt(tmp_path)
    one = Staging(str(tmp_path / "x"), files)
    other = Staging(str(tmp_path / "x"), files)
    assert os.path.exists(one.folder)
    assert len(files.looks) >= 2
    assert files.taken == 0
    for fd in files.looks:
        os.close(fd)
    one.discard()
    other.discard()
    assert os.listdir(tmp_path) == []


def test_items_are_spread_by_size_and_none_is_lost():
    plan = dcp.DefaultSavePlanner()
    plan.set_up_planner({f"w{n}": torch.zeros(n * 7 % 50 + 1) for n in range(40)}, is_coordinator=True)
    made: SavePlan = plan.create_local_plan()
    buckets = split(made.items, 4)
    sizes = [sum(item.tensor_data.chunk.sizes.numel() for item in bucket) for bucket in buckets]
    assert max(sizes) - min(sizes) <= 50
    assert sorted(item.index.fqn for bucket in buckets for item in bucket) == sorted(i.index.fqn for i in made.items)
