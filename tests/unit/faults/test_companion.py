"""Once in the life of a job, recorded before it happens."""

import json
import os
from pathlib import Path

import pytest

from everstep.errors import UsageError
from everstep.events import FaultInjected, Notice
from everstep.faults.companion import RELEASE_S, FaultCompanion
from everstep.faults.core import codec
from everstep.faults.core.plan import Plan, PlannedFault, Spec, plan_of
from everstep.faults.flags import Request
from everstep.recovery.core.words import Incarnation, Member, Roster

SPEC = Spec(5, 42, ("exception", "hang", "sigkill"))
SIZED = Spec(5, 42, ("exception", "hang", "sigkill"), steps=200)
PLAN = plan_of(SIZED, 2, 200)


def started(host, request=None):
    shown = []
    companion = FaultCompanion(request, shown.append)
    companion.start(host)
    return companion, shown


def say(companion, host, rank, kind, **body):
    companion.on_message(rank, {"kind": f"fault.{kind}", "call": 7, **body}, ())
    return host.take()


def fire(companion, host, fault, position="forward", rank=None):
    rank = fault.rank if rank is None else rank
    [(to, answer)] = say(companion, host, rank, "fire", index=fault.index, position=position)
    assert to == rank
    assert answer["call"] == 7
    return answer["kind"]


def test_a_sized_plan_is_made_shown_saved_and_told_at_start(host, tmp_path):
    companion, shown = started(host, Request(SIZED, save_to=tmp_path / "copy.json"))
    assert shown == [codec.table(PLAN)]
    assert codec.loads((tmp_path / "copy.json").read_text(), "copy") == (PLAN, {})
    told = companion.on_roster(roster_of(host))
    assert told == {0: {"rows": codec.rows(PLAN.faults)}, 1: {"rows": codec.rows(PLAN.faults)}}


def roster_of(host):
    return Roster(1, 0, tuple(Member(r, Incarnation("b", r, 0), "n", r, False, "kept") for r in range(host.world_size)))


def test_without_a_number_of_steps_the_plan_is_made_at_the_first_word(host):
    companion, shown = started(host, Request(SPEC))
    assert shown == []
    assert companion.on_roster(roster_of(host)) == {0: {"rows": None}, 1: {"rows": None}}
    for rank in (1, 0):
        [(to, answer)] = say(companion, host, rank, "total", steps=200)
        assert (to, answer["kind"], answer["rows"]) == (rank, "fault.plan", codec.rows(PLAN.faults))
    assert len(shown) == 1
    assert companion.on_roster(roster_of(host))[1] == {"rows": codec.rows(PLAN.faults)}


def test_no_flags_no_plan(host):
    companion, shown = started(host)
    assert companion.on_roster(roster_of(host)) == {}
    assert say(companion, host, 0, "total", steps=200)[0][1]["rows"] == []
    assert shown == []
    assert not Path(host.run_dir).exists()
    assert companion.drained(completed=True)
    assert host.events == []


def test_recorded_and_told_to_the_ledger_before_go(host, monkeypatch):
    companion, _ = started(host, Request(SIZED))
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), host.order.append("synced")))
    assert fire(companion, host, PLAN.faults[0], "backward") == "fault.go"
    assert host.order == ["synced", "synced", "FaultInjected", "fault.go"]
    first = PLAN.faults[0]
    assert host.events == [
        FaultInjected(fault=0, type=first.type, step=first.step, injured_rank=first.rank, position="backward")
    ]
    assert codec.loads((Path(host.run_dir) / "faults.json").read_text(), "x") == (PLAN, {0: host.clock.wall()})


def test_once_in_the_same_agent_and_after_it(host):
    """FI-01: in-process restart and replaced process (same agent), whole-job restart (new agent, same folder)."""
    companion, _ = started(host, Request(SIZED))
    assert fire(companion, host, PLAN.faults[0]) == "fault.go"
    companion.on_stopped(0)
    assert [row[0] for row in companion.on_roster(roster_of(host))[0]["rows"]] == [1, 2, 3, 4]
    assert fire(companion, host, PLAN.faults[0]) == "fault.no"
    again, shown = started(host, Request(SIZED))
    assert fire(again, host, PLAN.faults[0]) == "fault.no"
    assert fire(again, host, PLAN.faults[1]) == "fault.go"
    assert "fired" in shown[0]
    third, _ = started(host, Request(SIZED))
    assert [row[0] for row in third.on_roster(roster_of(host))[1]["rows"]] == [2, 3, 4]


@pytest.mark.parametrize("killed_after", ["new file written", "renamed"])
def test_killed_while_it_records(host, killed_after, monkeypatch):
    """An agent that dies before the rename has let nothing go; one that dies after it never lets it go again."""

    class Killed(BaseException):
        pass

    companion, _ = started(host, Request(SIZED))
    replace = Path.replace

    def die(self, target):
        if killed_after == "renamed":
            replace(self, target)
        raise Killed

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(Killed):
        fire(companion, host, PLAN.faults[0])
    monkeypatch.undo()
    assert host.sent == []
    again, _ = started(host, Request(SIZED))
    assert fire(again, host, PLAN.faults[0]) == ("fault.no" if killed_after == "renamed" else "fault.go")


def test_a_fault_that_cannot_be_recorded_is_not_injected(host, monkeypatch):
    companion, _ = started(host, Request(SIZED))

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert fire(companion, host, PLAN.faults[0]) == "fault.no"
    [notice] = host.events
    assert isinstance(notice, Notice)
    assert "No space left" in notice.text
    monkeypatch.undo()
    assert fire(companion, host, PLAN.faults[0]) == "fault.go"


def test_only_its_own_rank_may_fire_a_fault_and_unknown_ones_are_refused(host):
    companion, _ = started(host, Request(SIZED))
    assert fire(companion, host, PLAN.faults[0], rank=1 - PLAN.faults[0].rank) == "fault.no"
    assert fire(companion, host, PlannedFault(99, 1, 0, "hang", "forward")) == "fault.no"
    assert host.events == []


def at_optimizer():
    return next(f for f in PLAN.faults if f.position == "optimizer")


def test_peers_wait_until_a_moment_after_go(host):
    companion, _ = started(host, Request(SIZED))
    fault = at_optimizer()
    assert say(companion, host, 1 - fault.rank, "await", index=fault.index) == []
    assert fire(companion, host, fault, "optimizer") == "fault.go"
    assert host.timers == [RELEASE_S]
    companion.on_tick(host.clock.now() + RELEASE_S / 2)
    assert host.take() == []
    companion.on_tick(host.clock.now() + RELEASE_S)
    assert host.take() == [(1 - fault.rank, {"kind": "fault.pass", "call": 7})]
    assert say(companion, host, 1 - fault.rank, "await", index=fault.index) == [
        (1 - fault.rank, {"kind": "fault.pass", "call": 7})
    ]


def test_peers_that_come_between_go_and_release_wait_too(host):
    companion, _ = started(host, Request(SIZED))
    fault = at_optimizer()
    fire(companion, host, fault, "optimizer")
    assert say(companion, host, 1 - fault.rank, "await", index=fault.index) == []
    companion.on_tick(host.clock.now() + RELEASE_S)
    assert len(host.take()) == 1


def test_nobody_of_a_stopped_generation_is_answered(host):
    companion, _ = started(host, Request(SIZED))
    fault = at_optimizer()
    say(companion, host, 1 - fault.rank, "await", index=fault.index)
    fire(companion, host, fault, "optimizer")
    companion.on_stopped(0)
    companion.on_tick(host.clock.now() + 1)
    assert host.take() == []


def test_an_unknown_fault_holds_nobody(host):
    companion, _ = started(host, Request(SIZED))
    assert say(companion, host, 0, "await", index=99)[0][1]["kind"] == "fault.pass"


def test_another_plan_in_the_same_folder_is_refused(host):
    started(host, Request(SIZED))
    with pytest.raises(UsageError, match=r"holds another fault plan.*new --run-dir"):
        started(host, Request(Spec(4, 42, SIZED.types, steps=200)))
    with pytest.raises(UsageError, match="holds another fault plan"):
        started(host, Request(plan=Plan(PLAN.faults[:2])))
    started(host, Request(plan=PLAN))


def test_a_longer_loop_keeps_the_plan_of_its_folder(host):
    companion, _ = started(host, Request(SPEC))
    say(companion, host, 0, "total", steps=200)
    again, _ = started(host, Request(SPEC))
    assert say(again, host, 0, "total", steps=400)[0][1]["rows"] == codec.rows(PLAN.faults)


def test_a_plan_for_ranks_that_are_not_here_is_refused_at_start(host):
    host.world_size = 1
    with pytest.raises(UsageError, match="rank 1, but"):
        started(host, Request(plan=PLAN))


def test_a_plan_that_does_not_fit_is_told_to_every_rank(host):
    companion, shown = started(host, Request(SPEC))
    for rank in (0, 1):
        [(to, answer)] = say(companion, host, rank, "total", steps=12)
        assert (to, answer["kind"]) == (rank, "fault.bad")
        assert "at most 2 do" in answer["text"]
    assert shown == []


def test_a_loop_that_does_not_say_its_steps(host):
    companion, _ = started(host, Request(SPEC))
    assert "add --fault-steps" in say(companion, host, 0, "total", steps=None)[0][1]["text"]


def test_a_script_may_ask_by_itself_once_and_alike(host):
    companion, shown = started(host)
    asked = codec.spec_to_json(SPEC)
    rows = codec.rows(PLAN.faults)
    assert say(companion, host, 0, "total", steps=200, asked=asked)[0][1]["rows"] == rows
    assert say(companion, host, 1, "total", steps=200, asked=asked)[0][1]["rows"] == rows
    assert shown == [codec.table(PLAN)]
    assert fire(companion, host, PLAN.faults[0]) == "fault.go"
    other = codec.spec_to_json(Spec(4, 1))
    assert "differ between ranks" in say(companion, host, 1, "total", steps=200, asked=other)[0][1]["text"]


def test_a_script_s_plan_is_once_over_a_restart_of_the_job_too(host):
    for expected in ("fault.go", "fault.no"):
        companion, _ = started(host)
        say(companion, host, 0, "total", steps=200, asked=codec.spec_to_json(SPEC))
        assert fire(companion, host, PLAN.faults[0]) == expected


def test_a_script_may_not_ask_beside_the_launcher(host):
    companion, _ = started(host, Request(SIZED))
    answer = say(companion, host, 0, "total", steps=200, asked=codec.spec_to_json(Spec(1)))[0][1]
    assert answer["kind"] == "fault.bad"


def test_an_unwritable_copy_is_refused_at_start(host, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--save-fault-plan.*writable folder"):
        started(host, Request(SIZED, save_to=tmp_path / "file" / "copy.json"))


def test_faults_that_were_not_reached_are_told_once(host):
    companion, _ = started(host, Request(SIZED))
    for fault in PLAN.faults[:4]:
        fire(companion, host, fault)
    assert companion.drained(completed=False)
    before = len(host.events)
    assert companion.drained(completed=True)
    assert companion.drained(completed=True)
    [notice] = host.events[before:]
    assert f"step {PLAN.faults[4].step} rank {PLAN.faults[4].rank}" in notice.text


def test_an_unknown_word_is_noticed_and_descriptors_are_closed(host):
    companion, _ = started(host, Request(SIZED))
    fd = os.open("/dev/null", os.O_RDONLY)
    companion.on_message(0, {"kind": "fault.sing"}, (fd,))
    assert "'fault.sing'" in host.events[0].text
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_damaged_file_in_the_folder_is_named(host):
    Path(host.run_dir).mkdir()
    (Path(host.run_dir) / "faults.json").write_text(json.dumps({"version": 9}))
    with pytest.raises(UsageError, match=r"faults\.json: version 9"):
        started(host, Request(SIZED))


def test_a_fault_that_is_let_go_on_another_node_is_never_let_go_here_and_those_who_wait_for_it_go_on(host):
    """Its rank may be ours one day; it is recorded here too, whole, before this job or the next asks."""
    told = []
    host.node, host.tell = "node-1", lambda node, message: told.append((node, message))
    companion, _ = started(host, Request(SIZED))
    companion.on_nodes({"node-0": "a", "node-1": "b"})
    fault, other = PLAN.faults[:2]
    assert say(companion, host, 1 - fault.rank, "await", index=fault.index) == []
    companion.on_node_message("node-0", {"kind": "fault.fired", "index": fault.index, "wall_s": 7.0})
    companion.on_tick(host.clock.now() + RELEASE_S)
    assert [(to, answer["kind"]) for to, answer in host.take()] == [(1 - fault.rank, "fault.pass")]
    assert fire(companion, host, fault) == "fault.no"
    assert fire(companion, host, other) == "fault.go"
    ((node, message),) = told
    assert (node, message["index"]) == ("node-0", other.index)
    _, fired = codec.loads((Path(host.run_dir) / "faults.json").read_text(), "file")
    assert fired.keys() == {fault.index, other.index}
    assert fired[fault.index] == 7.0
