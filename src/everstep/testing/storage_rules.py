"""What every place where checkpoints lie must hold to: one examination for directories, object stores and fakes.

Each rule is a function of a `Rig`; `RULES` lists them. A rig has one fresh place, opened as often as is asked, and a
way to harm what lies there.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Protocol

from everstep.checkpoint.core import names
from everstep.checkpoint.core.manifest import Fragment, Manifest
from everstep.checkpoint.fileops import close
from everstep.checkpoint.shards import Target, write_shard
from everstep.checkpoint.storage.api import Claiming, Reading, Storage
from everstep.errors import CheckpointError, ConfigurationError
from everstep.testing.states import rank_state

WORLD = 2
JOB = "0123abcd"


class Rig(Protocol):
    """One fresh place."""

    def open(self) -> Storage:
        """Open it once more."""
        ...

    def claim(self, job: str) -> Claiming:
        """A job's claim on it."""
        ...

    def contents(self) -> dict[str, bytes]:
        """All that lies there that a listing shows, by name below the place; owner's and probe's files left out."""
        ...

    def overwrite(self, name: str, content: bytes | None) -> None:
        """Do harm: give a file other content, or (None) take it away."""
        ...

    def die(self, claim: Claiming) -> None:
        """Let the job of a claim die without a word."""
        ...


def token(step: int, attempt: int = 1, job: str = JOB) -> str:
    """Name of a save."""
    return str(names.Staging(step, 0, 0, job, attempt))


def describe(manifest: Manifest) -> bytes:
    """Stand for DCP's metadata."""
    return f"metadata of {manifest.save}".encode()


def write(storage: Storage, step: int, attempt: int = 1, job: str = JOB) -> list[Fragment]:
    """Write the shards of a save."""
    save = token(step, attempt, job)
    target = Target(save, step, 0, 0, WORLD, storage.folder(save))
    states = [rank_state(rank, WORLD, step) for rank in range(WORLD)]
    return [write_shard(storage.files, target, s.layout, s.layout.to_json(), memoryview(s.payload), {}) for s in states]


def save(storage: Storage, step: int, attempt: int = 1, job: str = JOB) -> Manifest:
    """Write and publish."""
    return storage.publish(token(step, attempt, job), write(storage, step, attempt, job), describe)


def content(source: Reading, name: str, size: int, piece: int = 1 << 16) -> bytes:
    """Read a file to its end."""
    made, offset = bytearray(size + 10), 0
    while count := source.read_into(name, memoryview(made)[offset : offset + piece], offset):
        offset += count
    return bytes(made[:offset])


def check(storage: Storage, step: int) -> None:
    """Every byte of a checkpoint is what was saved."""
    (found,) = [one for one in storage.scan() if one.step == step]
    assert found.complete, found.wounds
    assert found.manifest is not None
    source = storage.reading(step)
    try:
        assert Manifest.from_bytes(source.manifest()) == found.manifest
        for name, fact in found.manifest.files.items():
            assert source.size(name) == fact.bytes
            assert len(content(source, name, fact.bytes)) == fact.bytes
        for rank in range(WORLD):
            described = rank_state(rank, WORLD, step).layout.to_json()
            assert content(source, names.layout(rank), len(described)) == described
        assert source.size("nothing of that name") is None
    finally:
        source.close()
        source.close()


def told(claim: Claiming, run: str) -> list[str]:
    """Claim the place; return what was swept. That a store ignores conditions is said too, and no rule's business."""
    return [text for text in claim.take(run) if "does not honour conditional creation" not in text]


def nothing_is_a_checkpoint_before_it_is_published(rig: Rig) -> None:
    """Rule 1 of the storage."""
    storage = rig.open()
    assert storage.scan() == []
    fragments = write(storage, 20)
    assert rig.open().scan() == []
    storage.publish(token(20), fragments, describe)
    check(rig.open(), 20)


def an_unfinished_file_leaves_nothing(rig: Rig) -> None:
    """A writer that fails within a file: it has no name, or is removed with its save."""
    storage = rig.open()
    storage.files.mkdir(storage.folder(token(20)))
    path = f"{storage.folder(token(20))}/{names.shard(0)}"
    fd = storage.files.create(path)
    storage.files.write(fd, b"half of it")
    close(storage.files, fd, path)
    storage.remove(token(20))
    assert rig.contents() == {}


def publishing_twice_does_no_harm(rig: Rig) -> None:
    """Two mergers (EXPERIMENTS C5)."""
    storage = rig.open()
    fragments = write(storage, 20)
    first = storage.publish(token(20), fragments, describe)
    second = rig.open().publish(token(20), fragments[::-1], describe)
    assert first == second
    check(storage, 20)
    with contextlib.suppress(FileNotFoundError):
        storage.remove(token(20))  # what is published has no other name any more
    check(storage, 20)


def another_attempt_of_a_step_takes_its_place_whole(rig: Rig) -> None:
    """The older attempt is damaged; the newer one is whole, and nothing of the older is left."""
    storage = rig.open()
    save(storage, 20, 1)
    harmed = next(name for name in rig.contents() if name.endswith(names.shard(0)))
    rig.overwrite(harmed, b"damaged")
    assert not storage.scan()[0].complete
    made = save(storage, 20, 2)
    check(rig.open(), 20)
    assert made.save == token(20, 2)
    assert len([name for name in rig.contents() if name.endswith(names.shard(0))]) == 1


def what_is_given_up_is_none_at_once_and_its_data_stay_for_readers(rig: Rig) -> None:
    """Retention, in its two halves."""
    storage = rig.open()
    save(storage, 20)
    save(storage, 40)
    source = storage.reading(20)
    size = source.size(names.shard(0))
    assert size
    before = content(source, names.shard(0), size)
    storage.condemn(names.committed(20))
    assert [found.step for found in rig.open().scan()] == [40]
    assert content(source, names.shard(0), size) == before
    source.close()
    assert storage.remove(names.committed(20)) == []
    assert not [name for name in rig.contents() if name.startswith("step-20")]
    check(storage, 40)


def giving_up_what_is_gone_is_file_not_found(rig: Rig) -> None:
    """Removed by hand meanwhile."""
    try:
        rig.open().condemn(names.committed(20))
    except FileNotFoundError:
        return
    raise AssertionError("no word of it")


def what_is_not_ours_stays_and_is_named(rig: Rig) -> None:
    """Rule 3 of the storage."""
    storage = rig.open()
    fragments = write(storage, 20)
    folder = next(name for name in rig.contents()).partition("/")[0]
    rig.overwrite(f"{folder}/notes.txt", b"mine")
    rig.overwrite("notes.txt", b"mine too")
    assert fragments
    assert storage.remove(token(20)) == ["notes.txt"]
    assert rig.contents()["notes.txt"] == b"mine too"
    assert rig.contents()[f"{folder}/notes.txt"] == b"mine"


def wounds_are_seen_by_size(rig: Rig) -> None:
    """What a listing can tell without reading."""
    storage = rig.open()
    save(storage, 20)
    whole = rig.contents()
    shard = next(name for name in whole if name.endswith(names.shard(1)))
    for harm, word in ((whole[shard][:-1], "cut"), (whole[shard] + b"x", "longer"), (None, "missing")):
        rig.overwrite(shard, harm)
        (found,) = rig.open().scan()
        assert not found.complete
        assert [(w.step, w.file) for w in found.wounds] == [(20, names.shard(1))]
        assert word in found.wounds[0].reason
    rig.overwrite(shard, whole[shard])
    manifest = next(name for name in whole if name.endswith(names.MANIFEST))
    rig.overwrite(manifest, whole[manifest][: len(whole[manifest]) // 2])
    (found,) = rig.open().scan()
    assert found.manifest is None
    assert found.wounds[0].file == names.MANIFEST


def a_step_s_name_is_held_to_its_manifest(rig: Rig) -> None:
    """A manifest that somebody copied to another step."""
    storage = rig.open()
    save(storage, 20)
    manifest = next(name for name in rig.contents() if name.endswith(names.MANIFEST))
    rig.overwrite(manifest.replace("step-20/", "step-70/"), rig.contents()[manifest])
    found = {one.step: one for one in rig.open().scan()}
    assert found[20].complete
    assert not found[70].complete
    assert "it is of step 20, not 70" in found[70].wounds[0].reason


def one_job_at_a_time(rig: Rig) -> None:
    """A second is refused by the first one's name, and free when that has gone."""
    first = rig.claim("aaaaaaaa")
    assert told(first, "the first run") == []
    refused = ""
    try:
        rig.claim("bbbbbbbb").take("the second run")
    except ConfigurationError as error:
        refused = str(error)
    assert "is in use by the run the first run (process" in refused, refused or "two jobs in one place"
    assert "End that job" in refused
    first.close()
    first.close()
    third = rig.claim("cccccccc")
    assert told(third, "the third run") == []
    third.close()
    assert rig.contents() == {}


def leftovers_of_the_dead_are_swept_and_nothing_else(rig: Rig) -> None:
    """A job died in the midst of a save; a published checkpoint and what is not ours stay."""
    dead = rig.claim("aaaaaaaa")
    dead.take("dead")
    storage = rig.open()
    save(storage, 20, job="aaaaaaaa")
    write(storage, 30, job="aaaaaaaa")
    rig.overwrite("other/notes.txt", b"mine")
    rig.die(dead)
    mine = rig.claim("bbbbbbbb")
    swept = told(mine, "mine")
    assert len(swept) == 1
    assert "left over by a writer that is gone" in swept[0]
    assert not [name for name in rig.contents() if name.startswith("step-30")]
    assert rig.contents()["other/notes.txt"] == b"mine"
    check(storage, 20)
    mine.close()


def a_save_that_somebody_removed_is_not_published(rig: Rig) -> None:
    """Its shards are gone before the merge."""
    storage = rig.open()
    fragments = write(storage, 20)
    for name in list(rig.contents()):
        rig.overwrite(name, None)
    refused = ""
    try:
        storage.publish(token(20), fragments, describe)
    except CheckpointError as error:
        refused = str(error)
    assert "somebody removed it" in refused, refused or "published without its data"
    assert rig.open().scan() == []


def reads_of_any_size_and_place_are_what_was_written(rig: Rig) -> None:
    """Ranges: small, across pieces, at the end, beyond it."""
    storage = rig.open()
    made = save(storage, 20)
    name, fact = names.shard(0), made.files[names.shard(0)]
    source = storage.reading(20)
    whole = content(source, name, fact.bytes)
    for offset in (0, 1, 63, fact.bytes // 2, fact.bytes - 1):
        for count in (1, 7, 64, fact.bytes):
            into = memoryview(bytearray(count))
            found = source.read_into(name, into, offset)
            assert 0 < found <= count
            assert bytes(into[:found]) == whole[offset : offset + found]
    assert source.read_into(name, memoryview(bytearray(10)), fact.bytes) == 0
    try:
        source.read_into("__9_0.distcp", memoryview(bytearray(10)), 0)
    except FileNotFoundError:
        source.close()
        return
    raise AssertionError("a file that is not there was read")


RULES: Iterable[Callable[[Rig], None]] = (
    nothing_is_a_checkpoint_before_it_is_published,
    an_unfinished_file_leaves_nothing,
    publishing_twice_does_no_harm,
    another_attempt_of_a_step_takes_its_place_whole,
    what_is_given_up_is_none_at_once_and_its_data_stay_for_readers,
    giving_up_what_is_gone_is_file_not_found,
    what_is_not_ours_stays_and_is_named,
    wounds_are_seen_by_size,
    a_step_s_name_is_held_to_its_manifest,
    one_job_at_a_time,
    leftovers_of_the_dead_are_swept_and_nothing_else,
    a_save_that_somebody_removed_is_not_published,
    reads_of_any_size_and_place_are_what_was_written,
)
"""All of them."""


def below(root: str) -> dict[str, bytes]:
    """All files below a directory, by relative path; those of owners and probes left out."""
    found: dict[str, bytes] = {}
    for folder, _, inside in os.walk(root):
        for name in inside:
            path = os.path.join(folder, name)
            key = os.path.relpath(path, root)
            if not key.startswith(".everstep"):
                with open(path, "rb") as file:
                    found[key] = file.read()
    return found
