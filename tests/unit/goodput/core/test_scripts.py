"""A script that does not use the library: every second has its place, and what nobody knows is not told as 0."""

import pytest

from everstep.events import (
    Category,
    FaultNoticed,
    GenerationStarted,
    ProcessEnded,
    ProcessStarted,
    Record,
    RunEnded,
    RunStarted,
    Stamp,
)
from everstep.goodput.core.accounting import account
from everstep.goodput.page import render
from everstep.goodput.summary import to_json


class Tape:
    """What the agent of such a run writes: it is the only one that writes anything."""

    def __init__(self, *, wrapped=False):
        self.records = []
        self.say(0.0, RunStarted(job="j", argv=("ddp.py",), world_size=2, spares=0, wrapped=wrapped))

    def say(self, at, event):
        stamp = Stamp(mono_s=100.0 + at, wall_s=1e9 + at, boot_id="b", pid=1, role="agent")
        self.records.append(Record(stamp=stamp, event=event))

    def begin(self, at, number, pids):
        for rank, pid in enumerate(pids):
            self.say(at - 0.5, ProcessStarted(name=f"worker-{rank}", child_pid=pid, incarnation=f"b:{pid}:1"))
        members = tuple((rank, rank, pid, "started") for rank, pid in enumerate(pids))
        self.say(at, GenerationStarted(epoch=0, number=number, world_size=2, members=members))

    def end(self, at, rank, pid, status, *, expected=False):
        self.say(
            at,
            ProcessEnded(name=f"worker-{rank}", child_pid=pid, status=status, expected=expected, child_rank=rank),
        )

    def fault(self, at, number, kind, rank):
        self.say(at, FaultNoticed(number=number, kind=kind, noticed_by="agent node-0", injured_rank=rank))

    def close(self, at, code):
        self.say(at, RunEnded(code=code, reason=""))
        return account(self.records)


def run_to_its_end(tape, at, number, pids):
    tape.begin(at, number, pids)
    tape.end(at + 6.0, 1, pids[1], 0)
    tape.end(at + 7.0, 0, pids[0], 0)
    return tape.close(at + 7.25, 0)


def killed_once(tape):
    """Rank 1 dies at 6 s, which its peer has noticed a moment before; rank 0 is ended at 6.25 s."""
    tape.begin(1.0, 0, (10, 11))
    tape.fault(5.75, 0, "exception", 0)
    tape.end(6.0, 1, 11, -9)
    tape.fault(6.0, 0, "death", 1)
    tape.end(6.25, 0, 10, -9, expected=True)


def test_a_fault_free_run_closes():
    ledger = run_to_its_end(Tape(), 1.0, 0, (10, 11))
    assert ledger.errors == []
    first, second = (rank.seconds for rank in ledger.ranks)
    assert first == {Category.STARTUP: 1.0, Category.SCRIPT: 7.0, Category.TAIL: 0.25}
    assert second == {Category.STARTUP: 1.0, Category.SCRIPT: 6.0, Category.COMPLETION: 1.0, Category.TAIL: 0.25}
    told = to_json(ledger)
    assert told["steps"] is told["training_goodput"] is told["checkpoint_efficiency"] is None
    assert any("does not use the library" in note for note in ledger.notes)


def test_a_survived_kill_is_counted_and_tells_no_step():
    tape = Tape()
    killed_once(tape)
    ledger = run_to_its_end(tape, 7.0, 1, (20, 21))
    assert ledger.errors == []
    (row,) = ledger.recoveries
    assert (row.rank, row.type) == (1, "death")
    assert row.step is row.steps_lost is row.restored_from is None
    assert row.recovery_s == pytest.approx(1.25)
    assert row.detect_s + row.stop_s + row.regroup_s == pytest.approx(row.recovery_s)
    assert "1 of 1" in render(ledger, "run")
    for rank in ledger.ranks:
        assert rank.unplaced_s == 0
        assert sum(rank.seconds.values()) == pytest.approx(14.25)
        assert rank.seconds[Category.SCRIPT] < 4.75 + 7.01


def test_a_fault_after_which_no_start_ran_on_is_not_survived():
    tape = Tape()
    killed_once(tape)
    tape.begin(7.0, 1, (20, 21))
    tape.fault(8.0, 1, "exception", 0)
    tape.end(8.5, 0, 20, 1)
    tape.end(8.5, 1, 21, -9, expected=True)
    ledger = tape.close(9.0, 1)
    assert ledger.errors == []
    assert [row.recovery_s for row in ledger.recoveries] == [None, None]
    assert "0 of 2" in render(ledger, "run")


def test_a_rank_that_was_done_before_the_fault_has_its_place():
    tape = Tape()
    tape.begin(1.0, 0, (10, 11))
    tape.end(3.0, 0, 10, 0)
    tape.end(6.0, 1, 11, -9)
    tape.fault(6.0, 0, "death", 1)
    ledger = run_to_its_end(tape, 7.0, 1, (20, 21))
    assert ledger.errors == []
    assert ledger.ranks[0].seconds[Category.COMPLETION] == pytest.approx(3.0)


def test_a_run_that_still_goes_on_is_told_so_far():
    tape = Tape()
    tape.begin(1.0, 0, (10, 11))
    tape.end(3.0, 1, 11, 0)
    ledger = account(tape.records, until_s=1e9 + 5.0)
    assert ledger.errors == []
    assert ledger.figures.steps is None


def test_a_ledger_of_before_says_nothing_of_the_script_and_closes():
    """RunStarted had no such field: the script's time was told as start-up."""
    ledger = run_to_its_end(Tape(wrapped=True), 1.0, 0, (10, 11))
    assert ledger.errors == []
    assert ledger.figures.steps == 0
