"""An error is not damage: what cannot be read now is tried again, and nothing older is taken in its stead."""

import argparse
import errno
import os
import random

import pytest

from everstep.checkpoint import catalog, commands
from everstep.checkpoint import convert as converter
from everstep.checkpoint.core import names
from everstep.checkpoint.core.plan import choose
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.load import open_checkpoint, open_for
from everstep.checkpoint.stocktaking import stock_of, take_stock
from everstep.checkpoint.storage import posix
from everstep.checkpoint.storage.fsspec_bucket import FsspecBucket
from everstep.checkpoint.storage.objects import ObjectReading, ObjectStorage
from everstep.checkpoint.storage.opening import retried
from everstep.checkpoint.storage.posix import Eyes, PosixReading, PosixStorage
from everstep.checkpoint.unreachable import DEADLINE, FIRST_S, MOST_S, Retry, Wearing, failure, is_away
from everstep.clock import SystemClock
from everstep.errors import ConfigurationError, DamagedCheckpoint, ExitCode, UnreachableStorage, UsageError
from everstep.testing import storage_rules as rules
from everstep.testing.disk_bench import DiskBench
from everstep.testing.disks import UnsyncedFiles
from everstep.testing.memory_bucket import MemoryBucket
from everstep.testing.states import rank_state

LIMIT_S = 60.0
STEPS = (20, 40, 60)
WITHOUT_NAMES = ("listdir", "items", "read")  # no such file: what these do not say of one that a listing shows
ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EREMOTEIO, errno.EBUSY)


class Passing(SystemClock):
    """Time passes when somebody sleeps or asks a place for something."""

    def __init__(self):
        self.passed, self.slept = 0.0, []

    def now(self):
        return self.passed

    def sleep(self, seconds):
        self.passed += seconds
        self.slept.append(seconds)


# What an error means.


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP])
def test_what_says_that_there_is_no_such_file_is_damage(code):
    told = failure("DIR/step-3/__0_0.distcp", OSError(code, os.strerror(code)))
    assert isinstance(told, DamagedCheckpoint)
    assert str(told) == f"DIR/step-3/__0_0.distcp: {os.strerror(code)}"


@pytest.mark.parametrize("code", [*ERRORS, errno.EPERM, errno.ENODEV, errno.EMFILE, errno.EINVAL, 0])
def test_every_other_error_says_nothing_of_the_file_and_asks_for_another_start(code):
    told = failure("DIR/step-3/__0_0.distcp", OSError(code, "so"))
    assert isinstance(told, UnreachableStorage)
    assert not isinstance(told, DamagedCheckpoint)
    assert told.exit_code == ExitCode.BAD_NODE == 75
    assert "DIR/step-3/__0_0.distcp cannot be read now: so" in str(told)
    assert "nothing older is taken in its stead" in str(told)
    assert "start again" in str(told)
    assert "everstep checkpoint rm DIR --step N" in str(told)


def test_rights_and_room_do_not_pass_by_themselves():
    assert all(is_away(OSError(code, "")) for code in ERRORS if code != errno.EACCES)
    assert not any(is_away(OSError(code, "")) for code in (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOENT))


# Asking again.


def failing(times, code=errno.EIO):
    left = [times]

    def call():
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(code, "no")
        return "yes"

    return call


def test_a_call_is_made_again_ever_more_slowly_until_it_answers():
    clock, moved = Passing(), []
    assert Retry(LIMIT_S, lambda: moved.append(1), clock, chance=lambda: 0.0)(failing(8)) == "yes"
    assert clock.slept == [min(MOST_S, FIRST_S * 2**n) for n in range(8)]
    assert len(moved) == 9, "whoever watches sees that it goes on"


def test_the_limit_holds_and_is_used_to_its_end():
    clock = Passing()
    with pytest.raises(OSError, match="no"):
        Retry(LIMIT_S, clock=clock)(failing(10_000))
    assert clock.passed == pytest.approx(LIMIT_S)
    assert Retry(LIMIT_S, clock=clock)(failing(1)) == "yes", "each call has a limit of its own"


def test_an_answer_is_not_asked_for_again():
    clock = Passing()
    with pytest.raises(FileNotFoundError):
        Retry(LIMIT_S, clock=clock)(failing(1, errno.ENOENT))
    with pytest.raises(OSError, match="no"):
        Retry(0.0, clock=clock)(failing(1))
    assert clock.slept == []


def test_what_is_away_is_waited_for_once_in_a_look_and_what_passes_as_ever():
    clock, moved = Passing(), []
    retry = Wearing(Retry(LIMIT_S, lambda: moved.append(1), clock))
    assert retry(failing(3)) == "yes"
    with pytest.raises(FileNotFoundError):
        retry(failing(1, errno.ENOENT))
    assert retry(failing(3)) == "yes", "an answer wears nobody out"
    before = clock.passed
    with pytest.raises(OSError, match="no"):
        retry(failing(10_000))
    assert clock.passed == pytest.approx(before + LIMIT_S)
    before, told = clock.passed, len(moved)
    for _ in range(3):
        with pytest.raises(OSError, match="no"):
            retry(failing(1))
    assert (clock.passed, len(moved)) == (before, told + 3), "at once, and whoever watches sees that it goes on"
    assert retry(failing(0)) == "yes"


@pytest.mark.parametrize(("given_s", "taken_s"), [(8.0, 8.0), (None, 120.0)])
def test_one_that_cannot_be_read_holds_up_a_start_for_as_long_as_it_is_told(tmp_path, monkeypatch, given_s, taken_s):
    """A Checkpointer's `grace`; of `everstep run` the deadline of a call. It is no wound."""
    storage = PosixStorage(str(tmp_path), UnsyncedFiles())
    for step in STEPS:
        rules.save(storage, step)

    def stale(self, path):
        raise OSError(errno.ESTALE, "Stale file handle", path)

    monkeypatch.setattr(Eyes, "open", stale)
    monkeypatch.delenv(DEADLINE, raising=False)
    clock = Passing()
    findings = take_stock(str(tmp_path), (), clock=clock, limit_s=given_s)
    assert findings.wounds == ()
    assert {one.step for one in findings.unread} >= {STEPS[-1]}
    assert clock.passed == pytest.approx(taken_s), "once, not for every checkpoint"


# The property, over fault plans of a directory and of an object store.


class Weather:
    """When which calls fail: each front has its time, its verbs and its keys. It is called before every call."""

    def __init__(self, clock):
        self.clock, self.fronts, self.struck = clock, [], 0

    def __call__(self, verb, key):
        self.clock.passed += 0.01
        for start, end, verbs, part, code, share, rng in self.fronts:
            hit = start <= self.clock.passed < end and verb in verbs and part in str(key)
            hit = hit and not (code == errno.ENOENT and verb in WITHOUT_NAMES)
            if hit and rng.random() < share:
                self.struck += 1
                raise OSError(code, os.strerror(code), str(key))


class Looks(Eyes):
    """A file system in the weather."""

    def __init__(self, weather):
        self._weather, self._paths = weather, {}

    def listdir(self, path):
        self._weather("listdir", path)
        return super().listdir(path)

    def stat(self, path):
        self._weather("stat", path)
        return super().stat(path)

    def open(self, path):
        self._weather("open", path)
        fd = super().open(path)
        self._paths[fd] = path
        return fd

    def read(self, fd, into, offset):
        self._weather("read", self._paths[fd])
        return super().read(fd, into, offset)


class Directory:
    verbs = ("listdir", "stat", "open", "read")

    def __init__(self, folder, weather):
        self.root, self.eyes = str(folder), Looks(weather)
        os.makedirs(self.root)

    def storage(self, **more):
        return PosixStorage(self.root, UnsyncedFiles(), self.eyes, **more)

    def through(self, path):
        return PosixReading(path, self.eyes)

    def contents(self):
        return rules.below(self.root)

    def overwrite(self, name, content):
        path = os.path.join(self.root, name)
        os.unlink(path)
        if content is not None:
            with open(path, "wb") as file:
                file.write(content)


class Bucket:
    verbs = ("items", "get")

    def __init__(self, folder, weather):
        self.root, self.bucket = str(folder), MemoryBucket()  # its writers write nothing
        self.weather = weather

    def storage(self, **more):
        self.bucket.before = self.weather
        return ObjectStorage(self.bucket, **more)

    def through(self, path):
        return ObjectReading(self.bucket, names.step_of(path.rpartition("/")[2]))

    def contents(self):
        return {key: content for key, (content, _) in self.bucket.objects.items()}

    def overwrite(self, name, content):
        if content is None:
            del self.bucket.objects[name]
        else:
            self.bucket.objects[name] = content, 1.0


class Found:
    """A `Hold` that has been told what lies there."""

    job, lock, over = "0123abcd", "", True

    def __init__(self, directory, findings):
        self.directory, self.findings = directory, findings

    def open(self, run, series=None):
        return self.findings

    def close(self):
        return


class Agents(DiskBench):
    """The disk tier of an agent that begins with what was found."""

    def __init__(self, directory, findings):
        self.findings = findings
        super().__init__(directory)

    def make(self, directory, interval, keep):
        return Disk(directory, interval, self.shelf, keep, hold=Found(directory, self.findings))


class Same:
    """A rank of the world that saved."""

    world_size = rules.WORLD

    def __init__(self, rank):
        self.rank = rank

    def divided_as(self, layout):
        return True


def harm(place, step, rng):
    """Really damage a checkpoint, in one of the ways that a manifest shows."""
    inside = {n: c for n, c in place.contents().items() if n.startswith(f"step-{step}") and not n.endswith(".metadata")}
    name = rng.choice(sorted(inside))
    content = bytearray(inside[name])
    how = rng.choice(["flip", "cut", "gone"])
    if how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    # An object store without a manifest has no checkpoint of that step: somebody removed it.
    gone = how == "gone" and not name.endswith(names.MANIFEST)
    place.overwrite(name, None if gone else bytes(content[: rng.randrange(len(content))] if how != "flip" else content))


def begin(place, clock):
    """What a job does at its start, and each rank when it restores: until it has a step, or an error. Real parts."""
    retry = Retry(LIMIT_S, clock=clock)
    storage = place.storage(retry=retry)
    agents = Agents(place.root, stock_of(catalog.listed(storage), (), retry, place.through))
    try:
        while True:
            plan = choose(rules.WORLD, (), [], agents.disk.committed())
            if plan.step is None:
                raise ConfigurationError(agents.disk.inventory.lost or "from the beginning")
            try:
                for rank in range(rules.WORLD):
                    path = plan.committed.where["path"]
                    with open_for(path, Same(rank), retried(place.through, retry)) as state:
                        state.prepare()
                        assert bytes(state.payload()) == rank_state(rank, rules.WORLD, plan.step).payload
            except DamagedCheckpoint as error:
                agents.clients[0].damaged(plan.step, str(error))
            else:
                return plan.step
    finally:
        agents.close()


def one_world(folder, kind, seed):
    """Return what came of it: a step or an error's kind, what should have, and whether the weather was short."""
    rng, clock = random.Random(seed), Passing()
    weather = Weather(clock)
    place = kind(folder / f"{kind.__name__}-{seed}", weather)
    storage = place.storage()
    for step in STEPS:
        rules.save(storage, step)
    damaged = [step for step in STEPS if rng.random() < 0.4]
    for step in damaged:
        harm(place, step, rng)
    whole = max(set(STEPS) - set(damaged), default=None)
    short = rng.random() < 0.5
    for _ in range(rng.randint(1, 1 if short else 4)):
        verbs = rng.sample(place.verbs, rng.randint(1, len(place.verbs)))
        part = rng.choice(["", "", "step-60", "step-40", "step-20", names.MANIFEST, "__1_0"])
        start = clock.passed + rng.random() * rng.choice([0.0, 0.3, 1.0])
        length = rng.random() * 5 if short else rng.choice([3.0, 30.0, 1e9])
        share = 1.0 if rng.random() < 0.7 else rng.random()
        code = rng.choice([*ERRORS, errno.ENOENT])  # of what a listing shows
        weather.fronts.append((start, start + length, verbs, part, code, share, rng))
    try:
        outcome = begin(place, clock)
    except UnreachableStorage:
        outcome = "unreachable"
    except ConfigurationError as error:
        outcome = None if "is whole" in str(error) else f"refused: {error}"
    return outcome, whole, short, weather.struck


def worlds(folder, kind, seeds):
    came = {
        "newest": 0,
        "older, the newer is damaged": 0,
        "unreachable": 0,
        "none is whole": 0,
        "through the weather": 0,
    }
    for seed in seeds:
        outcome, whole, short, struck = one_world(folder, kind, seed)
        if outcome == "unreachable":
            assert not short, f"seed {seed}: the weather passed, and the job ended all the same"
            came["unreachable"] += 1
            continue
        assert outcome == whole, f"seed {seed}: step {outcome} was taken, {whole} is the newest whole one"
        came["none is whole" if whole is None else "newest" if whole == 60 else "older, the newer is damaged"] += 1
        came["through the weather"] += bool(struck)
    assert all(came.values()), f"a way that no world took: {came}"


@pytest.mark.parametrize("kind", [Directory, Bucket])
def test_under_any_fault_plan_a_restore_gives_the_newest_whole_one_or_an_error_and_never_an_older_one(tmp_path, kind):
    worlds(tmp_path, kind, range(50))


@pytest.mark.long
@pytest.mark.parametrize("kind", [Directory, Bucket])
def test_two_thousand_fault_plans(tmp_path, kind):
    worlds(tmp_path, kind, range(1000, 3000))


# Places that are away altogether.


@pytest.fixture
def three(tmp_path):
    storage = PosixStorage(str(tmp_path / "ckpt"), UnsyncedFiles())
    os.makedirs(storage.directory)
    for step in STEPS:
        rules.save(storage, step)
    return tmp_path / "ckpt"


@pytest.fixture
def away(monkeypatch):
    """Let calls of the real file system fail whose path has a part."""

    def make(verb, part, code=errno.EIO):
        real = getattr(posix.EYES, verb)

        def call(path):
            if part in path:
                raise OSError(code, os.strerror(code), path)
            return real(path)

        monkeypatch.setattr(posix.EYES, verb, call)

    return make


def test_a_listing_that_fails_is_not_an_empty_directory(three, away):
    away("listdir", "ckpt")
    with pytest.raises(UnreachableStorage, match=r"ckpt cannot be read now: its listing failed: Input/output error"):
        catalog.scan(str(three))


def test_a_mount_that_went_away_is_not_damage(three, tmp_path):
    """Each file that was there is gone: that says nothing of the checkpoint."""
    os.rename(three, tmp_path / "elsewhere")
    for make in (lambda: None, lambda: os.makedirs(three)):
        make()
        with pytest.raises(UnreachableStorage, match="a mount went away"):
            read_manifest_of(three / "step-60")
    (three / ".everstep-0123abcd.job").touch()
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        read_manifest_of(three / "step-60")


def read_manifest_of(path):
    return open_checkpoint(str(path), 0, rules.WORLD)


def run(*argv):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["checkpoint", *map(str, argv)])
    return args.run(args)


SHARD = "step-60/__1_0.distcp"


@pytest.mark.parametrize(
    ("verb", "part"), [("listdir", "step-60"), ("open", "step-60/manifest"), ("stat", SHARD), ("open", SHARD)]
)
def test_the_commands_say_that_it_cannot_be_read_now_and_name_no_wound(three, away, capsys, verb, part):
    away(verb, part)
    assert run("verify", three) == 75
    told = capsys.readouterr()
    (line,) = told.out.splitlines()
    assert line.startswith("60 ")
    assert "cannot be read now: Input/output error (EIO)" in line
    assert "2 of 3 checkpoints" in told.err
    assert "1 cannot be read now: try again" in told.err
    assert run("verify", three, "--json") == 75
    assert '"damaged": []' in capsys.readouterr().out
    with pytest.raises(UnreachableStorage, match=r"step-60/\S+ cannot be read now"):
        run("convert", three, three / "out.pt", "--to", "torch")
    with pytest.raises(UnreachableStorage, match=r"step-60/\S+ cannot be read now"):
        catalog.newest_whole(str(three))
    assert not (three / "out.pt").exists()
    assert run("ls", three) == 0
    assert (" ?  " in capsys.readouterr().out) is (verb != "open" or "manifest" in part)
    (three / "step-40" / "__0_0.distcp").write_bytes(b"")
    assert run("verify", three) == 1, "a wound is told as one, whatever else is away"


def test_an_older_one_is_taken_knowingly_when_the_newer_is_given_up(three, away):
    away("open", SHARD)
    assert run("rm", three, "--step", 60) == 0
    found, wounds = catalog.newest_whole(str(three))
    assert (found.step, wounds) == (40, [])


@pytest.mark.parametrize(("asked", "gone"), [(20, 20), (None, 60)])
def test_one_that_its_job_gives_up_while_it_is_converted_is_said_to_be_gone_or_the_next_is_taken(
    three, monkeypatch, asked, gone
):
    """Item 6: the newest of when it was listed goes; the one that is there then is converted, or it is said."""
    real, looked, made = catalog.verify, [], []

    def given_up(found):
        looked.append(found.step)
        if found.step == gone:
            posix.PosixStorage(str(three), UnsyncedFiles()).condemn(names.committed(gone))
        return real(found)

    def convert(path, to, out, only):
        made.append(path)
        return converter.Converted((out,), 8, 1, ())

    monkeypatch.setattr(catalog, "verify", given_up)
    monkeypatch.setattr(converter, "convert", convert)  # what lies here is no state of torch's
    words = ["convert", three, three / "out.pt", "--to", "torch"]
    if asked is None:
        assert run(*words) == 0
        assert looked == [60, 40]
        assert [os.path.basename(path) for path in made] == ["step-40"]
    else:
        with pytest.raises(UsageError, match="has no checkpoint of step 20; it has: 60, 40"):
            run(*words, "--step", asked)
        assert (looked, made) == ([20], [])
    assert not [name for name in os.listdir(three) if "out" in name]


# What a store's client says.


class Files:
    """A file system of fsspec's in which every read fails."""

    protocol = "s3"

    def __init__(self, error, size=100):
        self.error, self.size = error, size

    def cat_file(self, path, start=None, end=None):
        raise self.error

    def info(self, path):
        return {"size": self.size}


def test_an_error_is_no_end_of_a_file_whatever_its_path_is_called():
    """Of step 416, or in a bucket with `range` in its name, it was taken for one: cut, so damaged."""
    error = OSError(errno.EREMOTEIO, "We encountered an internal error.")
    bucket = FsspecBucket("s3://orange/step-416", Files(error), "orange/step-416", 5.0)
    with pytest.raises(OSError, match="internal error"):
        bucket.read("step-416.0.0.0123abcd-1/__0_0.distcp", 50, 10)
    beyond = OSError(errno.EINVAL, "in words that nobody knows")
    assert FsspecBucket("s3://b/p", Files(beyond), "b/p", 5.0).read("key", 100, 10) == b""


def test_a_bucket_that_is_not_there_says_nothing_of_its_objects():
    class Told(Exception):
        def __init__(self):
            self.response = {"Error": {"Code": "NoSuchBucket"}}

    error = FileNotFoundError("The specified bucket does not exist")
    error.__cause__ = Told()
    with pytest.raises(OSError, match="does not exist") as caught:
        FsspecBucket("s3://b/p", Files(error), "b/p", 5.0).read("key", 0, 10)
    assert isinstance(failure("x", caught.value), UnreachableStorage)
    with pytest.raises(FileNotFoundError):
        FsspecBucket("s3://b/p", Files(FileNotFoundError("no such key")), "b/p", 5.0).read("key", 0, 10)
