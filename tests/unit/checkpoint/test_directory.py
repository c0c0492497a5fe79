"""A job's claim: the directory is tried before the first step, dead jobs' leftovers go, everything else stays."""

import errno
import fcntl
import os
import socket
import threading

import pytest

from everstep.checkpoint.core import names
from everstep.checkpoint.directory import Claim, share
from everstep.checkpoint.sole import SoleUse
from everstep.clock import SYSTEM, SystemClock
from everstep.errors import ConfigurationError, UnreachableStorage
from everstep.testing.disks import HostileFiles, UnsyncedFiles, Wound

DEAD = "0123abcd"


@pytest.fixture
def claim(tmp_path):
    made = []

    def make(files=None, directory=tmp_path / "ckpt"):
        made.append(Claim(str(directory), files or UnsyncedFiles()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def leftover(tmp_path, job, step=20):
    path = tmp_path / "ckpt" / str(names.Staging(step, 0, 0, job, 1))
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"half")
    return path


def test_a_fit_directory_is_made_and_nothing_but_the_owner_file_is_in_it(claim, tmp_path):
    mine = claim(directory=tmp_path / "a" / "b")
    assert mine.take("run") == []
    assert os.listdir(tmp_path / "a" / "b") == [names.owner(mine.job)]
    mine.close()
    mine.close()
    assert os.listdir(tmp_path / "a" / "b") == []


def test_a_path_through_a_file_is_refused_with_the_mend(claim, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be made: Not a directory\. Give --checkpoint-dir"):
        claim(directory=tmp_path / "file" / "ckpt").take("run")


@pytest.mark.parametrize(
    ("kind", "doing"),
    [("create", "be written to"), ("write", "be written to"), ("fsync", "be written to"), ("rename", "rename a file"),
     ("fsync_dir", "sync its names"), ("listdir", "list what")],
)  # fmt: skip
def test_what_the_file_system_cannot_do_is_named(claim, kind, doing):
    with pytest.raises(ConfigurationError, match=doing) as caught:
        claim(HostileFiles({(kind, 1): Wound(errno.EROFS)})).take("run")
    assert "Read-only" in str(caught.value)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_told_to_be_freed(claim, code):
    """What is saved there is not lost for it, and another directory would not have it."""
    with pytest.raises(ConfigurationError, match="Free some space there"):
        claim(HostileFiles({("write", 1): Wound(code)})).take("run")


def test_a_listing_that_hides_what_was_written_is_refused(claim):
    class Blind(UnsyncedFiles):
        def listdir(self, path):
            return []

    with pytest.raises(ConfigurationError, match="list what was just written"):
        claim(Blind()).take("run")


def test_leftovers_of_dead_writers_go_and_it_is_said(claim, tmp_path):
    left = leftover(tmp_path, DEAD)
    (tmp_path / "ckpt" / names.owner(DEAD)).write_text("{}")
    (tmp_path / "ckpt" / f".everstep-probe-{DEAD}").touch()
    condemned = tmp_path / "ckpt" / "step-10"
    condemned.mkdir()
    (condemned / names.CONDEMNED).touch()
    (condemned / "__0_0.distcp").touch()
    mine = claim()
    told = mine.take("run")
    assert os.listdir(tmp_path / "ckpt") == [names.owner(mine.job)]
    assert sorted(told) == sorted(
        [
            f"removed {left}, left over by a writer that is gone",
            f"removed {condemned}, which an earlier job had retired for newer checkpoints",
        ]
    )


def test_a_second_job_is_refused_by_the_first_one_s_name_and_touches_nothing(claim, tmp_path):
    living = claim()
    living.take("the other run")
    left = leftover(tmp_path, living.job)
    condemned = tmp_path / "ckpt" / "step-10"
    condemned.mkdir()
    (condemned / names.CONDEMNED).touch()
    before = sorted(os.listdir(tmp_path / "ckpt"))
    with pytest.raises(ConfigurationError, match=r"in use by the run the other run \(process \d+ on .*End that job"):
        claim().take("run")
    assert sorted(os.listdir(tmp_path / "ckpt")) == before
    assert os.listdir(left) == ["__0_0.distcp"]
    living.close()
    assert [text for text in claim().take("run") if str(left) in text]
    assert not left.exists()


def test_a_writer_s_share_keeps_the_claim_after_its_holder(claim, tmp_path):
    first = claim()
    first.take("first")
    writer = share(first.lock)
    os.close(first.fd)
    first.fd = -1
    with pytest.raises(ConfigurationError, match="in use by the run first"):
        claim().take("second")
    os.close(writer)
    claim().take("third")


def test_of_many_that_come_at_once_exactly_one_has_it(tmp_path):
    won, refused, barrier = [], [], threading.Barrier(8)

    def come(number):
        mine = Claim(str(tmp_path / "ckpt"), UnsyncedFiles())
        barrier.wait()
        try:
            mine.take(f"run {number}")
            won.append(mine)
        except ConfigurationError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=come, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(refused) == 7
    assert all("in use by the run" in text for text in refused)
    won[0].close()


def test_a_gate_that_is_never_opened_again_is_told(claim, tmp_path):
    (tmp_path / "ckpt").mkdir()
    fd = os.open(tmp_path / "ckpt" / names.GATE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    clock = Waiting(lambda: None)
    mine = Claim(str(tmp_path / "ckpt"), UnsyncedFiles(), clock)
    with pytest.raises(ConfigurationError, match=r"another job has been looking at .* for over 30 s"):
        mine.take("run")
    os.close(fd)


@pytest.mark.parametrize(
    "name", ["step-20.tmp", "step-20.0.0.tmp", "notes", "step-20.0.0.0123abcd-1.tmp.aside", "checkpoint-20", ".hidden"]
)
def test_foreign_files_stay(claim, tmp_path, name):
    path = tmp_path / "ckpt" / name
    path.mkdir(parents=True)
    (path / "x").touch()
    claim().take("run")
    assert (path / "x").exists()


def test_a_leftover_that_holds_something_foreign_stays_with_it(claim, tmp_path):
    left = leftover(tmp_path, DEAD)
    (left / "notes.txt").write_text("mine")
    told = claim().take("run")
    assert (left / "notes.txt").exists()
    assert "notes.txt, which is not ours" in told[0]


def test_a_link_with_a_name_of_ours_is_not_followed(claim, tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "__0_0.distcp").touch()
    (tmp_path / "ckpt").mkdir()
    os.symlink(target, tmp_path / "ckpt" / str(names.Staging(1, 0, 0, DEAD, 1)))
    claim().take("run")
    assert (target / "__0_0.distcp").exists()


def test_a_leftover_that_cannot_be_removed_is_told_and_does_not_stop_the_job(claim, tmp_path):
    leftover(tmp_path, DEAD)
    files = HostileFiles({("rmdir", 1): Wound(errno.EBUSY)})
    assert "could not be removed" in claim(files).take("run")[0]


class Waiting(SystemClock):
    """A clock in which something happens while somebody waits."""

    def __init__(self, happens, after=3):
        self.slept, self._happens, self._after = 0, happens, after

    def now(self):
        return self.slept * 0.05

    def sleep(self, seconds):
        self.slept += 1
        if self.slept == self._after:
            self._happens()


def test_writers_that_outlive_their_agent_are_waited_for(claim, tmp_path):
    dead = claim()
    dead.take("killed")
    path = tmp_path / "ckpt" / names.owner(dead.job)
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4194304'))
    left = leftover(tmp_path, dead.job)
    clock = Waiting(lambda: os.close(dead.fd))
    mine = Claim(str(tmp_path / "ckpt"), UnsyncedFiles(), clock)
    assert mine.take("next") == [f"removed {left}, left over by a writer that is gone"]
    mine.close()
    dead.fd = -1


def test_a_living_agent_is_not_waited_for(claim, tmp_path):
    claim().take("living")
    clock = Waiting(lambda: None)
    mine = Claim(str(tmp_path / "ckpt"), UnsyncedFiles(), clock)
    with pytest.raises(ConfigurationError, match="in use by the run living"):
        mine.take("next")
    assert clock.slept == 0


@pytest.mark.parametrize("dies", [True, False])
def test_a_lock_of_another_node_is_waited_for_as_long_as_its_lease_may_last(claim, tmp_path, dies):
    """NFS holds a dead node's locks for a while; a living one there is refused in the end."""
    there = claim()
    there.take("elsewhere")
    path = tmp_path / "ckpt" / names.owner(there.job)
    path.write_text(path.read_text().replace(f'"host": "{socket.gethostname()}"', '"host": "another"'))
    clock = Waiting(lambda: os.close(there.fd) if dies else None, after=1800)
    signs = []
    mine = Claim(str(tmp_path / "ckpt"), UnsyncedFiles(), clock, lambda: signs.append(1))
    if dies:
        mine.take("next")
        there.fd = -1
    else:
        with pytest.raises(ConfigurationError, match=r"in use by the run elsewhere .* on another\)"):
            mine.take("next")
    assert clock.now() >= 90
    assert len(signs) > 1000, "whoever waits for us must hear that we are alive"
    mine.close()


@pytest.mark.parametrize(("code", "kind", "words"), [
    (errno.ENOSPC, ConfigurationError, "No space left on device. Free some space there"),
    (errno.EACCES, ConfigurationError, "Permission denied. Give the Checkpointer a directory"),
    (errno.EIO, UnreachableStorage, "is away: it cannot be made or written to: Input/output error"),
])  # fmt: skip
def test_a_checkpointer_s_directory_that_cannot_be_had_is_told_with_its_mend(tmp_path, monkeypatch, code, kind, words):
    def refused(path, **more):
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "makedirs", refused)
    with pytest.raises(kind, match=words):
        SoleUse(str(tmp_path / "ckpt"), "a test", SYSTEM).take(1.0, lambda text: None)
    with pytest.raises(kind, match=words.partition(". Give")[0].partition(" made or")[0]):
        Claim(str(tmp_path / "ckpt"), UnsyncedFiles()).take("run")
