"""Storage that is full, read-only, gone, broken or stuck under a whole job: training goes on, and so does its end."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from everstep.checkpoint import catalog
from everstep.checkpoint.holder import Held
from everstep.clock import SYSTEM
from everstep.errors import UnreachableStorage

_spec = importlib.util.spec_from_file_location("jobs_on_disk", Path(__file__).with_name("test_job.py"))
jobs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(jobs)
Job, steps_in = jobs.Job, jobs.steps_in

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]


@pytest.fixture
def start(tmp_path):
    """Jobs that do not outlive their test, however it ends."""
    begun = []

    def make(name, steps, **changes):
        begun.append(Job(tmp_path, name, steps, **changes))
        return begun[-1]

    yield make
    for job in begun:
        if job.process.poll() is None:
            job.kill()


def mounted(*words):
    """Mount, or skip where that is not allowed."""
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs leave to mount a file system: {done.stderr.strip()}")


def remounted_read_only(where):
    """Between two of the writers' files: one that is open for writing is in the way."""
    for _ in range(400):
        done = subprocess.run(["mount", "-o", "remount,ro", str(where)], capture_output=True, text=True)
        if done.returncode == 0:
            return
        SYSTEM.sleep(0.02)
    raise AssertionError(done.stderr)


def unmounted(path):
    subprocess.run(["umount", "--lazy", str(path)], capture_output=True)


def saved_after(job, what):
    """Wait for one more commit, and one more after it, so that it began after now."""
    seen = len(job.tiers(what))
    job.until(lambda: len(job.tiers(what)) >= seen + 2)


@pytest.mark.long
def test_a_disk_that_fills_up_turns_read_only_and_vanishes_fails_saves_by_name_and_the_job_trains_on(start, tmp_path):
    """CS-26, CS-37, on a real tmpfs: each state of it by its own words, and it serves again when it is mended."""
    where = tmp_path / "ckpt"
    where.mkdir()
    mounted("-t", "tmpfs", "-o", "size=1m", "none", where)
    try:
        job = start("run", 100000, pause_s=0.005, interval=4)
        job.until(lambda: len(job.tiers("committed")) >= 2)
        ballast = tmp_path / "ckpt" / "ballast"
        with suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                continue
        saved_after(job, "failed")
        ballast.unlink()
        saved_after(job, "committed")
        remounted_read_only(where)
        saved_after(job, "failed")
        mounted("-o", "remount,rw", where)
        saved_after(job, "committed")
        told = [w for found in catalog.scan(str(where)) for w in catalog.verify(found)]
        left = {found.step for found in catalog.scan(str(where))}  # what is retired goes meanwhile
        assert not [wound for wound in told if wound.step in left]
        unmounted(where)
        saved_after(job, "failed")
        assert os.listdir(where) == [], "nothing is written below a mount that went away"
        trained = max(step for _, step in job.losses_by_step())
        job.until(lambda: max(step for _, step in job.losses_by_step()) > trained + 20)
        job.process.send_signal(signal.SIGTERM)
        code, told = job.end()
    finally:
        unmounted(where)
    assert code == 1, "the step that it ended with is lost, and so it says"
    assert re.search(r"Step \d+ was done, and the newest durable checkpoint is of step \d+", told)
    assert "No space left on device (ENOSPC); free space there" in told
    assert "Read-only file system (EROFS)" in told
    assert "is not the directory that this job began with: its owner file is gone. A mount went away" in told
    assert len({line.split()[3] for line in job.losses.read_text().splitlines()}) == 2, "the ranks never stopped"


class Frozen:
    """An ext4 on a loop device that can be frozen: whoever writes waits in the kernel, and not even SIGKILL ends it."""

    def __init__(self, folder, where):
        image = folder / "image"
        with open(image, "wb") as file:
            file.truncate(32 << 20)
        done = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs mkfs.ext4: {done.stderr.strip()}")
        where.mkdir()
        mounted("-o", "loop", image, where)
        self.where = where

    def freeze(self):
        done = subprocess.run(["fsfreeze", "--freeze", str(self.where)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs fsfreeze on a loop device: {done.stderr.strip()}")

    def thaw(self):
        subprocess.run(["fsfreeze", "--unfreeze", str(self.where)], capture_output=True)


@contextmanager
def frozen(tmp_path):
    for tool in ("mkfs.ext4", "fsfreeze", "mount"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian: e2fsprogs, util-linux)")
    disk = Frozen(tmp_path, tmp_path / "ckpt")
    try:
        yield disk
    finally:
        disk.thaw()
        unmounted(disk.where)


def test_storage_that_never_returns_stops_neither_training_nor_the_end_nor_the_next_start(start, tmp_path):
    """A frozen device: writers hang inside the kernel. What was durable is there when it thaws."""
    with frozen(tmp_path) as disk:
        job = start("run", 150, pause_s=0.01, interval=5, more=["--grace", "2"])
        job.until(lambda: job.tiers("committed"))
        disk.freeze()
        trained = max(step for _, step in job.losses_by_step())
        job.until(lambda: max(step for _, step in job.losses_by_step()) > trained + 40)  # further than any save
        # Whoever hangs in the kernel holds the pipe too: its end never comes.
        code = job.process.wait(60)
        os.set_blocking(job.process.stdout.fileno(), False)
        told = job.process.stdout.read()
        assert code == 1
        assert max(step for _, step in job.losses_by_step()) == 150
        assert "has taken nothing for 2 s at the job's end; it is stuck" in told
        assert "was not saved (waiting for the writer of rank" in told
        durable = max(job.tiers("committed"))

        held = Held(str(disk.where), silent_s=1.0)
        began = SYSTEM.now()
        with pytest.raises(UnreachableStorage, match=r"does not answer: nothing has come back .* stuck, or gone"):
            held.open("the next job")
        held.close()
        assert SYSTEM.now() - began < 30, "nobody waits for it"

        disk.thaw()
        job.process.stdout.close()
        again = start("again", 160, interval=5)
        code, told = again.end()
        assert code == 0, told
        assert {e["step"] for e in again.events("Restored")} == {max(durable, *steps_after_thaw(again))}
        assert steps_in(disk.where)[0] == 160


@pytest.mark.long
def test_a_job_that_is_asked_to_end_over_storage_that_never_returns_says_what_is_durable(start, tmp_path):
    """The grace time bounds it: 1, since a step that was done is lost, and the words name the one that is not."""
    with frozen(tmp_path) as disk:
        job = start("run", 100000, pause_s=0.05, interval=5, more=["--grace", "4"])
        job.until(lambda: job.tiers("committed"))
        disk.freeze()
        durable = max(job.tiers("committed"))
        trained = max(step for _, step in job.losses_by_step())
        job.until(lambda: max(step for _, step in job.losses_by_step()) > trained + 10)
        began = SYSTEM.now()
        job.process.send_signal(signal.SIGTERM)
        code = job.process.wait(60)
        assert SYSTEM.now() - began < 30, "the grace time, and what a busy machine adds"
        os.set_blocking(job.process.stdout.fileno(), False)
        told = job.process.stdout.read()
        last = max(step for _, step in job.losses_by_step())
        assert code == 1
        assert f"Step {last} was done, and the newest durable checkpoint is of step {durable}" in told
        job.process.stdout.close()


def steps_after_thaw(job):
    """A save that hung may have come through in the thaw: then it is whole, and newer than what was reported."""
    return {e["step"] for e in job.events("Restored")}


ERRORS = [("fsync", "EIO", "Input/output error (EIO); the device reports an error"),
          ("write", "EDQUOT", "the quota is used up"),
          ("mkdir", "EACCES", "Permission denied (EACCES); give this user the right to write there"),
          ("rename", "ENOSPC", "No space left on device (ENOSPC)"),
          ("close", "EIO", "Input/output error (EIO)")]  # fmt: skip


@pytest.mark.long
def test_errors_of_the_device_the_quota_and_the_rights_fail_one_save_each_by_name(start, tmp_path):
    """strace gives rank 0's writer one error after another (CS-26): each save says what, where, and what mends it."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace (Debian: apt-get install strace), which lets a call of another process fail")
    job = start("run", 100000, pause_s=0.005, interval=4)
    job.until(lambda: job.tiers("committed"))
    for call, error, _ in ERRORS:
        pid = job.writers()["writer-0"]
        inject = ["-e", f"trace={call}", "-e", f"inject={call}:error={error}:when=1+"]
        command = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(pid), *inject]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            seen = len(job.tiers("failed"))
            job.until(lambda seen=seen, strace=strace: len(job.tiers("failed")) > seen or strace.poll() is not None)
            if strace.poll() is not None and "not permitted" in (text := strace.stderr.read()):
                pytest.skip(f"needs leave to trace processes: {text.strip()}")
        finally:
            strace.terminate()
            strace.wait(10)
            strace.stderr.close()
        saved_after(job, "committed")
    job.process.send_signal(signal.SIGTERM)
    code, told = job.end()
    assert code == 143
    for _, error, words in ERRORS:
        assert words in told, error
    assert not [w for found in catalog.scan(str(tmp_path / "ckpt")) for w in catalog.verify(found)]


def test_a_second_job_on_the_directory_is_refused_by_the_first_one_s_name(start, tmp_path):
    first = start("first", 100000, pause_s=0.05, interval=5)
    first.until(lambda: first.tiers("committed"))
    second = start("second", 20)
    code, told = second.end()
    assert code == 78
    assert f"is in use by the run {tmp_path}/first (process " in told
    assert "End that job, or give --checkpoint-dir another directory" in told
    assert not second.losses.exists()
    saved_after(first, "committed")
    first.process.send_signal(signal.SIGTERM)
    code, told = first.end()
    assert code == 143
    assert first.tiers("failed") == []
    third = start("third", 1)
    assert third.end()[0] == 0, "the directory is free at once"


class Served:
    """A directory by way of a server in user space. A job that is given its process stops it before it restores."""

    def __init__(self, folder):
        self.backing, self.where = folder / "backing", folder / "ckpt"
        self.backing.mkdir()
        self.where.mkdir()
        self.process = subprocess.Popen(["bindfs", "-f", str(self.backing), str(self.where)], stderr=subprocess.PIPE)
        deadline = SYSTEM.now() + 60
        while not os.path.ismount(self.where):
            if self.process.poll() is not None:
                pytest.skip(f"needs leave to mount by FUSE: {self.process.stderr.read().decode().strip()}")
            assert SYSTEM.now() < deadline
            SYSTEM.sleep(0.02)

    def end(self):
        self.process.send_signal(signal.SIGCONT)
        unmounted(self.where)
        self.process.terminate()
        self.process.wait(60)
        self.process.stderr.close()


@pytest.mark.long
def test_a_read_that_never_returns_in_a_restore_ends_the_job_with_75_by_name_and_begins_nothing_older(start, tmp_path):
    """The server stands still when the ranks are about to restore: each reads by way of a process that may hang."""
    if shutil.which("bindfs") is None:
        pytest.skip("needs bindfs")
    served = Served(tmp_path)
    try:
        first = start("first", 17, interval=5)
        code, told = first.end()
        assert code == 0, told
        stops = {**os.environ, "STOP_BEFORE_RESTORE": str(served.process.pid), "EVERSTEP_STORAGE_DEADLINE": "4"}
        second = start("second", 30, interval=5, environment=stops, more=["--grace", "2"])
        code = second.process.wait(90)  # who hangs in the kernel holds the pipe too: its end never comes
        os.set_blocking(second.process.stdout.fileno(), False)
        told = second.process.stdout.read()
        second.process.stdout.close()
        assert code == 75, told
        assert "step-17 does not answer: a read has not come back for 4 s" in told
        assert "nothing older is taken in its stead" in told
        assert not second.losses.exists(), "a step was done"
        served.process.send_signal(signal.SIGCONT)
        third = start("third", 30, interval=5)
        code, told = third.end()
        assert code == 0, told
        assert {e["step"] for e in third.events("Restored")} == {17}
    finally:
        served.end()
