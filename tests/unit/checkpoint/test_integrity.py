"""Whatever is done to the files of a committed checkpoint: noticed, named, the next best taken, never a wrong state.

Real directories, wounded at random: bytes flipped, cut, swapped, doubled or taken away, files and fragments too.
"""

import os
import shutil
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.checkpoint import catalog, memory
from everstep.checkpoint.core import names
from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.core.reshard import Wish, reshard
from everstep.checkpoint.load import open_checkpoint, open_for
from everstep.checkpoint.publish import publish
from everstep.checkpoint.shards import Target, write_shard
from everstep.errors import DamagedCheckpoint
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.states import rank_state

WORLD = 3
STEPS = (20, 40)
FILES = ["manifest.json", ".metadata", *[f"__{r}_0.{kind}" for r in range(WORLD) for kind in ("distcp", "layout.json")]]


class Pair:
    """A rank of a world of two, that takes what three have saved."""

    world_size = 2

    def __init__(self, rank):
        self.rank = rank

    def divided_as(self, layout):
        return True

    def reshard(self, saved, digest):
        wishes = {"model": Wish({0: self.like(saved)}, by_leaf=True), "rng": Wish(draws=True)}
        return reshard(saved, self.rank, 2, wishes, digest)

    def like(self, saved):
        """Six of the weight's twelve rows."""
        weight = saved[0].section("model").leaves[0]
        nbytes = weight.nbytes // 4 * 6
        return replace(weight, shape=(6, 8), nbytes=nbytes, offsets=(6 * self.rank, 0) if self.rank else None)


def save(directory, step):
    folder = os.path.join(directory, str(names.Staging(step, 0, 0, "abcdef01", 1)))
    target = Target("s", step, 0, 0, WORLD, folder)
    states = [rank_state(rank, WORLD, step) for rank in range(WORLD)]
    parts = [
        write_shard(UnsyncedFiles(), target, s.layout, s.layout.to_json(), memoryview(s.payload), {}) for s in states
    ]
    publish(UnsyncedFiles(), directory, folder, parts, lambda manifest: b"metadata of DCP")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two steps, untouched, and what each rank of either world reads of the newer one."""
    path = tmp_path_factory.mktemp("whole")
    for step in STEPS:
        save(str(path), step)
    return path, reads(path / "step-40")


def reads(path):
    """What every rank of either world makes of a checkpoint: its bytes, or the refusal."""
    found = {}
    for rank in range(WORLD):
        found[f"rank {rank}"] = read(lambda rank=rank: open_checkpoint(str(path), rank, WORLD))
    for rank in range(2):
        found[f"pair {rank}"] = read(lambda rank=rank: open_for(str(path), Pair(rank)))
    return found


def read(opening):
    try:
        with opening() as state:
            state.prepare(threads=1)
            leaves = [leaf for leaf in state.layout.leaves() if leaf.path not in state.refused]
            return [(leaf.path, bytes(state.read(leaf.path))) for leaf in leaves]
    except DamagedCheckpoint as error:
        return error


files = st.sampled_from(FILES)
parts = st.tuples(st.floats(0, 1), st.floats(0, 1))


def span(content, part):
    low, high = sorted(int(share * len(content)) for share in part)
    low = max(0, min(low, len(content) - 1))
    return low, max(high, min(low + 1, len(content)))


def flip(content, part, bit):
    low, _ = span(content, part)
    return content[:low] + bytes([content[low] ^ 1 << bit]) + content[low + 1 :] if content else content


def without(content, part, bit):
    low, high = span(content, part)
    return content[:low] + content[high:]


def doubled(content, part, bit):
    low, high = span(content, part)
    return content[:high] + content[low:high] + content[high:]


def shifted(content, part, bit):
    """A range stands a second time in the place of what follows it: the length stays."""
    low, high = span(content, part)
    return (content[:high] + content[low:high] + content[high + high - low :])[: len(content)]


def swapped(content, part, bit):
    low, high = span(content, part)
    size = min(high - low, len(content) - high)
    return (
        content[:low]
        + content[high : high + size]
        + content[low + size : high]
        + content[low : low + size]
        + content[high + size :]
    )


def zeroed(content, part, bit):
    low, high = span(content, part)
    return content[:low] + bytes(high - low) + content[high:]


def cut(content, part, bit):
    return content[: span(content, part)[0]]


BYTES = [flip, without, doubled, shifted, swapped, zeroed, cut]
wounds = st.one_of(
    st.tuples(st.just("bytes"), files, st.sampled_from(BYTES), parts, st.integers(0, 7)),
    st.tuples(st.sampled_from(["delete", "of the step before", "directory"]), files),
    st.tuples(st.sampled_from(["swap", "copy over"]), files, files),
    st.tuples(st.just("copy beside"), files, st.sampled_from(["__7_0.distcp", "__3_0.layout.json", "__0_1.distcp"])),
)


def strike(path, wound):
    kind, name, *rest = wound
    file = path / name
    if not file.is_file():
        return
    if kind == "bytes":
        change, part, bit = rest
        file.write_bytes(change(file.read_bytes(), part, bit))
    elif kind == "delete":
        file.unlink()
    elif kind == "directory":
        file.unlink()
        file.mkdir()
    elif kind == "of the step before":
        shutil.copy(path.parent / "step-20" / name, file)
    elif rest[0] == name or (path / rest[0]).is_dir():
        return
    elif kind == "swap" and (path / rest[0]).is_file():
        one, two = file.read_bytes(), (path / rest[0]).read_bytes()
        file.write_bytes(two)
        (path / rest[0]).write_bytes(one)
    else:
        shutil.copy(file, path / rest[0])


def contents(path):
    return {each.name: each.read_bytes() if each.is_file() else None for each in path.iterdir()}


def examine(whole, directory, many):
    untouched, expected = whole
    shutil.copytree(untouched, directory)
    path = directory / "step-40"
    before = contents(path)
    for wound in many:
        strike(path, wound)
    after = contents(path)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    found, told = catalog.newest_whole(str(directory))
    assert found.step == (20 if changed else 40)
    named = {wound.file for wound in told}
    if "manifest.json" not in changed:
        assert named == changed, "each of them, and no other"
    elif changed:
        assert "manifest.json" in named
    for who, seen in reads(path).items():
        if isinstance(seen, DamagedCheckpoint):
            assert any(name in str(seen) for name in changed) or "manifest" in str(seen), (who, seen)
        else:
            assert seen == expected[who], f"{who} has read a wrong state"
    assert sorted(os.listdir(directory)) == ["step-20", "step-40"], "nothing is deleted"


QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@settings(max_examples=150, derandomize=True, **QUIET)
@given(st.lists(wounds, min_size=1, max_size=3))
def test_no_wound_passes_and_no_wrong_state_is_read(whole, tmp_path, many):
    directory = tmp_path / str(len(os.listdir(tmp_path)))
    examine(whole, directory, many)


@pytest.mark.long
@settings(max_examples=5000, **QUIET)
@given(st.lists(wounds, min_size=1, max_size=4))
def test_no_wound_passes_in_five_thousand(whole, tmp_path, many):
    directory = tmp_path / str(len(os.listdir(tmp_path)))
    examine(whole, directory, many)
    shutil.rmtree(directory)
    directory.mkdir()


@pytest.mark.parametrize("name", FILES)
def test_a_fragment_of_another_save_beside_ours_is_named(whole, tmp_path, name):
    shutil.copytree(whole[0], tmp_path / "kept")
    shutil.copy(tmp_path / "kept" / "step-40" / name, tmp_path / "kept" / "step-40" / "__9_0.distcp")
    found, told = catalog.newest_whole(str(tmp_path / "kept"))
    assert (found.step, [w.file for w in told]) == (20, ["__9_0.distcp"])
    assert "none of this checkpoint's files" in told[0].reason


def test_what_is_prepared_is_read_once_and_what_does_not_fit_is_checked_twice(whole, tmp_path):
    """A budget of nothing: all is verified before the first byte is handed on, and again when it is."""
    shutil.copytree(whole[0], tmp_path / "kept")
    path = tmp_path / "kept" / "step-40"
    for budget in (0, 1 << 30):
        with open_for(str(path), Pair(0)) as state:
            size = state.prepare(budget_bytes=budget)
            assert size > 0
            kept = {name: bytes(state.read(name)) for name, _ in whole[1]["pair 0"]}
            assert list(kept.items()) == whole[1]["pair 0"]
            shard = bytearray((path / "__0_0.distcp").read_bytes())
            entry = next(e for e in state.manifest.entries if e.name == "model.weight" and e.file == "__0_0.distcp")
            shard[entry.data] ^= 1
            (path / "__0_0.distcp").write_bytes(shard)
            if budget:
                assert bytes(state.read("model/weight")) == kept["model/weight"]
            else:
                with pytest.raises(DamagedCheckpoint, match=r"__0_0.distcp: model.weight has checksum"):
                    state.read("model/weight")
        shard[entry.data] ^= 1
        (path / "__0_0.distcp").write_bytes(shard)


@pytest.mark.parametrize(
    ("available", "group_free", "kept"),
    [(1 << 40, None, True), (1 << 40, 1 << 40, True), (1 << 40, 0, False), (0, None, False), (0, 1 << 40, False)],
)
def test_what_is_kept_is_a_share_of_what_the_machine_and_the_control_group_have(
    whole, monkeypatch, available, group_free, kept
):
    """CL-18: where a container may have less than its machine, the ranks in it would be killed together."""
    monkeypatch.setattr(memory, "read", lambda: Memory(available, group_free, "/pod"))
    with open_for(str(whole[0] / "step-40"), Pair(0)) as state:
        assert state.prepare() > 0
        assert any(state._kept.values()) is kept


def test_all_ranks_together_keep_a_quarter_of_what_is_free(whole, monkeypatch):
    with open_for(str(whole[0] / "step-40"), Pair(0)) as state:
        size = state.prepare(budget_bytes=1 << 30)
        quarter = 4 * Pair.world_size * size
        for free, all_of_it in ((quarter, True), (quarter - 1, False)):
            monkeypatch.setattr(memory, "read", lambda free=free: Memory(1 << 40, free, "/pod"))
            state._kept.clear()
            state.prepare()
            assert (sum(map(len, state._kept.values())) == size) is all_of_it
