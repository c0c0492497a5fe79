"""Directories, and object stores by the fake that stands for them, under one examination; the fake's wounds."""

import os

import pytest

from everstep.checkpoint.core import names
from everstep.checkpoint.directory import Claim
from everstep.checkpoint.storage import object_claim, opening
from everstep.checkpoint.storage.object_claim import ObjectClaim
from everstep.checkpoint.storage.objects import ObjectStorage
from everstep.checkpoint.storage.owner import OWNER
from everstep.checkpoint.storage.posix import PosixStorage
from everstep.clock import SystemClock
from everstep.errors import CheckpointError, ConfigurationError, UsageError
from everstep.testing import storage_rules as rules
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.memory_bucket import MemoryBucket


class Fast(SystemClock):
    """Time passes when somebody sleeps; whoever renews waits for ever."""

    def __init__(self):
        self.passed, self.living = 0.0, []

    def now(self):
        return self.passed

    def sleep(self, seconds):
        self.passed += seconds
        for claim in self.living:
            claim.renew()

    def wait(self, event, timeout_s):
        return event.wait()


class Directory:
    def __init__(self, folder):
        self.root = str(folder)

    def open(self):
        return PosixStorage(self.root, UnsyncedFiles())

    def claim(self, job):
        return Claim(self.root, UnsyncedFiles(), job=job)

    def contents(self):
        return rules.below(self.root)

    def overwrite(self, name, content):
        path = os.path.join(self.root, name)
        if content is None:
            os.unlink(path)
            if not os.listdir(os.path.dirname(path)):
                os.rmdir(os.path.dirname(path))
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)

    def die(self, claim):
        os.close(claim.fd)
        claim.fd = -1


class Memory:
    def __init__(self):
        self.bucket, self.clock = MemoryBucket(), Fast()

    def open(self):
        return ObjectStorage(self.bucket)

    def claim(self, job):
        claim = ObjectClaim(self.bucket, job, clock=self.clock)
        if not self.clock.living:
            self.clock.living.append(claim)
        return claim

    def contents(self):
        return {key: found[0] for key, found in self.bucket.objects.items() if not key.startswith(".everstep")}

    def overwrite(self, name, content):
        if content is None:
            del self.bucket.objects[name]
        else:
            self.bucket.objects[name] = content, 1.0

    def die(self, claim):
        self.clock.living.clear()
        claim._over.set()
        claim._renewer.join()
        claim._renewer = None


@pytest.fixture(params=["directory", "objects", "objects without conditions"])
def rig(request, tmp_path):
    if request.param == "directory":
        return Directory(tmp_path)
    made = Memory()
    made.bucket.exclusive = request.param == "objects"
    return made


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_every_place_holds_to_the_rules(rig, rule):
    rule(rig)


@pytest.fixture
def memory():
    return Memory()


def test_a_create_whose_answer_was_lost_is_ours_and_one_save(memory):
    """The store made the manifest, and the connection broke: the next merger meets its own."""
    storage, broken = memory.open(), [True]

    def after(verb, key):
        if verb == "create" and key.endswith(names.MANIFEST) and broken.pop():
            raise ConnectionResetError(104, "reset")

    fragments = rules.write(storage, 20)
    memory.bucket.after = after
    with pytest.raises(ConnectionResetError):
        storage.publish(rules.token(20), fragments, rules.describe)
    storage.remove(rules.token(20))  # what the agent has every writer do after a failure
    rules.check(storage, 20)
    memory.bucket.after = lambda verb, key: None
    storage.publish(rules.token(20), fragments, rules.describe)
    rules.check(storage, 20)


@pytest.mark.parametrize("verb", ["upload", "write", "finish", "put", "create", "items"])
def test_a_store_that_fails_at_any_call_leaves_the_old_and_serves_the_next(memory, verb):
    storage = memory.open()
    rules.save(storage, 10)
    calls = []

    def count(what, key):
        calls.append((what, key))

    memory.bucket.before = count
    rules.save(storage, 20)
    made = len(calls)
    storage.remove("step-20")
    for position in range(made):
        if calls[position][0] != verb:
            continue
        left = [position]

        def fail(what, key, left=left):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(5, "500 Internal Server Error", key)

        memory.bucket.before = fail
        with pytest.raises(OSError, match="500"):
            rules.save(storage, 20, position)
        memory.bucket.before = lambda what, key: None
        assert storage.remove(rules.token(20, position)) == []
        assert [found.step for found in storage.scan()] == [10]
        assert not [key for key in memory.contents() if key.startswith("step-20")]
        assert memory.bucket.uploads == {}
    rules.save(storage, 20, 999)
    rules.check(storage, 10)
    rules.check(storage, 20)


def test_a_job_that_was_taken_over_publishes_nothing_any_more(memory):
    """It was frozen for longer than a lease (EXPERIMENTS C2)."""
    frozen = memory.claim("aaaaaaaa")
    frozen.take("frozen")
    storage = memory.open()
    fragments = rules.write(storage, 20, job="aaaaaaaa")
    memory.die(frozen)
    memory.bucket.objects[OWNER] = (
        memory.bucket.objects[OWNER][0].replace(b'"host": "', b'"host": "x'),
        1,
    )
    other = memory.claim("bbbbbbbb")
    other.take("other")
    assert memory.clock.passed >= object_claim.LEASE_S, "it is waited for a lease, by our own clock"
    with pytest.raises(CheckpointError, match=r"has been taken over by the run other \(process"):
        storage.publish(rules.token(20, job="aaaaaaaa"), fragments, rules.describe)
    assert storage.scan() == []
    other.close()


def test_a_dead_process_of_this_machine_is_not_waited_for(memory):
    dead = memory.claim("aaaaaaaa")
    dead.take("dead")
    memory.die(dead)
    text = memory.bucket.objects[OWNER][0]
    memory.bucket.objects[OWNER] = text.replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 4194304'), 1.0
    mine = memory.claim("bbbbbbbb")
    mine.take("mine")
    assert memory.clock.passed < 1.0
    mine.close()


def test_a_store_without_conditional_creation_is_named_and_serves(memory):
    memory.bucket.exclusive = False
    claim = memory.claim("aaaaaaaa")
    (told,) = claim.take("run")
    assert "does not honour conditional creation (If-None-Match: *)" in told
    rules.save(memory.open(), 20, job="aaaaaaaa")
    rules.check(memory.open(), 20)
    claim.close()


@pytest.mark.parametrize(("verb", "doing"), [("create", "be written to"), ("items", "be listed"), ("get", "be read"),
                                             ("delete", "remove an object")])  # fmt: skip
def test_what_a_store_refuses_is_named_before_the_first_step(memory, verb, doing):
    def forbid(what, key):
        if what == verb:
            raise PermissionError(13, "Access Denied", key)

    memory.bucket.before = forbid
    with pytest.raises(ConfigurationError, match=rf"cannot {doing}.*Access Denied.*credentials"):
        memory.claim("aaaaaaaa").take("run")


def test_uploads_left_behind_are_aborted_at_the_next_start(memory):
    storage = memory.open()
    path = f"{storage.folder(rules.token(20))}/{names.shard(0)}"
    storage.files.write(storage.files.create(path), b"half")  # and the writer is killed
    assert memory.bucket.uploads
    claim = memory.claim("bbbbbbbb")
    (told,) = claim.take("run")
    assert "aborted the upload of" in told
    assert memory.bucket.uploads == {}
    claim.close()


def test_a_place_is_a_path_or_a_url():
    assert opening.place_of("s3://bucket/prefix/") == "s3://bucket/prefix"
    assert opening.place_of("file:///a/b") == "/a/b"
    assert opening.place_of("relative") == os.path.abspath("relative")
    assert opening.is_url("gs://bucket/x")
    assert not opening.is_url("/a/s3://b")
    with pytest.raises(UsageError, match="memory of one process"):
        opening.place_of("memory://x")
    with pytest.raises(UsageError, match="names no bucket"):
        opening.place_of("s3://")
