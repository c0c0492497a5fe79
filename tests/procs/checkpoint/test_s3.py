"""Checkpoints in an S3-speaking server: the rules of every storage, whole jobs, and the server's faults."""

import argparse
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.checkpoint import catalog, commands
from everstep.checkpoint.core import names
from everstep.checkpoint.shards import Target, write_shard
from everstep.checkpoint.storage.fsspec_bucket import PART, connect
from everstep.checkpoint.storage.object_claim import ObjectClaim
from everstep.checkpoint.storage.objects import ObjectStorage
from everstep.clock import SYSTEM
from everstep.errors import ConfigurationError, UnreachableStorage
from everstep.testing import storage_rules as rules
from everstep.testing.states import rank_state

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
for package in ("s3fs", "moto", "flask_cors"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package} (pip install 'everstep[dev]')", allow_module_level=True)


def _beside(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


s3_server, test_job = _beside("s3_server"), _beside("test_job")
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server():
    made = s3_server.Server()
    assert made.ask("PUT", "/bucket")[0] == 200
    yield made
    made.end()


@pytest.fixture
def here(server, monkeypatch):
    """This process speaks with it."""
    for key, value in s3_server.environment(server.port).items():
        monkeypatch.setenv(key, value)


class Rig:
    def __init__(self):
        self.url = f"s3://bucket/rules-{next(NUMBERS)}"
        self.bucket = connect(self.url)

    def open(self):
        return ObjectStorage(connect(self.url))

    def claim(self, job):
        return ObjectClaim(connect(self.url), job)

    def contents(self):
        found = [item.key for item in self.bucket.items("") if not item.key.startswith(".everstep")]
        return {key: self.bucket.get(key) for key in found}

    def overwrite(self, name, content):
        if content is None:
            self.bucket.delete(name)
        else:
            self.bucket.put(name, content)

    def die(self, claim):
        claim._over.set()
        claim._renewer.join()
        claim._renewer = None
        text = self.bucket.get(".everstep-owner.json")
        self.bucket.put(".everstep-owner.json", text.replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 4194304'))


@pytest.fixture
def rig(here):
    return Rig()


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_s3_holds_to_the_rules_of_every_place(rig, rule):
    rule(rig)


def test_the_server_honours_conditional_creation(rig):
    assert rig.bucket.create("one", b"first")
    assert not rig.bucket.create("one", b"second")
    assert rig.bucket.get("one") == b"first"


def test_a_large_object_goes_in_parts_and_is_there_whole_or_not_at_all(rig):
    storage = rig.open()
    path = f"{storage.folder(rules.token(20))}/{names.shard(0)}"
    content = os.urandom(PART * 2 + 12345)
    fd = storage.files.create(path)
    for start in range(0, len(content), 4 << 20):
        storage.files.write(fd, content[start : start + (4 << 20)])
    assert rig.contents() == {}, "it has no name yet"
    left = storage.files.create(path.replace("__0_0", "__1_0"))
    for _ in range(6):
        storage.files.write(left, bytes(4 << 20))  # its writer is killed
    storage.files.fsync(fd)
    storage.files.close(fd)
    assert rig.contents() == {path.removeprefix(f"{rig.url}/"): content}
    claim = rig.claim("bbbbbbbb")
    told = claim.take("the next")
    claim.close()
    assert [text for text in told if "aborted the upload of" in text and "__1_0.distcp" in text], told
    assert rig.bucket.abort_uploads("") == []
    storage.files._uploads.pop(left)._file.closed = True  # nobody finishes it: the process that would is gone


@pytest.fixture
def door(server):
    made = s3_server.Door(server)
    yield made
    made.close()


@pytest.fixture
def start(tmp_path):
    """Jobs whose checkpoints go to `s3://bucket/…`, by way of a port."""
    begun = []

    def make(name, steps, port, deadline_s=30, directory="job", **changes):
        environment = {**os.environ, **s3_server.environment(port, deadline_s)}
        url = f"s3://bucket/{directory}"
        begun.append(test_job.Job(tmp_path, name, steps, directory=url, environment=environment, **changes))
        return begun[-1]

    yield make
    for job in begun:
        if job.process.poll() is None:
            job.kill()


def command(capsys, *words):
    """`everstep checkpoint …` in this process: its exit code and what it printed."""
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["checkpoint", *words])
    code = args.run(args)
    return code, capsys.readouterr().out


def test_a_job_saves_to_s3_and_goes_on_from_it_and_the_commands_see_it(server, here, start, capsys):
    url = "s3://bucket/whole"
    first = start("first", 17, server.port, directory="whole", interval=5)
    code, told = first.end()
    assert code == 0, told
    second = start("second", 30, server.port, directory="whole", interval=5)
    code, told = second.end()
    assert code == 0, told
    assert f"continuing from {url}/step-17: 17 of 30 steps are done" in told
    assert {(e["step"], e["tier"]) for e in second.events("Restored")} == {(17, "disk")}
    assert sorted(second.losses_by_step()) == sorted((rank, step) for rank in range(2) for step in range(18, 31))

    code, out = command(capsys, "ls", url, "--json")
    rows = json.loads(out)
    assert [rows[0][name] for name in ("step", "complete", "tier", "world_size")] == [30, True, "object", 2]
    assert len(rows) == 2
    assert command(capsys, "verify", url) == (0, "")
    bucket = connect(url)
    key = next(item.key for item in bucket.items("step-30.") if item.key.endswith("__1_0.distcp"))
    content = bucket.get(key)
    bucket.put(key, content[:-2000] + bytes([content[-2000] ^ 1]) + content[-1999:])
    code, out = command(capsys, "verify", url)
    assert code == 1
    assert out.startswith("30 __1_0.distcp has checksum ")
    found, wounds = catalog.newest_whole(url)
    assert found.step == rows[1]["step"]
    assert [(wound.step, wound.file) for wound in wounds] == [(30, "__1_0.distcp")]
    assert command(capsys, "rm", url, "--step", "30")[0] == 0
    assert [item.key for item in bucket.items("step-30")] == []
    assert [found.step for found in catalog.scan(url)] == [rows[1]["step"]]


@pytest.mark.long
def test_a_job_that_goes_on_from_s3_is_the_job_that_was_never_ended(server, start, tmp_path):
    twin = test_job.Job(tmp_path, "twin", 30, interval=30)
    ends = [start(name, steps, server.port, directory="exact", interval=5) for name, steps in (("first", 17),)]
    assert ends[0].end()[0] == 0
    second = start("second", 30, server.port, directory="exact", interval=5)
    assert second.end()[0] == 0
    assert twin.end()[0] == 0
    assert ends[0].losses_by_step() | second.losses_by_step() == twin.losses_by_step()


@pytest.mark.long
def test_a_server_that_refuses_breaks_hangs_or_is_killed_fails_saves_by_name_and_the_job_trains_on(door, start):
    job = start("run", 100000, door.port, deadline_s=3, pause_s=0.01, interval=4, directory="faults")
    job.until(lambda: job.tiers("committed"))
    inner = door.inner
    for mode in ("500", "403", "hang", "gone"):
        door.mode = mode if mode != "gone" else "open"
        door.inner = s3_server.free_port() if mode == "gone" else inner
        seen = len(job.tiers("failed"))
        job.until(lambda seen=seen: len(job.tiers("failed")) > seen)
        door.mode, door.inner = "open", inner
        door.released.set()
        seen = len(job.tiers("committed"))
        job.until(lambda seen=seen: len(job.tiers("committed")) > seen)
        door.released.clear()
    trained = max(step for _, step in job.losses_by_step())
    door.mode = "hang"
    job.until(lambda: max(step for _, step in job.losses_by_step()) > trained + 50)
    began = SYSTEM.now()
    job.process.send_signal(signal.SIGTERM)
    code, told = job.end()
    assert code == 143
    assert SYSTEM.now() - began < 60, "a store that hangs does not stop the end"
    assert "We encountered an internal error" in told
    assert "Access Denied (EACCES); give this user the right" in told
    assert "the store has not answered for 3 s" in told
    assert len({line.split()[3] for line in job.losses.read_text().splitlines()}) == 2, "the ranks never stopped"


REFUSED = r"the checkpoint storage s3://bucket/forbidden cannot be written to: .*"
AWAY = r"s3://bucket/forbidden is away: it cannot be written to: .*"


@pytest.mark.parametrize(("mode", "kind", "words"), [
    ("403", ConfigurationError, REFUSED + "Access Denied"),
    ("500", UnreachableStorage, AWAY + "(internal error|has not answered for 4 s)"),  # a client's own retries take time
    ("hang", UnreachableStorage, AWAY + "has not answered for 2 s"),
])  # fmt: skip
def test_a_store_that_refuses_breaks_or_hangs_is_told_before_the_first_step(door, monkeypatch, mode, kind, words):
    """What passes by itself is tried again, and then a scheduler is to (75); what does not is told at once (78)."""
    for key, value in s3_server.environment(door.port, 2 if mode == "hang" else 4).items():
        monkeypatch.setenv(key, value)
    door.mode = mode
    began = SYSTEM.now()
    with pytest.raises(kind, match=words):
        ObjectClaim(connect("s3://bucket/forbidden"), "aaaaaaaa").take("run")
    assert SYSTEM.now() - began < 60


def test_a_bucket_that_is_not_there_is_no_empty_prefix(here):
    with pytest.raises(UnreachableStorage, match=r"its listing failed: .*ucket does not exist"):
        catalog.scan("s3://nowhere/prefix")


@pytest.mark.long
def test_a_store_that_cannot_be_read_now_ends_the_job_with_75_and_the_next_start_goes_on_from_the_newest(door, start):
    """Throttled at the restore, refused at the start: no older step, no fresh start; the scheduler tries again."""
    words = {"directory": "away", "interval": 5, "deadline_s": 4}
    code, told = start("first", 17, door.port, **words).end()
    assert code == 0, told
    for name, mode, part in (("throttled", "503", "step-17."), ("refused", "403", "step-17/"), ("down", "500", "")):
        door.mode, door.part = mode, part
        job = start(name, 30, door.port, **words)
        code, told = job.end()
        assert code == 75, told
        assert ("is away" if mode == "500" else "cannot be read now") in told
        assert "nothing older is taken in its stead" in told
        assert not job.losses.exists(), "a step was done"
        assert job.events("Restored") == []
    door.mode, door.part = "open", ""
    job = start("second", 30, door.port, **words)
    code, told = job.end()
    assert code == 0, told
    assert {e["step"] for e in job.events("Restored")} == {17}


def left_over(bucket):
    """All that lies there, by key; owners' and probes' left out."""
    return [item.key for item in bucket.items("") if not item.key.startswith(".everstep")]


def big_save(storage, step):
    """A save whose shards go in several parts: 40 MiB a rank."""
    save = rules.token(step)
    target = Target(save, step, 0, 0, rules.WORLD, storage.folder(save))
    states = [rank_state(rank, rules.WORLD, step, rows=1, columns=5 << 20) for rank in range(rules.WORLD)]
    parts = [
        write_shard(storage.files, target, s.layout, s.layout.to_json(), memoryview(s.payload), {}) for s in states
    ]
    return storage.publish(save, parts, rules.describe)


@pytest.mark.long
def test_an_upload_that_is_cut_off_at_any_request_leaves_no_checkpoint_and_is_swept(server, door, monkeypatch):
    """From the n-th request on nothing comes through, no cleaning up either: what a kill at that instant leaves."""
    for key, value in s3_server.environment(door.port).items():
        monkeypatch.setenv(key, value)
    url = "s3://bucket/cut"
    rules.save(ObjectStorage(connect(url)), 10)
    before = left_over(connect(url))
    requests, cut = 0, 0
    while True:
        requests += 1
        door.asked.clear()
        door.fails_from = requests
        try:
            big_save(ObjectStorage(connect(url)), 20)
        except OSError:
            cut += 1
        else:
            break
        finally:
            door.fails_from = 0
        assert [found.step for found in catalog.scan(url)] == [10]
        claim = ObjectClaim(connect(url), f"{requests:08x}")
        claim.take("the next")
        claim.close()
        bucket = connect(url)
        assert left_over(bucket) == before, f"cut off at request {requests}"
        assert bucket.abort_uploads("") == []
    assert cut >= 15, "several parts, their completion, the manifest"
    assert [found.step for found in catalog.scan(url)] == [20, 10]
    assert not [wound for found in catalog.scan(url) for wound in catalog.verify(found)]


WRITES = """
import sys
from everstep.checkpoint.storage.fsspec_bucket import connect
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10
bucket, piece = connect(sys.argv[1]), bytes(4 << 20)
bucket.put("warm", b"x" * (1 << 20))
before, upload = peak(), bucket.upload("large")
for _ in range(int(sys.argv[2])):
    upload.write(piece)
upload.finish()
print(peak() - before, bucket.items("large")[0].size)
"""


@pytest.mark.long
def test_what_is_on_its_way_is_bounded_in_memory_however_slow_the_store(door):
    """400 MiB at 40 MB/s: the parts of 16 MiB that are on their way are held, and not all that is written."""
    door.rate = 40_000_000
    environment = {**os.environ, **s3_server.environment(door.port, 60)}
    words = [sys.executable, "-c", WRITES, "s3://bucket/memory", "100"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size == 400 << 20
    assert grown < 10 * (PART >> 20), f"{grown} MiB more while 400 MiB were written"


@pytest.mark.long
def test_a_store_that_is_slow_far_and_now_and_then_too_busy_costs_the_loop_nothing(door, start):
    """2 MB/s, 300 ms a request, one in 40 answered by 503: saves coalesce, none fails, and what is durable is not old.

    By counts of events: a bound of time would measure this machine.
    """
    door.rate, door.latency_s, door.busy_every = 2_000_000, 0.3, 40
    interval = 4
    job = start("slow", 100_000, door.port, deadline_s=60, pause_s=0.02, interval=interval, directory="slow")
    job.until(lambda: len(job.tiers("committed")) >= 5)
    job.process.send_signal(signal.SIGTERM)
    code, told = job.end()
    assert code == 143, told
    assert job.tiers("failed") == [], told
    assert len(job.tiers("coalesced")) > len(job.tiers("committed")), "it is slower than the interval"
    steps = job.events("StepDone")
    waited = sum(e["snapshot_s"] for e in steps) / sum(e["seconds"] + e["snapshot_s"] for e in steps)
    assert waited < 0.2, f"{waited:.0%} of the loop went to snapshots, which wait for no store"
    tiers = [e for e in job.events("TierEvent") if e["tier"] == "disk"]
    order = [(e["what"], e["step"]) for e in tiers if e["what"] in ("planned", "taken", "committed")]
    committed = [step for what, step in order if what == "committed"]
    for number, step in enumerate(committed[1:], 1):
        at = order.index(("committed", committed[number - 1]))
        assert order[at + 1][0] == "planned", "the next is chosen as soon as the last is durable"
        assert order[at + 1][1] == step
