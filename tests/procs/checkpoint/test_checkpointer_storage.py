"""A Checkpointer on storage that is far, full, read-only, gone or stuck: the loop goes on, and every end is told."""

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from everstep.checkpoint import Checkpointer, catalog
from everstep.errors import CheckpointError, ConfigurationError, UnreachableStorage, UsageError

pytestmark = [
    pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
]  # fmt: skip
PATIENCE_S = 60.0
GUARD_S = 60.0
NUMBERS = itertools.count()
torch.set_num_threads(1)


def _beside(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


s3_server = _beside("s3_server")


@pytest.fixture
def make():
    """Make Checkpointers; at the end none of their keepers is left."""
    made = []

    def checkpointer(where, **arguments):
        made.append(Checkpointer(where, **arguments))
        return made[-1]

    yield checkpointer
    for one in made:
        with contextlib.suppress(CheckpointError, TimeoutError):
            one.close(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while psutil.pid_exists(one._line.pid) and psutil.Process(one._line.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"the keeper {one._line.pid} was left behind"
            time.sleep(0.01)


def state(value):
    model = nn.Linear(40, 30)
    with torch.no_grad():
        model.weight.fill_(value)
    return {"model": model, "n": value}


# An object store.


@pytest.fixture(scope="module")
def server():
    for package in ("s3fs", "moto", "flask_cors"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package} (pip install 'everstep[dev]')")
    made = s3_server.Server()
    assert made.ask("PUT", "/bucket")[0] == 200
    yield made
    made.end()


@pytest.fixture
def door(server, monkeypatch):
    """Everything goes through it, this process and all that it starts."""
    made = s3_server.Door(server)
    for key, value in s3_server.environment(made.port, deadline_s=3).items():
        monkeypatch.setenv(key, value)
    yield made
    made.mode = "open"
    made.close()


ENDED = """
    import os, signal, sys, torch
    from everstep.checkpoint import Checkpointer
    ckpt = Checkpointer(sys.argv[1], tiers={"memory": 1, "disk": 2})
    state = {"w": torch.zeros(3), "n": 0}
    for step in (1, 2, 3):
        state["w"].fill_(step)
        state["n"] = step
        handle = ckpt.save(step, state)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_url_serves_as_a_directory_does(make, door):
    """Saved, listed, refused to a second, gone on from, in place and in another world's time."""
    url = f"s3://bucket/one-{next(NUMBERS)}"
    ckpt = make(url, keep=2)
    assert ckpt.restore(state(0.0)) is None
    for step in (1, 2, 3):
        assert ckpt.save(step, state(float(step))).wait(PATIENCE_S).what == "committed"
    assert [one.step for one in catalog.scan(url)] == [3, 2]
    assert not [wound for one in catalog.scan(url) for wound in catalog.verify(one)]
    with pytest.raises(ConfigurationError, match="is in use by the run a Checkpointer of process"):
        make(url)
    ckpt.close()
    again = make(url)
    back = state(0.0)
    restored = again.restore(back)
    assert (restored.step, restored.tier, back["n"]) == (3, "disk", 3.0)
    assert back["model"].weight.eq(3.0).all()
    assert 0 <= restored.age_s < 3600
    with pytest.raises(UsageError, match="as a string"):
        make(Path(url))
    again.close()


def test_what_a_killed_rank_left_in_memory_goes_to_the_store_and_its_successor_waits_for_it(make, door):
    url = f"s3://bucket/one-{next(NUMBERS)}"
    done = subprocess.run([sys.executable, "-", url], input=textwrap.dedent(ENDED), text=True, timeout=GUARD_S)
    assert done.returncode == -signal.SIGKILL
    back = {"w": torch.zeros(3), "n": 0}
    assert make(url).restore(back).step == 3
    assert back["w"].tolist() == [3.0] * 3


def test_a_server_that_fails_refuses_or_hangs_fails_saves_by_name_and_a_restore_too(make, door):
    """500, 403, a hang: nothing waits beyond what is said, and it serves again when the server does."""
    url = f"s3://bucket/one-{next(NUMBERS)}"
    ckpt = make(url, grace=30.0)
    assert ckpt.save(1, state(1.0)).wait(PATIENCE_S).what == "committed"
    for step, mode in enumerate(("500", "403", "hang"), 2):
        door.mode = mode
        with pytest.raises(CheckpointError, match=f"step {step} was not saved"):
            ckpt.save(step, state(2.0)).wait(GUARD_S)
    door.mode = "open"
    door.released.set()
    assert ckpt.save(9, state(9.0)).wait(PATIENCE_S).what == "committed"
    ckpt.close()
    again, back = make(url, grace=2.0), state(0.0)
    door.mode = "hang"
    door.released.clear()
    with pytest.raises(UnreachableStorage, match="cannot be read now: the store has not answered for 3 s"):
        again.restore(back)
    assert back["n"] == 0.0
    door.mode = "open"
    door.released.set()
    assert again.restore(back).step == 9
    again.close()


def test_what_cannot_be_read_now_is_tried_again_and_nothing_older_is_taken_for_it(make, door):
    """A store that refuses the newest: an error by name; the older one on demand; and the newest when it is back."""
    url = f"s3://bucket/one-{next(NUMBERS)}"
    ckpt = make(url)
    for step in (1, 2):
        assert ckpt.save(step, state(float(step))).wait(PATIENCE_S).what == "committed"
    ckpt.close()
    door.part, door.mode = "step-2.", "403"
    again, back = make(url, grace=3.0), state(0.0)
    with pytest.raises(UnreachableStorage, match=r"step-2/\S+ cannot be read now: Access Denied") as caught:
        again.restore(back)
    assert "grace= is how long a read is tried" in str(caught.value)
    assert "nothing older is taken in its stead" in str(caught.value)
    assert back["n"] == 0.0
    restored = again.restore(back, step=1)
    assert (restored.step, back["n"]) == (1, 1.0)
    assert "step 2 on disk may be newer" in restored.why
    seen = len(door.asked)
    opens = threading.Thread(target=lambda: opened_after(door, seen + 2))
    opens.start()
    assert again.restore(back).step == 2
    opens.join()
    assert back["n"] == 2.0


def opened_after(door, requests):
    deadline = time.monotonic() + GUARD_S
    while len(door.asked) < requests and time.monotonic() < deadline:
        time.sleep(0.01)
    door.mode = "open"


def forked(size, body, tmp_path):
    """Ranks over gloo; all must end well."""
    pids, store = [], tmp_path / f"store-{next(NUMBERS)}"
    for rank in range(size):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
                body(rank, init_device_mesh("cpu", (size,)))
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * size


def test_state_in_shards_is_taken_up_from_a_store_by_a_world_of_another_size(door, tmp_path):
    """Saved by three ranks, uneven; taken up by two, in place, each reading what it needs."""
    url = f"s3://bucket/one-{next(NUMBERS)}"
    whole = torch.arange(70_000.0).view(7, 10_000)

    def save(rank, mesh):
        with Checkpointer(url) as ckpt:
            state = {"w": distribute_tensor(whole + 1, mesh, [Shard(0)]), "n": 3}
            assert ckpt.save(3, state).wait(PATIENCE_S).what == "committed"

    def restore(rank, mesh):
        with Checkpointer(url) as ckpt:
            live = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])
            state = {"w": live, "n": 0}
            assert ckpt.restore(state).tier == "disk"
            assert state["w"] is live
            assert live.full_tensor().equal(whole + 1)
            assert state["n"] == 3

    forked(3, save, tmp_path)
    forked(2, restore, tmp_path)


# A directory whose server stands still.


class Bound:
    """A directory by way of a server in user space, which can be stopped: whoever calls then waits."""

    def __init__(self, folder):
        self.backing, self.where = folder / "backing", folder / "mounted"
        self.backing.mkdir()
        self.where.mkdir()
        self.process = subprocess.Popen(["bindfs", "-f", str(self.backing), str(self.where)], stderr=subprocess.PIPE)
        deadline = time.monotonic() + GUARD_S
        while not os.path.ismount(self.where):
            if self.process.poll() is not None:
                pytest.skip(f"needs leave to mount by FUSE: {self.process.stderr.read().decode().strip()}")
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def end(self):
        self.go_on()
        subprocess.run(["umount", "--lazy", str(self.where)], capture_output=True)
        self.process.terminate()
        self.process.wait(GUARD_S)
        self.process.stderr.close()


@pytest.fixture
def bound(tmp_path):
    if shutil.which("bindfs") is None:
        pytest.skip("needs bindfs")
    made = Bound(tmp_path)
    yield made
    made.end()


def timed(act):
    began = time.monotonic()
    with pytest.raises((CheckpointError, ConfigurationError)) as caught:
        act()
    assert time.monotonic() - began < GUARD_S, "it waited beyond what is said"
    return str(caught.value)


def test_storage_that_never_returns_stops_no_save_no_close_no_restore_and_no_start(make, bound):
    """Item 4: a write, an fsync, a read that never return; each is an error by name after the grace time."""
    where, live = bound.where / "ckpt", state(1.0)
    ckpt = make(where, grace=3.0, tiers={"memory": 1, "disk": 1})
    assert ckpt.save(1, live).wait(PATIENCE_S).what == "committed"
    bound.stop()
    handle = ckpt.save(2, live)
    began = time.monotonic()
    others = [ckpt.save(step, live) for step in (3, 4, 5)]
    assert time.monotonic() - began < 3.0 * len(others), "the loop does not wait for it"
    told = timed(handle.wait)
    assert "it is stuck, or gone" in told
    assert "grace= is how long it is waited for" in told
    assert "step 5 was not saved" in timed(others[-1].wait)
    assert ckpt.restore(live).step == 5  # memory needs no disk
    assert "does not answer: a read has not come back for 3 s" in timed(lambda: ckpt.restore(state(0.0), step=1))
    assert "has taken nothing for 3 s" in timed(ckpt.close)
    assert "does not answer: nothing has come back from it for 3 s" in timed(lambda: make(where, grace=3.0))
    bound.go_on()
    again = make(where)
    back = state(0.0)
    assert again.restore(back).step >= 1
    assert back["n"] == 1.0
    assert again.save(9, back).wait(PATIENCE_S).what == "committed"


STUCK_AT_EXIT = """
    import os, signal, sys, torch
    from everstep.checkpoint import Checkpointer
    ckpt = Checkpointer(sys.argv[1], grace=3.0, on_busy="block")
    state = {"w": torch.zeros(3)}
    ckpt.save(1, state).wait()
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    for step in (2, 3, 3):
        try:
            ckpt.save(step, state)
        except Exception as error:
            print("told:", error)
"""


def test_a_script_whose_storage_is_stuck_ends_and_its_exit_code_says_so(bound):
    """`on_busy="block"` waits for the disk, but not for a dead one; the end of the script does not wait either."""
    words = [sys.executable, "-", str(bound.where / "ckpt"), str(bound.process.pid)]
    done = subprocess.run(words, input=textwrap.dedent(STUCK_AT_EXIT), capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 1, done.stderr
    assert "told: " in done.stdout
    assert "it is stuck, or gone" in done.stdout
    assert "was not saved" in done.stderr


# Disks that fill up, turn read-only, go away.


def mounted(*words):
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs leave to mount a file system: {done.stderr.strip()}")


def refused(ckpt, step):
    with pytest.raises(CheckpointError) as caught:
        ckpt.save(step, state(2.0)).wait(PATIENCE_S)
    assert f"step {step} was not saved" in str(caught.value)
    return str(caught.value)


def test_a_disk_that_fills_up_turns_read_only_and_vanishes_fails_saves_by_name(make, tmp_path):
    """CS-26, CS-37: each by its own words, and it serves again when it is mended; nothing below a vanished mount."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted("-t", "tmpfs", "-o", "size=1m", "none", where)
    try:
        ckpt = make(where, keep=2)
        assert ckpt.save(1, state(1.0)).wait(PATIENCE_S).what == "committed"
        ballast = where / "ballast"
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                continue
        told = refused(ckpt, 2)
        assert "No space left on device (ENOSPC); free space there" in told
        assert "--checkpoint-dir" not in told
        ballast.unlink()
        assert ckpt.save(3, state(3.0)).wait(PATIENCE_S).what == "committed"
        read_only(where)
        assert "Read-only file system (EROFS)" in refused(ckpt, 4)
        mounted("-o", "remount,rw", where)
        assert ckpt.save(5, state(5.0)).wait(PATIENCE_S).what == "committed"
        found = {one.step: one for one in catalog.scan(str(where))}  # what is retired goes meanwhile
        assert not [wound for step in (3, 5) for wound in catalog.verify(found[step])]
        subprocess.run(["umount", "--lazy", str(where)], check=True)
        assert "A mount went away" in refused(ckpt, 6)
        assert os.listdir(where) == []
    finally:
        subprocess.run(["umount", "--lazy", str(where)], capture_output=True)


def read_only(where):
    for _ in range(400):
        done = subprocess.run(["mount", "-o", "remount,ro", str(where)], capture_output=True, text=True)
        if done.returncode == 0:
            return
        time.sleep(0.02)
    raise AssertionError(done.stderr)


@pytest.mark.long
def test_errors_of_the_device_the_quota_and_the_rights_fail_one_save_each_by_name(make, tmp_path):
    """CS-26: what the kernel answers to the writer is what is said, with the mend."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace (Debian: apt-get install strace), which lets a call of another process fail")
    ckpt = make(tmp_path / "ckpt")
    assert ckpt.save(1, state(1.0)).wait(PATIENCE_S).what == "committed"
    (writer,) = [p for p in psutil.Process(ckpt._line.pid).children() if p.name().startswith("everstep-writer")]
    faults = [("fsync", "EIO", "(EIO); the device reports an error"), ("write", "EDQUOT", "the quota is used up"),
              ("mkdir", "EACCES", "(EACCES); give this user the right")]  # fmt: skip
    for step, (call, error, words) in enumerate(faults, 2):
        inject = ["-e", f"trace={call}", "-e", f"inject={call}:error={error}:when=1+"]
        command = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(writer.pid), *inject]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            time.sleep(0.5)
            if strace.poll() is not None:
                pytest.skip(f"needs leave to trace processes: {strace.stderr.read().strip()}")
            assert words in refused(ckpt, step)
        finally:
            strace.terminate()
            strace.wait(10)
            strace.stderr.close()
    assert ckpt.save(9, state(9.0)).wait(PATIENCE_S).what == "committed"
