"""Whole or not there: a save examined after every single call, with power lost, disks full and mergers dying."""

import errno
import json
import os
import random
import shutil

import pytest

from everstep.checkpoint import catalog
from everstep.checkpoint.core import names
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.publish import condemn, publish, remove
from everstep.checkpoint.shards import Target, write_shard
from everstep.errors import CheckpointError
from everstep.testing.disks import HostileFiles, PowerLoss, UnsyncedFiles, Wound
from everstep.testing.states import rank_state

WORLD = 2


def describe(manifest):
    """Stands for DCP's metadata: a function of the manifest."""
    return json.dumps([entry.name for entry in manifest.entries]).encode()


def staging(directory, step, attempt=1):
    return os.path.join(directory, str(names.Staging(step, 0, 0, "abcdef01", attempt)))


def write(files, directory, step, attempt=1, ranks=range(WORLD)):
    folder = staging(directory, step, attempt)
    target = Target(os.path.basename(folder), step, 0, 0, WORLD, folder)
    states = [rank_state(rank, WORLD, step) for rank in ranks]
    return folder, [write_shard(files, target, s.layout, s.layout.to_json(), memoryview(s.payload), {}) for s in states]


def save(files, directory, step, attempt=1):
    folder, fragments = write(files, directory, step, attempt)
    return publish(files, directory, folder, fragments, describe)


def check_state(path, step):
    for rank in range(WORLD):
        with open_checkpoint(path, rank, WORLD) as state:
            assert (state.step, bytes(state.payload())) == (step, rank_state(rank, WORLD, step).payload)


def oracle(directory, last):
    """A fresh reader finds a whole verified checkpoint that is none older than the last committed one."""
    found, _ = catalog.newest_whole(directory)
    if found is None:
        assert last is None, f"step {last} was committed and is gone"
        return None
    assert last is None or found.step >= last
    check_state(found.path, found.step)
    return found.step


def test_a_saved_state_is_read_back_bit_for_bit(tmp_path):
    manifest = save(UnsyncedFiles(), str(tmp_path), 20)
    assert os.listdir(tmp_path) == ["step-20"]
    assert manifest.total_bytes == sum(os.stat(tmp_path / "step-20" / name).st_size for name in manifest.files)
    assert oracle(str(tmp_path), 20) == 20
    assert {e.name for e in manifest.entries if e.dtype is None} >= {"model.steps", "ranks.1.rng.python"}


def test_what_all_ranks_hold_is_written_once_and_aliases_cost_nothing(tmp_path):
    manifest = save(UnsyncedFiles(), str(tmp_path), 20)
    places = {e.name: (e.file, e.data) for e in manifest.entries}
    assert places["model.tied"] == places["model.bias"]
    assert [e.name for e in manifest.entries].count("model.bias") == 1


@pytest.mark.parametrize("luck", [None, 0, 1, 2], ids=["nothing survives", "luck 0", "luck 1", "luck 2"])
def test_power_lost_after_any_call_leaves_a_whole_checkpoint_or_none(tmp_path, luck):
    directory = tmp_path / "d"
    directory.mkdir()
    files, last, seen = PowerLoss(str(directory)), [None], set()

    def lose_power():
        files.after(str(tmp_path / "after"), None if luck is None else random.Random(luck * 1000 + len(calls)))
        calls.append(1)
        seen.add(oracle(str(tmp_path / "after"), last[0]))

    calls = []
    files.watch = lose_power
    for step in (20, 40):
        save(files, str(directory), step)
        last[0] = step
    condemn(files, str(directory / "step-20"))
    remove(files, str(directory / "step-20"))
    assert seen == {None, 20, 40}
    assert len(calls) > 50


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_at_any_call_harms_nothing_that_was_there(tmp_path, code):
    save(UnsyncedFiles(), str(tmp_path), 20)
    counted = HostileFiles()
    save(counted, str(tmp_path), 30)
    shutil.rmtree(tmp_path / "step-30")
    for position in range(1, counted.calls["any"] + 1):
        files, named = HostileFiles({("any", position): Wound(code)}), True
        try:
            save(files, str(tmp_path), 40, attempt=position)
        except OSError as error:
            named = bool(error.filename)
            if os.path.exists(staging(str(tmp_path), 40, position)):
                assert oracle(str(tmp_path), 20) == 20
                remove(UnsyncedFiles(), staging(str(tmp_path), 40, position))
        else:
            assert oracle(str(tmp_path), 40) == 40
        assert named, "an error without its file"
        if oracle(str(tmp_path), 20) == 40:
            shutil.rmtree(tmp_path / "step-40")
        assert os.listdir(tmp_path) == ["step-20"], position


def test_a_merger_that_fails_anywhere_is_followed_by_one_that_does_it(tmp_path):
    for position in range(1, 20):
        folder, fragments = write(UnsyncedFiles(), str(tmp_path), 20, attempt=position)
        files = HostileFiles({("any", position): Wound(errno.EIO)})
        try:
            publish(files, str(tmp_path), folder, fragments, describe)
            done = True
        except OSError:
            done = False
        again = publish(UnsyncedFiles(), str(tmp_path), folder, fragments[::-1], describe)
        check_state(str(tmp_path / "step-20"), 20)
        assert again.save == os.path.basename(folder)
        assert os.listdir(tmp_path) == ["step-20"]
        shutil.rmtree(tmp_path / "step-20")
    assert done, "the last position lies behind all calls"


def test_two_mergers_write_the_same_bytes(tmp_path):
    read = []
    for order in (1, -1):
        folder, fragments = write(UnsyncedFiles(), str(tmp_path), 20)
        publish(UnsyncedFiles(), str(tmp_path), folder, fragments[::order], describe)
        read.append({name: (tmp_path / "step-20" / name).read_bytes() for name in os.listdir(tmp_path / "step-20")})
        shutil.rmtree(tmp_path / "step-20")
    assert read[0] == read[1]


def test_an_older_attempt_of_the_same_step_is_replaced_at_once_and_removed(tmp_path):
    save(UnsyncedFiles(), str(tmp_path), 20, attempt=1)
    (tmp_path / "step-20" / "__0_0.distcp").write_bytes(b"damaged")
    files = HostileFiles()
    manifest = save(files, str(tmp_path), 20, attempt=2)
    assert files.calls["exchange"] == 1
    assert os.listdir(tmp_path) == ["step-20"]
    assert manifest.save.endswith("-2.tmp")
    check_state(str(tmp_path / "step-20"), 20)


def test_a_directory_of_somebody_else_with_that_name_is_left_alone(tmp_path):
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20" / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"no checkpoint of Everstep's.*move it away"):
        save(UnsyncedFiles(), str(tmp_path), 20)
    assert os.listdir(tmp_path / "step-20") == ["model.safetensors"]


def test_a_save_whose_directory_was_removed_by_hand_says_so(tmp_path):
    folder, fragments = write(UnsyncedFiles(), str(tmp_path), 20)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="somebody removed it"):
        publish(UnsyncedFiles(), str(tmp_path), folder, fragments, describe)


def test_a_condemned_checkpoint_is_none_but_keeps_its_data_for_readers(tmp_path):
    save(UnsyncedFiles(), str(tmp_path), 20)
    with open_checkpoint(str(tmp_path / "step-20"), 0, WORLD) as reader:
        reader.read("model/weight")
        condemn(UnsyncedFiles(), str(tmp_path / "step-20"))
        condemn(UnsyncedFiles(), str(tmp_path / "step-20"))
        assert catalog.scan(str(tmp_path)) == []
        assert not (tmp_path / "step-20" / ".metadata").exists()
        assert bytes(reader.payload()) == rank_state(0, WORLD, 20).payload
    assert remove(UnsyncedFiles(), str(tmp_path / "step-20")) == []
    assert os.listdir(tmp_path) == []


def test_removing_takes_what_is_ours_and_leaves_the_rest_where_it_is(tmp_path):
    save(UnsyncedFiles(), str(tmp_path), 20)
    (tmp_path / "step-20" / "notes.txt").write_text("mine")
    assert remove(UnsyncedFiles(), str(tmp_path / "step-20")) == ["notes.txt"]
    assert sorted(os.listdir(tmp_path / "step-20")) == ["manifest.condemned.json", "notes.txt"]


def test_the_order_of_calls_is_the_mechanism(tmp_path):
    """CS-29: data, names, publication, its name; then, and only then, what is older goes."""
    order = []

    class Told(UnsyncedFiles):
        def fsync(self, fd):
            order.append("fsync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            super().fsync(fd)

        def fsync_dir(self, path):
            order.append("fsync " + ("folder" if path.endswith(".tmp") else "directory"))
            super().fsync_dir(path)

        def rename(self, old, new):
            order.append("rename")
            super().rename(old, new)

    save(Told(), str(tmp_path), 20)
    ending = ["fsync .metadata", "fsync manifest.json", "fsync folder", "rename", "fsync directory"]
    assert order[-5:] == ending
    assert order[-6] == "fsync folder"
    assert {"fsync __0_0.distcp", "fsync __1_0.distcp", "fsync __1_0.layout.json"} <= set(order[:-5])


def test_a_second_merger_that_knows_another_metric_finds_the_save_published(tmp_path):
    """A coordinator that died had published; its successor, which has heard one more number, merges again."""
    files, directory = UnsyncedFiles(), str(tmp_path)
    folder, fragments = write(files, directory, 20)
    first = publish(files, directory, folder, fragments, describe, {})
    again = publish(files, directory, folder, fragments, describe, {"loss": 1.0})
    assert again == first
    assert oracle(directory, 20) == 20


def test_a_leftover_that_an_old_listing_does_not_show_is_replaced(tmp_path):
    """A merger died on another node after its first file; the listing here is that of before (CL-05)."""

    class Stale(UnsyncedFiles):
        def listdir(self, path):
            return [name for name in super().listdir(path) if name not in (names.METADATA, names.MANIFEST)]

    files, directory = Stale(), str(tmp_path)
    folder, fragments = write(files, directory, 20)
    for name in (names.METADATA, names.MANIFEST):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(b"half of i")
    publish(files, directory, folder, fragments, describe)
    assert oracle(directory, 20) == 20
