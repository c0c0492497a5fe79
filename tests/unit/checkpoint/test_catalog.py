"""CL-01 and the commands: every wound is named with its file and reason, the next best is taken, nothing is deleted."""

import argparse
import json
import os
import shutil

import pytest

from everstep.checkpoint import catalog, commands
from everstep.checkpoint.core import names
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.publish import condemn, publish
from everstep.checkpoint.shards import Target, write_shard
from everstep.errors import CheckpointError, DamagedCheckpoint, UsageError
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.states import rank_state

WORLD = 2
SHARD = "__1_0.distcp"


def save(directory, step):
    folder = os.path.join(directory, str(names.Staging(step, 0, 0, "abcdef01", 1)))
    target = Target("s", step, 0, 0, WORLD, folder)
    states = [rank_state(rank, WORLD, step) for rank in range(WORLD)]
    parts = [
        write_shard(UnsyncedFiles(), target, s.layout, s.layout.to_json(), memoryview(s.payload), {}) for s in states
    ]
    publish(UnsyncedFiles(), directory, folder, parts, lambda manifest: b"metadata")


@pytest.fixture
def three(tmp_path):
    for step in (20, 40, 60):
        save(str(tmp_path), step)
    return tmp_path


def cut(share):
    def wound(path):
        size = path.stat().st_size
        os.truncate(path, size - 1 if share == "last byte" else share if isinstance(share, int) else int(size * share))

    return wound


def flip(at):
    def wound(path):
        content = bytearray(path.read_bytes())
        content[int(len(content) * at)] ^= 1
        path.write_bytes(content)

    return wound


def zeros(path):
    content = bytearray(path.read_bytes())
    content[64:1024] = bytes(960)
    path.write_bytes(content)


def swap(path):
    other = path.parent / "__0_0.distcp"
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def of_the_step_before(path):
    shutil.copy(path.parent.parent / "step-40" / path.name, path)


def a_directory(path):
    path.unlink()
    path.mkdir()


WOUNDS = {
    "cut to nothing": cut(0), "cut to one byte": cut(1), "cut in half": cut(0.5), "last byte cut": cut("last byte"),
    "bit in the header": flip(0.0), "bit in the payload": flip(0.4), "bit at the end": flip(0.999), "zeros": zeros,
    "swapped": swap, "of the step before": of_the_step_before, "deleted": lambda path: path.unlink(),
    "replaced by a directory": a_directory,
}  # fmt: skip


@pytest.mark.parametrize("name", [SHARD, "__0_0.layout.json"])
@pytest.mark.parametrize("wound", WOUNDS)
def test_a_wound_in_the_newest_is_named_and_the_next_best_is_taken(three, wound, name):
    if wound == "swapped" and name != SHARD:
        return
    WOUNDS[wound](three / "step-60" / name)
    found, wounds = catalog.newest_whole(str(three))
    assert found is not None
    assert found.step == 40
    assert name in [w.file for w in wounds]
    assert all(w.step == 60 and w.reason for w in wounds)
    assert sorted(os.listdir(three)) == ["step-20", "step-40", "step-60"]


@pytest.mark.parametrize("wound", [w for w in WOUNDS if w != "swapped"])
def test_a_wounded_manifest_is_no_manifest(three, wound):
    if wound == "zeros":
        (three / "step-60" / "manifest.json").write_bytes(bytes(500))
    else:
        WOUNDS[wound](three / "step-60" / "manifest.json")
    found, wounds = catalog.newest_whole(str(three))
    assert (found.step, [w.file for w in wounds]) == (40, ["manifest.json"])


@pytest.mark.parametrize("wound", WOUNDS)
def test_a_wound_is_also_met_while_reading(three, wound):
    """The reader checks on its own: what it hands on has matched, or it names the file."""
    WOUNDS[wound](three / "step-60" / SHARD)
    before = bytes(rank_state(1, WORLD, 60).payload)
    read, told = None, ""
    try:
        with open_checkpoint(str(three / "step-60"), 1, WORLD) as state:
            read = bytes(state.payload())
    except DamagedCheckpoint as error:
        told = str(error)
    assert read == before or "step-60/__" in told
    if wound in ("cut to nothing", "zeros", "swapped", "of the step before", "deleted"):
        assert told


def test_a_bit_in_a_tensor_is_told_with_the_tensors_name(three):
    found = catalog.scan(str(three))[0]
    entry = next(e for e in found.manifest.entries if e.name == "model.weight" and e.file == SHARD)
    content = bytearray((three / "step-60" / SHARD).read_bytes())
    content[entry.data + entry.nbytes - 1] ^= 0x80
    (three / "step-60" / SHARD).write_bytes(content)
    with (
        open_checkpoint(str(three / "step-60"), 1, WORLD) as state,
        pytest.raises(DamagedCheckpoint, match=rf"step-60/{SHARD}: model\.weight has checksum"),
    ):
        state.payload()


def test_all_damaged_leaves_none_and_names_each(three):
    for step in (20, 40, 60):
        flip(0.5)(three / f"step-{step}" / SHARD)
    found, wounds = catalog.newest_whole(str(three))
    assert found is None
    assert [w.step for w in wounds] == [60, 40, 20]
    assert len(os.listdir(three)) == 3


def test_a_renamed_checkpoint_does_not_pass_for_another_step(three):
    os.rename(three / "step-60", three / "step-70")
    found, wounds = catalog.newest_whole(str(three))
    assert found.step == 40
    assert "it is of step 60, not 70" in wounds[0].reason


def test_what_only_has_the_name_is_not_listed(three):
    (three / "step-80").mkdir()
    (three / "step-90").write_text("a file")
    (three / "step-95").mkdir()
    (three / "step-95" / "model.safetensors").touch()
    (three / "100").mkdir()
    os.symlink("nowhere", three / "step-99")
    condemn(UnsyncedFiles(), str(three / "step-20"))
    assert [found.step for found in catalog.scan(str(three))] == [60, 40]


def test_a_half_written_directory_with_a_final_name_is_listed_as_incomplete(three):
    """CS-28: nothing of ours makes one; whoever did (a copy that was broken off) is told."""
    (three / "step-60" / "manifest.json").unlink()
    (found, *_) = catalog.scan(str(three))
    assert not found.complete
    assert found.row(0)["complete"] is False


def run(*argv):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["checkpoint", *map(str, argv)])
    return args.run(args)


def test_ls_prints_the_fixed_fields(three, capsys):
    assert run("ls", three, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [set(row) for row in rows] == [{"step", "path", "complete", "tier", "bytes", "world_size", "age_s"}] * 3
    assert [row["step"] for row in rows] == [60, 40, 20]
    assert (rows[0]["tier"], rows[0]["world_size"], rows[0]["complete"]) == ("disk", WORLD, True)
    assert rows[0]["path"] == str(three / "step-60")
    assert 0 <= rows[0]["age_s"] < 60
    assert run("ls", three) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_verify_exits_1_and_tells_step_file_and_reason(three, capsys):
    assert run("verify", three) == 0
    assert capsys.readouterr().out == ""
    flip(0.5)(three / "step-40" / SHARD)
    assert run("verify", three) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"40 {SHARD} has checksum ")
    assert run("verify", three, "--step", 60) == 0
    assert run("verify", three, "--json") == 1
    assert json.loads(capsys.readouterr().out)["damaged"][0]["file"] == SHARD


def test_one_that_is_given_up_while_it_is_read_is_no_wound(three, capsys, monkeypatch):
    """A job that runs takes the manifest and `.metadata` of an old one away at any time."""
    real = catalog.verify

    def slow(found):
        if found.step == 20:
            for name in (names.MANIFEST, ".metadata"):
                os.unlink(os.path.join(found.path, name))
        return real(found)

    monkeypatch.setattr(catalog, "verify", slow)
    assert run("verify", three) == 0
    assert capsys.readouterr().out == ""


def test_verify_of_nothing_is_no_success(three, tmp_path):
    """A mistyped directory, or one of the checkpoints itself, would pass for a verified one."""
    (tmp_path / "empty").mkdir()
    for where in (tmp_path / "empty", os.path.join(three, "step-60")):
        with pytest.raises(UsageError, match=r"no checkpoint in .*; give the directory"):
            run("verify", where)


def test_rm_removes_by_step_and_not_the_last_whole_one_unless_told(three):
    assert run("rm", three, "--step", 20) == 0
    assert sorted(os.listdir(three)) == ["step-40", "step-60"]
    with pytest.raises(UsageError, match="has no checkpoint of step 20; it has: 60, 40"):
        run("rm", three, "--step", 20)
    with pytest.raises(UsageError, match="--last-too"):
        run("rm", three, "--step", 40, "--step", 60)
    flip(0.5)(three / "step-60" / "manifest.json")
    with pytest.raises(UsageError, match="step 40 is the newest"):
        run("rm", three, "--step", 40)
    assert run("rm", three, "--step", 60) == 0
    assert run("rm", three, "--step", 40, "--last-too") == 0
    assert os.listdir(three) == []


def test_rm_leaves_what_is_not_ours(three):
    (three / "step-20" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        catalog.discard(str(three), 20)
    assert (three / "step-20" / "notes.txt").exists()


def test_a_directory_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UsageError, match="--checkpoint-dir"):
        run("ls", tmp_path / "none")


def test_a_rank_of_another_world_says_what_for_it_reads(three):
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks and this world has 4.*open_for"):
        open_checkpoint(str(three / "step-60"), 0, 4)


def test_an_entry_never_leads_out_of_the_directory(three):
    text = (three / "step-60" / "manifest.json").read_bytes()
    body = json.loads(text)
    body["entries"][0]["file"] = "../step-40/__0_0.distcp"
    del body["digest"]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    from everstep.checkpoint.core.manifest import checksum

    body["digest"] = checksum(canonical)
    (three / "step-60" / "manifest.json").write_text(json.dumps(body, sort_keys=True, separators=(",", ":")))
    with pytest.raises(DamagedCheckpoint, match="not a file of it"):
        open_checkpoint(str(three / "step-60"), 0, WORLD)


def test_a_tree_that_was_moved_is_read_from_anywhere(three, tmp_path, monkeypatch):
    """CS-35: nothing in it points anywhere."""
    elsewhere = tmp_path.parent / f"{tmp_path.name}-moved" / "deep"
    elsewhere.parent.mkdir()
    os.rename(three, elsewhere)
    monkeypatch.chdir(elsewhere.parent)
    found, wounds = catalog.newest_whole("deep")
    assert (found.step, wounds) == (60, [])
    with open_checkpoint("deep/step-60", 0, WORLD) as state:
        assert bytes(state.payload()) == rank_state(0, WORLD, 60).payload
    os.rename(elsewhere, three)


@pytest.mark.parametrize("latest", ["file", "directory", "dangling", "out of the tree", "itself"])
def test_a_strange_latest_is_neither_followed_nor_touched(three, tmp_path, latest):
    """CS-35: there is no pointer; what others call so is theirs."""
    path, outside = three / "latest", tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "mine").touch()
    if latest == "directory":
        path.mkdir()
    elif latest == "file":
        path.write_text("60")
    else:
        os.symlink({"dangling": "nowhere", "itself": "latest"}.get(latest, outside), path)
    assert [found.step for found in catalog.scan(str(three))] == [60, 40, 20]
    from everstep.checkpoint.directory import Claim

    claim = Claim(str(three), UnsyncedFiles())
    claim.take("run")
    claim.close()
    assert os.path.lexists(path)
    assert (outside / "mine").exists()


@pytest.mark.parametrize("name", ["manifest.json", SHARD, "__0_0.layout.json"])
def test_a_pipe_in_place_of_a_file_is_a_wound_and_keeps_nobody_waiting(three, name):
    (three / "step-60" / name).unlink()
    os.mkfifo(three / "step-60" / name)
    found, wounds = catalog.newest_whole(str(three))
    assert found.step == 40
    assert wounds[0].file == name
    told = ""
    for rank in range(WORLD):
        try:
            with open_checkpoint(str(three / "step-60"), rank, WORLD) as state:
                state.payload()
        except DamagedCheckpoint as error:
            told += str(error)
    assert f"step-60/{name}: is no regular file" in told


def test_a_checkpoint_of_the_future_has_no_negative_age(three):
    """Clocks jump; ages are shown and decide nothing."""
    os.utime(three / "step-60", (4_000_000_000, 4_000_000_000))
    assert [found.step for found in catalog.scan(str(three))] == [60, 40, 20]
    assert catalog.scan(str(three))[0].row(1_700_000_000.0)["age_s"] == 0.0


def test_nothing_that_decides_about_checkpoints_asks_what_time_of_day_it_is(root):
    """Clocks jump: locks, leases and limits are by monotonic clocks, order is by steps."""
    asking = {path.name for path in (root / "src/everstep/checkpoint").rglob("*.py") if ".wall()" in path.read_text()}
    assert asking == {"commands.py", "ondemand.py"}, "which show an age"
