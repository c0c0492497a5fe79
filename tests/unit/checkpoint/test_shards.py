"""One rank's part: what is written, by whom, under which names; and what a reader gets of it."""

import zipfile

import pytest

from everstep.checkpoint.core.layout import Layout, Leaf, Ref, Section, place
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.publish import publish
from everstep.checkpoint.shards import Target, write_shard
from everstep.errors import CheckpointError
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.states import rank_state


def target(tmp_path, world):
    return Target("s", 5, 0, 0, world, str(tmp_path / "step-5.0.0.0123abcd-1.tmp"))


def write(tmp_path, layout, payload):
    where = target(tmp_path, layout.world_size)
    return write_shard(UnsyncedFiles(), where, layout, layout.to_json(), memoryview(payload), {})


def finish(tmp_path, fragments):
    folder = target(tmp_path, len(fragments)).folder
    publish(UnsyncedFiles(), str(tmp_path), folder, fragments, lambda manifest: b"")
    return str(tmp_path / "step-5")


def test_every_archive_lies_aligned_where_its_entry_says(tmp_path):
    state = rank_state(0, 2, 5)
    fragment = write(tmp_path, state.layout, state.payload)
    whole = (tmp_path / "step-5.0.0.0123abcd-1.tmp" / "__0_0.distcp").read_bytes()
    for entry in fragment.entries:
        archive = whole[entry.at : entry.at + entry.length]
        (tmp_path / "one").write_bytes(archive)
        with zipfile.ZipFile(tmp_path / "one") as read:
            assert read.testzip() is None
            if entry.dtype is not None:
                assert (entry.at % 64, entry.data % 64) == (0, 0)
                assert read.read("archive/data/0") == whole[entry.data : entry.data + entry.nbytes]


def test_what_rank_0_holds_alone_has_its_plain_name_too(tmp_path):
    states = [rank_state(rank, 2, 5) for rank in range(2)]
    entries = [write(tmp_path, s.layout, s.payload).entries for s in states]
    places = {e.name: (e.file, e.at) for e in (*entries[0], *entries[1])}
    assert places["rng.python"] == places["ranks.0.rng.python"]
    assert places["model.seen"] == places["ranks.0.model.seen"]
    assert "ranks.1.rng.python" in places
    assert "rng.python" not in {e.name for e in entries[1]}


def test_an_alias_of_another_shape_reads_its_originals_bytes(tmp_path):
    leaves, end = place([
        Leaf("model/a", "float32", (2, 3), 24, replicated=True),
        Leaf("model/b", "float32", (6,), 24, replicated=True, alias_of="model/a"),
    ])  # fmt: skip
    layout = Layout(0, 1, (Section("model", {"a": Ref(0), "b": Ref(1)}, leaves),))
    payload = bytes(range(24)).ljust(end, b"\0")
    path = finish(tmp_path, [write(tmp_path, layout, payload)])
    with open_checkpoint(path, 0, 1) as state:
        assert state.read("model/b") == state.read("model/a") == payload[:24]


def test_replicas_that_parted_are_found_when_the_parts_are_merged(tmp_path):
    states = [rank_state(rank, 2, 5) for rank in range(2)]
    parted = bytearray(states[1].payload)
    bias = next(leaf for leaf in states[1].layout.leaves() if leaf.path == "model/bias")
    parted[bias.offset] ^= 1
    fragments = [write(tmp_path, states[0].layout, states[0].payload), write(tmp_path, states[1].layout, parted)]
    with pytest.raises(CheckpointError, match=r"model\.bias should be the same on every rank, but rank 1"):
        finish(tmp_path, fragments)
