"""Reading a run folder: torn, doubled, foreign and empty files."""

import errno
import os
import shutil
from dataclasses import replace

import pytest

from everstep.errors import LedgerError, UsageError
from everstep.events import GenerationStarted, ProcessEnded, ProcessStarted, RunEnded, RunStarted
from everstep.goodput.core.accounting import account
from everstep.goodput.log import newest_run, read_run
from everstep.testing.simulated_run import SimulatedFault as Fault
from everstep.testing.simulated_run import SimulatedRun


@pytest.fixture
def folder(tmp_path):
    return SimulatedRun(ranks=2, steps=5).write(tmp_path / "run")


def test_all_records_of_all_processes_are_read(folder):
    log = read_run(folder)
    assert len(log.records) == len(SimulatedRun(ranks=2, steps=5).run())
    assert (log.torn, log.unread) == (0, [])


def test_a_torn_last_line_is_ignored_and_counted_apart(folder):
    path = folder / "events" / "worker-1000.jsonl"
    path.write_text(path.read_text()[:-30])
    log = read_run(folder)
    assert (log.torn, log.unread) == (1, [])


@pytest.mark.parametrize(
    "line",
    ['{"v":1,"event":"StepD', "not json", '["a"]', '{"v":1,"event":"Unheard","at":{},"is":{}}', "\x00\x00", "3",
     '{"v":1,"event":"Notice","at":{"mono_s":NaN,"wall_s":1,"boot_id":"a","pid":1,"role":"agent"},"is":{"text":""}}',
     '{"v":1,"event":"Notice","at":{"mono_s":"1","wall_s":1,"boot_id":"a","pid":1,"role":"agent"},"is":{"text":""}}'],
)  # fmt: skip
def test_any_other_line_that_cannot_be_read_is_counted_with_its_place(folder, line):
    path = folder / "events" / "worker-1000.jsonl"
    first, *rest = path.read_text().strip().split("\n")
    path.write_text("\n".join(["", first, line, *rest]))
    log = read_run(folder)
    assert len(log.unread) == 1
    assert log.unread[0].startswith("worker-1000.jsonl, line 2: ")


def test_a_line_that_stands_twice_counts_once(folder):
    copy = folder / "events" / "copy.jsonl"
    copy.write_text((folder / "events" / "worker-1000.jsonl").read_text())
    assert len(read_run(folder).records) == len(SimulatedRun(ranks=2, steps=5).run())


def test_a_foreign_folder_is_refused_with_the_mend(tmp_path):
    with pytest.raises(UsageError, match=r"first line that the run prints"):
        read_run(tmp_path)
    with pytest.raises(UsageError, match=r"not a folder"):
        read_run(tmp_path / "nowhere")


def test_a_folder_without_one_readable_record_is_refused(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "agent-1.jsonl").write_text('\n{"v":1,"eve')
    with pytest.raises(LedgerError, match=r"killed before its first record"):
        read_run(tmp_path)


def test_the_newest_run_is_found_and_none_is_told(tmp_path):
    with pytest.raises(UsageError, match=r"everstep report RUN_DIR"):
        newest_run(tmp_path / "none")
    for name in ("20260101-a", "20260102-b"):
        SimulatedRun(ranks=1, steps=2).write(tmp_path / name)
    assert newest_run(tmp_path).name == "20260102-b"
    (tmp_path / "20260103-c" / "events").mkdir(parents=True)
    (tmp_path / "20260103-c" / "events" / "agent-1.jsonl").touch()
    assert newest_run(tmp_path).name == "20260102-b", "one that never began"


def test_events_that_this_user_may_not_list_are_told_as_such(tmp_path, monkeypatch):
    SimulatedRun(ranks=1, steps=2).write(tmp_path / "run")

    def failing(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(UsageError, match="cannot be listed: Permission denied; read it as the user who ran it"):
        read_run(tmp_path / "run")


def _on_two_nodes(tmp_path, faults=()):
    """The same run with rank 1 on another node, whose processes have the numbers that the first node's have."""
    first, second = [], []
    for record in SimulatedRun(ranks=2, steps=12, spares=0, faults=list(faults)).run():
        event, stamp = record.event, record.stamp
        if isinstance(event, GenerationStarted):
            members = tuple((rank, slot, pid - rank, why) for rank, slot, pid, why in event.members)
            roster = replace(event, members=members, nodes=("node-0", "node-1"))
            first.append(replace(record, event=replace(roster, node="node-0")))
            second.append(replace(record, event=replace(roster, node="node-1")))
        elif isinstance(event, ProcessStarted | ProcessEnded) and event.name == "worker-1":
            second.append(replace(record, event=replace(event, child_pid=event.child_pid - 1)))
        elif stamp.role == "worker" and stamp.rank == 1:
            second.append(replace(record, stamp=replace(stamp, pid=stamp.pid - 1)))
        else:
            first.append(record)
            if isinstance(event, RunStarted | RunEnded):
                second.append(record)
    for folder, records in ((tmp_path / "run", first), (tmp_path / "run/node-1", second)):
        (folder / "events").mkdir(parents=True)
        (folder / "events" / "all.jsonl").write_text("".join(f"{record.to_json()}\n" for record in records))
    return tmp_path / "run"


def test_what_other_nodes_have_written_below_it_belongs_to_the_run(tmp_path):
    ledger = account(read_run(_on_two_nodes(tmp_path)).records)
    whole = account(SimulatedRun(ranks=2, steps=12, spares=0).run())
    assert (ledger.errors, ledger.figures.steps) == ([], 12)
    assert ledger.ranks == whole.ranks
    assert len(ledger.story.sessions) == 1


def test_a_process_of_another_node_is_not_taken_for_one_of_the_same_number_here(tmp_path):
    ledger = account(read_run(_on_two_nodes(tmp_path, [Fault(6, 1, "exception", 0.5)])).records)
    whole = account(SimulatedRun(ranks=2, steps=12, spares=0, faults=[Fault(6, 1, "exception", 0.5)]).run())
    assert ledger.errors == []
    assert ledger.ranks == whole.ranks
    assert [row.detect_s for row in ledger.recoveries] == [row.detect_s for row in whole.recoveries]


def test_ranks_of_which_nothing_is_here_are_named_and_make_nothing_untrue(tmp_path):
    folder = _on_two_nodes(tmp_path, [Fault(6, 1, "exception", 0.5)])
    shutil.rmtree(folder / "node-1")
    ledger = account(read_run(folder).records)
    assert (ledger.errors, ledger.figures.steps, [rank.rank for rank in ledger.ranks]) == ([], 12, [0])
    assert [(row.step, row.rank, row.steps_lost) for row in ledger.recoveries] == [(6, 1, 0)]
    assert any("what rank 1 did on other nodes is not in this folder" in note for note in ledger.notes)
