"""A checkpoint directory that somebody wrote who means harm: none of its code runs, wherever ours reads it."""

import json
import os
import pickle

import pytest

from everstep import cli
from everstep.checkpoint import catalog
from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import checksum
from everstep.checkpoint.dcp_storage import FileSystemReader
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.publish import publish
from everstep.checkpoint.shards import Target, write_shard
from everstep.checkpoint.storage import opening
from everstep.errors import CheckpointError
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.states import rank_state


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def bombed(tmp_path):
    """A whole checkpoint whose pickle of torch's is one that does harm, and where it would be seen."""
    directory, mark = tmp_path / "ck", tmp_path / "it ran"
    directory.mkdir()
    folder = os.path.join(directory, str(names.Staging(20, 0, 0, "abcdef01", 1)))
    state = rank_state(0, 1, 20)
    target = Target("s", 20, 0, 0, 1, folder)
    parts = [write_shard(UnsyncedFiles(), target, state.layout, state.layout.to_json(), memoryview(state.payload), {})]
    publish(UnsyncedFiles(), str(directory), folder, parts, lambda manifest: pickle.dumps(Bomb(mark)))
    return directory, mark


def test_the_bomb_is_one(bombed):
    directory, mark = bombed
    pickle.loads((directory / "step-20" / ".metadata").read_bytes()).close()
    assert mark.exists()


def test_no_command_and_no_restore_runs_what_lies_in_a_directory(bombed, tmp_path, capsys):
    directory, mark = bombed
    found, wounds = catalog.newest_whole(str(directory))
    assert (found.step, wounds) == (20, []), "it is whole: checksums are no signature"
    open_checkpoint(str(directory / "step-20"), 0, 1)
    for words in (
        ("ls",),
        ("verify",),
        ("convert", str(tmp_path / "out"), "--to", "torch"),
        ("rm", "--step", "20", "--last-too"),
    ):
        assert cli.main(["checkpoint", words[0], str(directory), *words[1:]]) in (0, 1)
    assert (tmp_path / "out").exists()
    assert not mark.exists()


def test_torch_s_own_reader_through_ours_is_not_given_a_pickle_that_the_manifest_does_not_know(bombed):
    directory, mark = bombed
    path = directory / "step-20" / ".metadata"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError):
        FileSystemReader(str(directory / "step-20")).read_metadata()
    assert not mark.exists()


def test_a_manifest_that_promises_more_than_there_is_takes_no_memory_for_it(bombed):
    directory, _ = bombed
    path = directory / "step-20" / "manifest.json"
    body = json.loads(path.read_bytes())
    for entry in body["entries"]:
        entry["length"] = entry["nbytes"] = 1 << 50
    for fact in body["files"].values():
        fact["bytes"] = 1 << 50
    del body["digest"]
    body["digest"] = checksum(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(body, sort_keys=True, separators=(",", ":")))
    found, wounds = catalog.newest_whole(str(directory))
    assert found is None
    assert wounds
    with pytest.raises(CheckpointError):
        open_checkpoint(str(directory / "step-20"), 0, 1)


class Held:
    """A file in memory, read a few bytes at a time."""

    def __init__(self, data):
        self.data = data

    def read_into(self, name, into, offset):
        piece = self.data[offset : offset + min(len(into), 3)]
        into[: len(piece)] = piece
        return len(piece)

    def close(self):
        pass


@pytest.mark.parametrize("there", [0, 1, 3, 4, 5, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("promised", [0, 3, 4, 8, 16, 17, 1 << 60])
def test_what_is_there_is_read_and_a_byte_more_than_was_promised_at_most(monkeypatch, there, promised):
    monkeypatch.setattr(opening, "PIECE", 4)
    data = bytes(range(there))
    assert opening.content("d", "f", promised, lambda path: Held(data)) == data[: promised + 1]
