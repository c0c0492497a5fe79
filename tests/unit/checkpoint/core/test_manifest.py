"""The merge of fragments: exactly when whole, to the same bytes, never of two lineages."""

import json
import random
from dataclasses import replace

import pytest

from everstep.checkpoint.core.manifest import Entry, FileFact, Fragment, Manifest, merge
from everstep.errors import CheckpointError, DamagedCheckpoint


def entry(name, rank, *, world=2, value="00ff"):
    return Entry(name=name, path=("model", name), file=f"__{rank}_0.distcp", at=0, length=100, data=64, nbytes=32,
                 xxh3=value, dtype="float32", shape=(4 * world, 2), offsets=(4 * rank, 0), sizes=(4, 2))  # fmt: skip


def fragment(rank, *, world=2, generation=0, save="t", step=20):
    mine = entry("w", rank, world=world)
    bias = replace(entry("b", 0, world=world), offsets=(0,), shape=(8,), sizes=(8,))
    return Fragment(
        save=save, step=step, epoch=0, generation=generation, world_size=world, rank=rank,
        files={f"__{rank}_0.distcp": FileFact(200 + rank, "aa")},
        entries=(mine, bias) if rank == 0 else (mine,),
        needs=(mine.id, bias.id), replicas={} if rank == 0 else {bias.id: bias.xxh3}, training={"torch": "2"},
    )  # fmt: skip


@pytest.mark.sample(100)
@pytest.mark.parametrize("seed", range(300))
def test_any_order_and_any_repeats_of_a_whole_set_give_the_same_bytes(seed):
    rng = random.Random(seed)
    world = rng.choice([1, 2, 3, 8])
    whole = [fragment(r, world=world) for r in range(world)]
    expected = merge(whole).to_bytes()
    mixed = [*whole, *rng.choices(whole, k=rng.randint(0, 4))]
    rng.shuffle(mixed)
    assert merge([Fragment.from_bytes(f.to_bytes()) for f in mixed]).to_bytes() == expected


@pytest.mark.sample(100)
@pytest.mark.parametrize("seed", range(300))
def test_a_part_of_a_set_or_a_mixture_of_two_is_never_merged(seed):
    rng = random.Random(seed)
    world = rng.choice([2, 3, 8])
    whole = [fragment(r, world=world) for r in range(world)]
    part = rng.sample(whole, rng.randint(0, world - 1))
    with pytest.raises(CheckpointError):
        merge(part)
    other = rng.choice([{"generation": 1}, {"save": "u"}, {"step": 40}, {"world": world + 1}])
    strange = fragment(rng.randrange(world), **({"world": world} | other))
    with pytest.raises(CheckpointError):
        merge([f for f in whole if f.rank != strange.rank] + [strange])
    with pytest.raises(CheckpointError):
        merge([*whole, strange])


def test_the_refusal_names_the_missing_ranks():
    with pytest.raises(CheckpointError, match="missing 1-2"):
        merge([fragment(0, world=3)])
    with pytest.raises(CheckpointError, match=r"lineage 0\.0 world 2; save t step 20 lineage 0\.1"):
        merge([fragment(0), fragment(1, generation=1)])


def test_replicas_that_differ_are_an_error_that_names_the_tensor():
    parted = replace(fragment(1), replicas={"b@0": "1234"})
    with pytest.raises(CheckpointError, match="b should be the same on every rank, but rank 1 holds 1234"):
        merge([fragment(0), parted])


def test_an_entry_that_nobody_wrote_is_named():
    with pytest.raises(CheckpointError, match="no rank wrote missing@0"):
        merge([replace(fragment(0), needs=("missing@0",)), fragment(1)])


def test_a_rectangle_that_two_ranks_wrote_is_kept_once_if_it_is_the_same():
    twin = replace(entry("w", 0), file="__1_0.distcp")
    both = [replace(fragment(0), entries=(*fragment(0).entries, entry("w", 1))), replace(fragment(1), entries=(twin,))]
    assert [e.file for e in merge(both).entries if e.offsets == (0, 0)] == ["__0_0.distcp"]
    both[1] = replace(both[1], entries=(replace(twin, xxh3="other"),))
    with pytest.raises(CheckpointError, match="parted"):
        merge(both)


def test_two_things_of_one_name_are_refused():
    other = replace(entry("w", 0), dtype="int64", file="__1_0.distcp")
    with pytest.raises(CheckpointError, match="two things have one name"):
        merge([fragment(0), replace(fragment(1), entries=(other,))])


def manifest_bytes():
    return merge([fragment(0), fragment(1)]).to_bytes()


def test_the_manifest_is_read_back():
    manifest = merge([fragment(0), fragment(1)])
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.total_bytes == 401


def test_no_flipped_bit_and_no_cut_is_overlooked():
    text = manifest_bytes()
    for at in range(0, len(text), 7):
        flipped = bytearray(text)
        flipped[at] ^= 1 << (at % 8)
        with pytest.raises(DamagedCheckpoint):
            Manifest.from_bytes(bytes(flipped))
    for at in range(0, len(text), 13):
        with pytest.raises(DamagedCheckpoint):
            Manifest.from_bytes(text[:at])


@pytest.mark.parametrize(
    ("text", "why"),
    [(b"", "not JSON"), (b"[1]", "not the manifest"), (b'{"format":"x"}', "not the manifest"),
     (b'{"a":1,"a":2}', "stands twice"), (b"[" * 100_000, "not JSON"), (b"\xff\xfe", "not JSON")],
)  # fmt: skip
def test_what_is_no_manifest_is_told_from_one(text, why):
    with pytest.raises(DamagedCheckpoint, match=why):
        Manifest.from_bytes(text)


def test_a_duplicate_key_is_damage_even_if_the_last_one_would_match():
    text = manifest_bytes()
    with pytest.raises(DamagedCheckpoint, match="twice"):
        Manifest.from_bytes(b'{"step":19,' + text[1:])


def test_a_fragment_of_another_version_is_refused():
    body = json.loads(fragment(0).to_bytes()) | {"v": 2}
    with pytest.raises(CheckpointError, match="version is not 1"):
        Fragment.from_bytes(json.dumps(body).encode())


def test_a_tensor_of_which_a_piece_was_not_written_is_no_checkpoint():
    """Every rank has reported, and needs only what it wrote: without the count the hole would be loaded as it is."""
    whole = [fragment(rank, world=3) for rank in range(3)]
    holed = replace(whole[2], entries=(), needs=(whole[2].needs[1],))
    with pytest.raises(CheckpointError, match="wrote 16 of the 24 elements of w"):
        merge([*whole[:2], holed])
    assert len(merge(whole).entries) == 4
