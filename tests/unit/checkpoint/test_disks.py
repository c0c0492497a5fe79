"""Two directories of one job: the node's own beside the shared one. No processes."""

import errno
import os
import shutil

import pytest

from everstep.checkpoint.core import names
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.disks import nearest_first
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.shares import shares
from everstep.errors import ConfigurationError
from everstep.testing.disk_bench import BenchShelf, DiskBench
from everstep.testing.disks import HostileFiles, Wound
from everstep.testing.states import rank_state


class Half(DiskBench):
    """One of the two directories, with its writers and its side of the ranks."""

    def __init__(self, both, tier, directory, **more):
        self.both, self.tier = both, tier
        super().__init__(directory, start=False, **more)

    def shelf_type(self, world_size):
        return self.both.shelf

    def make(self, directory, interval, keep):
        behind = self.both.halves[0].disk if self.both.halves else None
        return Disk(directory, interval, self.both.shares.pop(), keep, self.tier, behind=behind)


class Both:
    """A job that writes to two directories."""

    def __init__(self, tmp_path, *, interval=20, near=5, files=None, near_files=None):
        self.shelf = BenchShelf(2)
        self.shares = shares(self.shelf, 2)
        self.halves = []
        for tier, every, hostile in (("disk", interval, files), ("local", near, near_files)):
            more = {"files": lambda rank, hostile=hostile: hostile} if hostile else {}
            self.halves.append(Half(self, tier, str(tmp_path / tier), interval=every, **more))
        self.main, self.near = self.halves
        self.generation = -1
        try:
            for half in self.halves:
                half.start()
        except ConfigurationError:
            self.close()
            raise

    def enter(self):
        """The next generation; return the plan it begins from."""
        self.main.enter(nearest_first([half.disk for half in self.halves]))
        plan, self.near.generation = self.shelf.plan, self.main.generation - 1
        self.near.enter(nearest_first([half.disk for half in self.halves]))
        self.shelf.plan = plan
        return plan

    def steps(self, first, last, *, near=True, main=True):
        for step in range(first, last + 1):
            for rank in range(2):
                due = [half.clients[rank].due(step) for half in self.halves]
                buffer = self.shelf.take(rank, step, self.main.generation)
                if any(due):
                    self.shelf.hold(rank, buffer)
                for half in self.halves:
                    half.clients[rank].staged(buffer, lambda step=step: step)
            if main:
                self.main.write()
            if near:
                self.near.write()

    def drain(self):
        return [half.drain() for half in self.halves]

    def close(self):
        for half in self.halves:
            half.disk.close()
            for writer in half.writers:
                writer.close()
            half.writers.clear()
        self.shelf.close()


@pytest.fixture
def job(tmp_path):
    made = []

    def make(**more):
        made.append(Both(tmp_path, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def check(path, step):
    for rank in range(2):
        with open_checkpoint(str(path / f"step-{step}"), rank, 2) as state:
            assert bytes(state.payload()) == rank_state(rank, 2, step).payload


def inside(path):
    return sorted((n for n in os.listdir(path) if not n.startswith(".")), key=lambda n: (len(n), n))


def test_both_are_written_from_the_same_buffers_each_at_its_own_interval(job, tmp_path):
    b = job()
    b.enter()
    b.steps(1, 43)
    assert b.main.tiers("committed") == [20, 40]
    assert b.near.tiers("committed") == [5, 10, 15, 20, 25, 30, 35, 40]
    assert b.drain() == [True, True]
    assert inside(tmp_path / "disk") == ["step-40", "step-43"]  # the last one is saved once
    assert inside(tmp_path / "local") == ["step-35", "step-40"]
    check(tmp_path / "disk", 40)
    check(tmp_path / "local", 40)
    assert b.shelf.held == set()
    assert [half.disk.problems() for half in b.halves] == [(), ()]


def test_a_buffer_that_both_read_is_free_when_the_slower_has_read_it(job, tmp_path):
    b = job()
    b.enter()
    b.steps(1, 19)
    b.steps(20, 20, main=False)
    assert b.near.tiers("committed")[-1] == 20
    assert len(b.shelf.held) == 2
    b.steps(21, 24, main=False)
    b.main.write()
    assert b.shelf.held == set()
    check(tmp_path / "disk", 20)


def test_a_restart_takes_the_newest_and_of_equal_steps_the_nearest(job, tmp_path):
    first = job()
    first.enter()
    first.steps(1, 27)
    first.close()
    second = job()
    plan = second.enter()
    assert (plan.step, plan.tier) == (25, "local")
    assert plan.committed.where["path"] == str(tmp_path / "local" / "step-25")
    second.close()
    shutil.rmtree(tmp_path / "local" / "step-25")
    b = job()
    plan = b.enter()
    assert (plan.step, plan.tier) == (20, "local")
    b.near.clients[0].damaged(20, "__0_0.distcp: a byte")
    b.shelf.close()
    plan = b.enter()
    assert (plan.step, plan.tier) == (20, "disk")


def test_a_local_directory_that_is_lost_costs_a_notice(job, tmp_path):
    first = job()
    first.enter()
    first.steps(1, 27)
    first.close()
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "local").write_text("no directory")
    b = job()
    assert b.enter().step == 20
    (told,) = b.near.notices("warning")
    assert "nothing is read from or written to the local tier" in told
    b.steps(21, 43)
    assert b.drain() == [True, True]
    assert b.near.disk.problems() == ()
    assert inside(tmp_path / "disk") == ["step-40", "step-43"]


def test_a_local_directory_that_fills_up_costs_notices_and_no_exit_status(job, tmp_path):
    b = job(near_files=HostileFiles({("write", 0): Wound(errno.ENOSPC)}))
    b.enter()
    b.steps(1, 21)
    assert b.near.tiers("failed") == [5, 10, 15, 20]
    assert b.near.disk.problems() == ()
    assert "was not saved on local" in b.near.notices("warning")[0]
    assert not b.near.notices("error")
    assert [client.problems() for client in b.near.clients] == [[], []]
    assert b.main.tiers("committed") == [20]
    assert b.drain() == [True, True]
    check(tmp_path / "disk", 20)


def test_shared_storage_that_fails_is_told_and_the_local_one_serves_the_restart(job, tmp_path):
    b = job(files=HostileFiles({("write", 0): Wound(errno.EIO)}))
    b.enter()
    b.steps(1, 22)
    assert b.drain() == [True, True]
    assert len(b.main.disk.problems()) == 2
    b.close()
    plan = job().enter()
    assert (plan.step, plan.tier) == (20, "local")


def damage(folder):
    for name in inside(folder):
        (folder / name / "__0_0.distcp").write_bytes(b"")


def test_when_no_shared_one_is_whole_the_local_one_is_taken_and_with_none_the_job_is_refused(job, tmp_path):
    first = job()
    first.enter()
    first.steps(1, 27)
    first.close()
    damage(tmp_path / "disk")
    b = job()
    assert (b.enter().step, b.shelf.plan.tier) == (25, "local")
    b.close()
    damage(tmp_path / "local")
    with pytest.raises(ConfigurationError, match=r"no checkpoint in .*disk is whole"):
        job()


def test_a_local_one_that_is_damaged_with_nothing_in_the_shared_one_is_no_fresh_start(job, tmp_path):
    first = job()
    first.enter()
    first.steps(1, 17)  # none was due in the shared one
    first.close()
    damage(tmp_path / "local")
    with pytest.raises(ConfigurationError, match=r"no checkpoint in .*local is whole"):
        job()


def test_a_local_directory_of_another_training_is_never_taken(job, tmp_path):
    """It would be newer than all that this one has, and somebody else's state."""
    other = job()
    other.enter()
    other.steps(1, 47)
    other.close()
    shutil.rmtree(tmp_path / "disk")  # begun anew: the shared directory is another one under the same name
    local = shutil.move(tmp_path / "local", tmp_path / "other")
    a = job()
    a.enter()
    a.steps(1, 27)
    a.close()
    shutil.rmtree(tmp_path / "local")
    shutil.move(local, tmp_path / "local")
    b = job()
    assert b.enter().step == 20
    assert "are of another training" in b.near.notices("warning")[0]
    b.steps(21, 40)
    b.drain()
    b.close()
    assert inside(tmp_path / "local") == ["step-40", "step-45"]
    again = job()
    assert (again.enter().step, again.shelf.plan.tier) == (40, "disk")


def test_an_empty_shared_directory_beside_steps_of_a_training_is_no_fresh_start(job, tmp_path):
    """A share that is not mounted looks so: to begin at step 1 again is for a person to say."""
    first = job()
    first.enter()
    first.steps(1, 47)
    first.close()
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(ConfigurationError, match=r"nothing in .*disk, and .*local are of another training.*alone; for"):
        job()
    assert inside(tmp_path / "local") == ["step-40", "step-45"]
    shutil.rmtree(tmp_path / "local")
    assert job().enter().step is None


@pytest.mark.parametrize("torn", [b"", b"abc", b"0123456789abcdef", b"\xff" * 17])
def test_a_torn_name_of_the_shared_one_disowns_the_local_one_rather_than_guess(job, tmp_path, torn):
    first = job()
    first.enter()
    first.steps(1, 27)
    first.close()
    (tmp_path / "disk" / names.SERIES).write_bytes(torn)
    plan = job().enter()
    assert (plan.step, plan.tier) == (20, "disk")
