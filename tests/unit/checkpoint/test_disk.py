"""The disk tier of an agent: intents, commits, losses of every kind, the last save, retention. No processes."""

import errno
import os
import random

import pytest

from everstep.checkpoint import catalog
from everstep.checkpoint.core.retention import Keep
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.writers import DEATHS_IN_A_ROW
from everstep.clock import SystemClock
from everstep.errors import ConfigurationError, UsageError
from everstep.testing.disk_bench import DiskBench
from everstep.testing.disks import HostileFiles, Wound
from everstep.testing.states import rank_state


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(**arguments):
        made.append(DiskBench(str(tmp_path / "ckpt"), **arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def on_disk(tmp_path):
    return sorted((n for n in os.listdir(tmp_path / "ckpt") if not n.startswith(".")), key=lambda n: (len(n), n))


def check(tmp_path, step, world_size=2):
    path = str(tmp_path / "ckpt" / f"step-{step}")
    for rank in range(world_size):
        with open_checkpoint(path, rank, world_size) as state:
            assert bytes(state.payload()) == rank_state(rank, world_size, step).payload


def test_every_interval_and_the_last_step_are_saved_and_two_are_kept(bench, tmp_path):
    b = bench()
    b.enter()
    b.steps(1, 35)
    assert b.tiers("committed") == [10, 20, 30]
    assert b.drain()
    assert b.tiers("committed") == [10, 20, 30, 35]
    assert b.tiers("removed") == [10, 20]
    assert on_disk(tmp_path) == ["step-30", "step-35"]
    check(tmp_path, 30)
    check(tmp_path, 35)
    assert b.disk.problems() == ()
    assert b.shelf.held == set()


def test_a_last_step_that_is_durable_already_is_not_saved_again(bench, tmp_path):
    b = bench()
    b.enter()
    b.steps(1, 20)
    assert b.drain()
    assert b.tiers("committed") == [10, 20]


def test_slow_storage_leaves_steps_out_and_never_makes_a_rank_wait(bench, tmp_path):
    b = bench()
    b.enter()
    b.steps(1, 10)
    b.steps(11, 20, write=False)
    b.steps(21, 75, write=False)
    assert b.tiers("committed") == [10]
    b.write()
    b.steps(76, 80)
    assert b.tiers("committed") == [10, 20, 80]
    assert b.tiers("coalesced") == [30, 40, 50, 60, 70]
    check(tmp_path, 80)


def test_ranks_that_run_apart_stage_the_same_step(bench, tmp_path):
    b = bench(world_size=3)
    b.enter()
    for rank in range(3):
        for step in range(1, 16):
            b.end_step(rank, step)
    b.write()
    assert b.tiers("committed") == [10]
    check(tmp_path, 10, 3)


def test_a_rank_that_is_past_the_intent_voids_it_for_all_and_the_next_lies_ahead(bench, tmp_path):
    b = bench(interval=1)
    b.enter()
    b.end_step(0, 1)  # rank 0 stages step 1
    assert b.shelf.held == {(0, 0)}
    b.clients[1].rewound(1)  # rank 1 is past it before it hears
    b.disk.on_message(1, {"kind": "disk.late", "save": b.disk._save.token, "step": 1}, ())
    assert b.tiers("skipped") == [1]
    assert b.shelf.held == set()
    b.steps(2, 6)
    assert b.tiers("committed")
    assert b.disk.problems() == ()


def test_many_ranks_late_for_one_intent_count_once(bench):
    b = bench(world_size=8, interval=1)
    b.enter()
    token = b.disk._save.token
    for rank in range(8):
        b.clients[rank].rewound(1)
        b.disk.on_message(rank, {"kind": "disk.late", "save": token, "step": 1}, ())
    assert b.disk._plan.lead == 1


def test_a_failed_save_gives_back_the_room_of_what_was_given_up(bench, tmp_path):
    hostile = [HostileFiles(), HostileFiles()]
    b = bench(files=lambda rank: hostile[rank])
    b.enter()
    b.steps(1, 30)
    assert on_disk(tmp_path) == ["step-10", "step-20", "step-30"]  # step 10's data wait for readers
    hostile[1].wounds = {("write", 0): Wound(errno.ENOSPC)}
    b.steps(31, 40)
    assert on_disk(tmp_path) == ["step-20", "step-30"]


def test_a_save_that_is_cut_off_by_the_end_shows_in_the_exit_status(bench):
    b = bench()
    b.enter()
    b.steps(1, 9)
    b.steps(10, 10, write=False)
    assert not b.disk.drained(True)
    assert "step 10 was still being written" in b.disk.problems()[0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("kind", ["mkdir", "create", "write", "fsync", "fsync_dir", "rename"])
def test_a_save_that_fails_is_reported_everywhere_and_the_next_goes_on(bench, tmp_path, code, kind):
    """CS-37, and a full disk: named, with its mend, the old ones untouched, partial files gone, training unharmed."""
    hostile = [HostileFiles(), HostileFiles()]
    b = bench(files=lambda rank: hostile[rank])
    b.enter()
    b.steps(1, 15)
    rank = 0 if kind in ("rename",) else 1
    rank = 0 if kind == "mkdir" else rank
    hostile[rank].wounds = {(kind, hostile[rank].calls[kind] + 1): Wound(code)}
    b.steps(16, 20)
    assert b.tiers("failed") == [20]
    assert on_disk(tmp_path) == ["step-10"]
    (problem,) = b.disk.problems()
    assert "step 20 was not saved: rank" in problem
    assert os.strerror(code) in problem
    assert [n for n in b.notices("error") if "the newest durable one is of step 10" in n]
    assert all(client.problems() == [problem] for client in b.clients)
    assert b.shelf.held == set()
    b.steps(21, 30)
    assert b.drain()
    assert on_disk(tmp_path) == ["step-10", "step-30"]
    check(tmp_path, 30)
    assert b.disk.problems() == (problem,)


def test_a_step_that_was_saved_after_all_is_no_problem_any_more(bench, tmp_path):
    hostile = [HostileFiles(), HostileFiles()]
    b = bench(files=lambda rank: hostile[rank])
    b.enter()
    b.steps(1, 15)
    hostile[1].wounds = {("write", hostile[1].calls["write"] + 1): Wound(errno.EIO)}
    b.steps(16, 20)
    assert len(b.disk.problems()) == 1
    assert b.drain()
    assert (b.tiers("failed"), b.tiers("committed")) == ([20], [10, 20])
    assert b.disk.problems() == ()
    check(tmp_path, 20)


def test_a_disk_that_stays_full_fails_each_save_and_not_the_job(bench, tmp_path):
    hostile = [HostileFiles(), HostileFiles({("write", 0): Wound(errno.ENOSPC)})]
    b = bench(files=lambda rank: hostile[rank])
    b.enter()
    b.steps(1, 25)
    assert b.drain()
    assert b.tiers("failed") == [10, 20, 25]
    assert len(b.disk.problems()) == 3
    assert "free space there" in b.disk.problems()[0]
    assert on_disk(tmp_path) == []


@pytest.mark.parametrize("orders", range(12))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_killed_between_any_two_orders(bench, tmp_path, orders, rank):
    b = bench()
    b.enter()
    b.steps(1, 19)
    b.steps(20, 20, write=False)
    b.write(orders)
    b.kill(rank)
    b.write()
    b.steps(21, 30)
    assert b.drain()
    assert sorted(b.tiers("committed") + b.tiers("failed")) == [10, 20, 30]
    assert set(b.tiers("failed")) <= {20}
    assert len(b.disk.problems()) == len(b.tiers("failed"))
    assert b.shelf.held == set()
    assert "another takes its place" in b.notices("warning")[0]
    check(tmp_path, 30)
    assert not [name for name in on_disk(tmp_path) if name.endswith(".tmp")]


def test_a_writer_that_always_dies_is_not_begun_for_ever(bench, tmp_path):
    b = bench()
    b.enter()
    for n in range(DEATHS_IN_A_ROW):
        assert [writer.rank for writer in b.writers].count(1) == 1, n
        b.kill(1)
    assert [writer.rank for writer in b.writers] == [0]
    b.steps(1, 40)
    assert b.drain()
    assert "not begun again" in b.notices("warning")[-1]
    assert b.tiers("committed") == []
    assert b.disk.problems()
    assert b.shelf.held == set()


def test_a_fault_before_all_have_staged_voids_the_intent_and_after_it_the_write_goes_on(bench, tmp_path):
    b = bench()
    b.enter()
    b.steps(1, 9)
    b.end_step(0, 10)  # rank 0 staged, rank 1 died in its step 10
    assert b.enter() == 9
    assert b.tiers("skipped") == [10]
    assert b.shelf.held == set()
    b.steps(10, 19)
    assert b.tiers("committed") == [10]
    b.steps(20, 20, write=False)
    b.end_step(0, 21)
    b.enter()
    assert len(b.shelf.held) == 2
    b.write()
    assert b.tiers("committed") == [10, 20]
    check(tmp_path, 20)


def test_reports_of_a_dead_attempt_never_count_for_its_successor(bench, tmp_path):
    """CS-39: requests carry an identity; what comes late is for nobody."""
    b = bench()
    b.enter()
    b.steps(1, 9)
    old = b.disk._save.token
    b.enter()
    for rank in range(2):
        b.disk.on_message(rank, {"kind": "disk.staged", "save": old, "buffer": 0, "hold": 1}, ())
        b.disk.on_child_message(b.writers[rank], {"kind": "written", "save": old, "bytes": 1}, ())
        b.disk.on_child_message(b.writers[rank], {"kind": "published", "save": old, "bytes": 1}, ())
    assert b.tiers("committed") == []
    b.steps(10, 10)
    assert b.tiers("committed") == [10]


def test_a_restart_of_the_whole_job_begins_from_the_newest_whole_checkpoint(bench, tmp_path):
    first = bench()
    first.enter()
    first.steps(1, 29)
    first.drain()
    first.close()
    path = tmp_path / "ckpt" / "step-29" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    b = bench()
    assert [c.step for c in b.disk.committed()] == [20]
    assert b.disk.committed()[0].where["path"].endswith("ckpt/step-20")
    assert "__1_0.distcp has" in b.notices("error")[0]
    assert "step 20 is taken" in b.notices("error")[0]
    assert b.tiers("damaged") == [29]
    assert b.enter() == 20
    b.steps(21, 29)
    assert b.drain()
    check(tmp_path, 29)  # the damaged one was replaced by a whole one


@pytest.mark.parametrize(
    ("total", "line"),
    [
        (100, "continuing from {path}: 20 of 100 steps are done"),
        (20, "{path} is the whole job (20 steps done, 20 asked for): nothing is left to train; another "
             "--checkpoint-dir starts anew, more steps go on from here"),
        (5, "{path} is the whole job (20 steps done, 5 asked for): nothing is left to train; another "
            "--checkpoint-dir starts anew, more steps go on from here"),
    ],
)  # fmt: skip
def test_going_on_from_an_earlier_job_is_said_once(bench, tmp_path, total, line):
    first = bench()
    first.enter()
    first.clients[0].restored(0, total)  # nothing was there
    first.steps(1, 20)
    first.clients[0].restored(20, total)  # its own: a way back from a fault
    first.drain()
    first.close()
    assert first.notices("info") + first.notices("warning") == []
    b = bench()
    b.enter()
    b.clients[0].restored(20, total)
    b.clients[0].restored(20, total)  # a fault before the first step
    assert b.notices("info") + b.notices("warning") == [line.format(path=tmp_path / "ckpt" / "step-20")]


def test_when_none_is_whole_the_job_is_refused_and_nothing_is_deleted(bench, tmp_path):
    first = bench()
    first.enter()
    first.steps(1, 20)
    first.close()
    for step in (10, 20):
        (tmp_path / "ckpt" / f"step-{step}" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"no checkpoint in .* is whole.*move them away") as caught:
        bench()
    assert "step 20: __0_0.distcp has 0 bytes" in str(caught.value)
    assert "step 10: __0_0.distcp" in str(caught.value)
    assert on_disk(tmp_path) == ["step-10", "step-20"]
    assert [n for n in os.listdir(tmp_path / "ckpt") if n.startswith(".")] == []


def test_a_checkpoint_that_a_restore_cannot_read_is_struck_out(bench, tmp_path):
    first = bench()
    first.enter()
    first.steps(1, 20)
    first.close()
    b = bench()
    b.clients[0].damaged(20, "__0_0.distcp: Input/output error")
    b.clients[1].damaged(20, "__1_0.distcp: Input/output error")
    assert [c.step for c in b.disk.committed()] == [10]
    assert len(b.notices("error")) == 1
    b.enter()
    b.steps(11, 20)
    b.drain()
    assert [c.step for c in b.disk.committed()] == [20, 10]


def test_a_job_whose_checkpoints_all_prove_damaged_does_not_begin_anew(bench, tmp_path):
    """A restore has struck out one after the other, and memory is gone: step 1 again is not for us to choose."""
    first = bench()
    first.enter()
    first.steps(1, 20)
    first.close()
    b = bench()
    told = []
    real = b.disk.on_roster
    b.disk.on_roster = lambda roster: told.append(real(roster)) or told[-1]
    b.enter()
    b.clients[0].damaged(20, "__0_0.distcp: cut")
    assert b.enter() == 10
    b.clients[1].damaged(10, "__1_0.distcp: cut")
    b.enter()
    assert [one[0]["lost"] == "" for one in told] == [True, True, False]
    assert "is whole any more (step 20, 10" in told[-1][1]["lost"]
    assert on_disk(tmp_path) == ["step-10", "step-20"]


@pytest.mark.parametrize(
    ("size", "derived"), [(4, "; generators of ranks from 2 on are derived from rank 0's"), (1, "")]
)
def test_a_world_of_another_size_goes_on_from_it_says_so_once_and_saves_its_own(bench, tmp_path, size, derived):
    first = bench()
    first.enter()
    first.steps(1, 10)
    first.close()
    b = bench(world_size=size)
    assert b.enter() == 10
    assert b.shelf.plan.saved_by == 2
    assert b.shelf.plan.committed.where["saved_by"] == 2
    for _ in range(2):
        b.clients[0].restored(10, 30)
    path = f"{b.disk.directory}/step-10 (saved by 2 ranks, taken up by {size})"
    told = f"continuing from {path}: 10 of 30 steps are done{derived}"
    assert b.notices("info").count(told) == 1
    b.steps(11, 20)
    assert b.drain()
    assert catalog.scan(b.disk.directory)[0].manifest.world_size == size


def test_a_job_that_ends_early_waits_for_what_is_written_and_asks_for_no_more(bench, tmp_path):
    b = bench()
    b.enter()
    b.steps(1, 9)
    b.steps(10, 12, write=False)
    assert not b.disk.drained(False)
    assert b.drain(completed=False)
    assert b.tiers("committed") == [10]
    assert on_disk(tmp_path) == ["step-10"]


def test_a_failing_last_save_shows_in_the_exit_status(bench, tmp_path):
    hostile = [HostileFiles(), HostileFiles()]
    b = bench(files=lambda rank: hostile[rank])
    b.enter()
    b.steps(1, 15)
    hostile[1].wounds = {("fsync", 0): Wound(errno.EIO)}
    assert b.drain()
    assert "step 15 was not saved" in b.disk.problems()[0]
    assert on_disk(tmp_path) == ["step-10"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_nothing_is_refused(bench, keep):
    with pytest.raises(UsageError, match="keep 1 or more"):
        bench(keep=keep)


def test_retention_counts_what_is_complete_while_a_newer_one_fails(bench, tmp_path):
    """CS-31."""
    hostile = [HostileFiles(), HostileFiles()]
    b = bench(keep=1, files=lambda rank: hostile[rank])
    b.enter()
    b.steps(1, 10)
    hostile[1].wounds = {("write", 0): Wound(errno.ENOSPC)}
    b.steps(11, 40)
    assert on_disk(tmp_path) == ["step-10"]
    hostile[1].wounds = {}
    b.steps(41, 60)
    assert b.drain()
    assert on_disk(tmp_path) == ["step-60"]


def _trouble(b, rng, hostile, step):
    """One thing happens; return the step at which the world then is."""
    match rng.choice(["steps", "steps", "slow", "kill", "wound", "fault"]):
        case "slow":
            b.steps(step + 1, step + 8, write=False)
            b.write(rng.randint(0, 6))
            return step + 8
        case "kill" if not b.disk._writers.given_up:
            b.kill(rng.choice([writer.rank for writer in b.writers]))
        case "wound":
            files, code = rng.choice(hostile), rng.choice([errno.ENOSPC, errno.EIO])
            files.wounds = {("any", files.calls["any"] + rng.randint(1, 30)): Wound(code)}
        case "fault" if step:
            return b.enter()
        case _:
            b.steps(step + 1, step + 8)
            return step + 8
    return step


@pytest.mark.parametrize("seed", range(15))
def test_a_life_of_random_troubles_never_loses_what_was_durable(bench, tmp_path, seed):
    rng = random.Random(seed)
    hostile = [HostileFiles() for _ in range(3)]
    b = bench(world_size=3, interval=rng.choice([1, 3, 7]), keep=rng.choice([1, 2]), files=lambda rank: hostile[rank])
    step = b.enter()
    for _ in range(10):
        step = _trouble(b, rng, hostile, step)
        newest = max(b.tiers("committed"), default=None)
        found, _ = catalog.newest_whole(str(tmp_path / "ckpt"))
        assert (found is None and newest is None) or found.step >= newest
    for files in hostile:
        files.wounds = {}
    assert b.drain()
    assert b.shelf.held == set()
    if not b.disk._writers.given_up:
        check(tmp_path, step, 3)
        assert len(b.disk.problems()) == len(b.tiers("failed"))


LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0, 50: 5.0}


def measured_run(bench, end, keep):
    b = bench(keep=keep)
    b.enter()
    for step in range(b.began + 1, end + 1):
        if step in LOSSES:
            b.clients[0].measured(step, {"loss": LOSSES[step]})
        b.steps(step, step)
    assert b.drain()
    return b


def test_the_best_by_a_metric_and_every_n_th_stay_over_jobs(bench, tmp_path):
    """Item 7: the manifest holds what was measured, so the next job knows the best too."""
    keep = Keep(1, every=40, best=1, metric="loss")
    b = measured_run(bench, 30, keep)
    assert on_disk(tmp_path) == ["step-20", "step-30"]
    b.close()
    measured_run(bench, 50, keep)
    assert on_disk(tmp_path) == ["step-20", "step-40", "step-50"]
    assert [one.manifest.metrics for one in catalog.scan(str(tmp_path / "ckpt"))] == [
        {"loss": 5.0}, {"loss": 4.0}, {"loss": 1.0},
    ]  # fmt: skip


def test_a_damaged_one_neither_counts_nor_goes(bench, tmp_path):
    """CS-31: what cannot be restored pushes nothing out, and stays for whoever can mend it."""
    b = bench(keep=1)
    b.enter()
    b.steps(1, 10)
    b.disk.on_message(0, {"kind": "disk.damaged", "step": 10, "text": "a byte"}, ())
    b.steps(11, 20)
    assert on_disk(tmp_path) == ["step-10", "step-20"]
    b.steps(21, 30)
    assert b.drain()
    assert on_disk(tmp_path) == ["step-10", "step-30"]


class Later(SystemClock):
    """Time passes when a test says so."""

    def __init__(self):
        self.passed = 0.0

    def now(self):
        return self.passed


def test_the_end_waits_for_storage_that_moves_and_not_for_one_that_does_not(bench):
    """A write, or an fsync, that never returns stops no exit; how long is waited is the grace time of silence."""
    clock = Later()
    b = bench(clock=clock)
    b.enter()
    b.steps(1, 9)
    b.steps(10, 10, write=False)
    for _ in range(10):
        clock.passed += 10
        assert not b.disk.drained(True)
        b.disk.on_child_message(b.writers[1], {"kind": "moving", "save": b.disk._save.token}, ())
    clock.passed += 16
    assert b.disk.drained(True)
    (problem,) = b.disk.problems()
    assert "the checkpoint of step 10 was not saved (waiting for the writer of rank 0-1)" in problem
    assert "has taken nothing for 15 s at the job's end" in problem
    assert "--grace" in problem


def test_a_removal_that_never_returns_stops_no_exit_either(bench):
    clock = Later()
    b = bench(clock=clock)
    b.enter()
    b.steps(1, 30)
    assert b.disk._condemned
    assert not b.disk.drained(True)
    clock.passed += 16
    assert b.disk.drained(True)
    assert "what was retired is not removed" in b.disk.problems()[-1]


def test_a_step_whose_save_failed_is_not_the_newest_and_is_saved_when_it_comes_again(bench, tmp_path):
    """CL-03."""
    hostile = [HostileFiles(), HostileFiles()]
    b = bench(files=lambda rank: hostile[rank])
    b.enter()
    b.steps(1, 15)
    hostile[1].wounds = {("write", hostile[1].calls["write"] + 1): Wound(errno.EIO)}
    b.steps(16, 20)
    assert b.tiers("failed") == [20]
    assert [one.step for one in b.disk.committed()] == [10]
    b.shelf.close()  # all of memory is lost: back to what is durable
    assert b.enter() == 10
    b.steps(11, 30)
    assert b.drain()
    assert b.tiers("committed") == [10, 20, 30]
    check(tmp_path, 20)


def test_a_directory_in_which_the_owner_s_file_is_not_any_more_is_not_written_to(bench, tmp_path):
    """A mount went away: below it lies another directory, and what is saved there is hidden when it comes back."""
    b = bench()
    b.enter()
    b.steps(1, 10)
    os.rename(tmp_path / "ckpt", tmp_path / "mounted")
    (tmp_path / "ckpt").mkdir()
    b.steps(11, 20)
    assert b.tiers("failed") == [20]
    assert "is not the directory that this job began with" in b.disk.problems()[0]
    assert on_disk(tmp_path) == []
    (tmp_path / "ckpt").rmdir()
    os.rename(tmp_path / "mounted", tmp_path / "ckpt")
    b.steps(21, 30)
    assert b.tiers("committed") == [10, 30]


@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_nothing_is_published_before_every_writer_has_reported(bench, tmp_path, late):
    """CS-33, CS-42: one publisher, after all; a rank that refuses ends the save for all, by its name."""
    hostile = [HostileFiles() for _ in range(4)]
    b = bench(world_size=4, files=lambda rank: hostile[rank])
    b.enter()
    b.steps(1, 9)
    b.steps(10, 10, write=False)
    slow = next(writer for writer in b.writers if writer.rank == late)
    b.writers.remove(slow)
    b.write()
    assert b.tiers("committed") == []
    assert not [name for name in on_disk(tmp_path) if name == "step-10"]
    b.writers.append(slow)
    hostile[late].wounds = {("fsync", 0): Wound(errno.EIO)}
    b.write()
    assert b.tiers("failed") == [10]
    assert f"rank {late}: " in b.disk.problems()[0]
    assert on_disk(tmp_path) == []
