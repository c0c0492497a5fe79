"""What is kept of each cycle, with a host that only notes what is asked of it; and the helper's own hands."""

import json
import os

import pytest

from everstep.errors import ExitCode
from everstep.fault_tolerance import clerk
from everstep.fault_tolerance.core.progress import Track
from everstep.fault_tolerance.cycles import LAST_S, Cycles, NoProgress, Settings, settings_of
from everstep.recovery.core.words import Incarnation, Member, Roster


class Clock:
    def __init__(self):
        self.now_s = 5.0

    def now(self):
        return self.now_s

    def wall(self):
        return 1_000_000.0


class Host:
    """Implements as much of `NodeHost` as is used; `asked` is what its helper was told."""

    node = "node-0"

    def __init__(self):
        self.clock, self.asked, self.events, self.rechecks = Clock(), [], [], 0

    def spawn(self, name, entry, arguments):
        assert entry == clerk.ENTRY
        return self

    def send(self, message):
        self.asked.append(json.loads(json.dumps(message)))

    def emit(self, event):
        self.events.append(event)

    def later(self, delay_s):
        pass

    def recheck(self):
        self.rechecks += 1


def roster(generation, *nodes):
    members = tuple(
        Member(rank, Incarnation("b", 10 + rank, 1), node, rank, True, "started") for rank, node in enumerate(nodes)
    )
    return Roster(generation=generation, epoch=0, members=members)


@pytest.fixture
def begin(monkeypatch):
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID", "SLURM_RESTART_CNT"):
        monkeypatch.delenv(name, raising=False)

    def made(**settings):
        host, cycles = Host(), Cycles(Settings(**settings))
        cycles.start(host)
        return host, cycles

    return made


def answer(cycles, generation, iteration):
    cycles.on_child_message(None, {"kind": "read", "generation": generation, "iteration": iteration}, ())


def test_starts_without_progress_end_the_job_with_the_code_that_says_do_not_requeue(begin):
    host, cycles = begin(iteration_file="/x/latest", track=Track(most=2))
    answer(cycles, -1, 7)
    for generation in (0, 1):
        cycles.on_stopped(generation)
        assert host.asked[-1] == {"kind": "read", "path": "/x/latest", "generation": generation}
    answer(cycles, 0, 7)
    with pytest.raises(NoProgress, match="2 starts in a row") as ended:
        answer(cycles, 1, 7)
    assert ended.value.exit_code == ExitCode.DO_NOT_REQUEUE


def test_a_file_that_is_not_there_is_told_once_and_a_helper_that_dies_ends_nothing(begin):
    host, cycles = begin(iteration_file="/x/latest")
    for generation in range(-1, 5):
        answer(cycles, generation, None)
    assert len(host.events) == 1
    assert "/x/latest has no iteration yet" in host.events[0].text
    cycles.on_child_exit(None, -9)
    cycles.on_stopped(9)
    assert "cycles are not told any more" in host.events[1].text
    assert cycles.drained(completed=True)


def test_each_cycle_has_a_file_and_the_end_of_the_last_is_waited_for(begin, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_CNT", "2")
    host, cycles = begin(info_dir="/info", log_file=("/logs/run_cycle", ".log"))
    cycles.on_nodes({"node-0": "10.0.0.1", "node-1": "10.0.0.2", "node-2": "10.0.0.3"})
    cycles.on_roster(roster(0, "node-0", "node-0", "node-1"))
    (first,) = host.asked
    assert (first["folder"], first["name"], first["link"]) == ("/info", "cycle_info.77.2.0", "cycle_info.77.current")
    assert first["is"] == {
        "job_id": "77", "attempt_index": 2, "cycle_number": 0, "cycle_start_time": "1970-01-12T13:46:40+00:00",
        "cycle_end_time": "", "cycle_log_file": "/logs/run_cycle0.log", "active_nodes": "10.0.0.1,10.0.0.2",
        "standby_nodes": "10.0.0.3", "active_ranks": "0-2", "generation": 0,
    }  # fmt: skip
    assert cycles.link == "/info/cycle_info.77.current"
    cycles.on_roster(roster(1, "node-0", "node-2"))
    ended, begun = host.asked[1:]
    assert (ended["name"], ended["is"]["generation"], bool(ended["is"]["cycle_end_time"])) == (
        "cycle_info.77.2.0",
        1,
        True,
    )
    assert (begun["name"], begun["is"]["cycle_log_file"]) == ("cycle_info.77.2.1", "/logs/run_cycle1.log")
    assert not cycles.drained(completed=False)
    assert not cycles.drained(completed=False)
    assert [order["kind"] for order in host.asked[3:]] == ["last"]
    cycles.on_child_message(None, {"kind": "written", "text": "", "last": True}, ())
    assert cycles.drained(completed=False)
    assert host.rechecks == 1


def test_storage_that_hangs_is_waited_for_a_moment_only(begin):
    host, cycles = begin(info_dir="/info")
    cycles.on_roster(roster(0, "node-0"))
    assert not cycles.drained(completed=True)
    cycles.on_tick(host.clock.now_s + LAST_S - 0.1)
    assert not cycles.drained(completed=True)
    cycles.on_tick(host.clock.now_s + LAST_S)
    assert cycles.drained(completed=True)
    cycles.on_roster(roster(1, "node-0"))  # it had not ended after all
    assert not cycles.drained(completed=True)


def test_only_the_node_of_rank_0_writes(begin):
    host, cycles = begin(info_dir="/info")
    cycles.on_roster(roster(0, "node-1", "node-0"))
    assert host.asked == []
    assert cycles.drained(completed=True)


def test_why_a_file_cannot_be_written_is_told_once(begin):
    host, cycles = begin(info_dir="/info")
    for _ in range(3):
        cycles.on_child_message(None, {"kind": "written", "text": "/info: Permission denied", "last": False}, ())
    assert [event.text for event in host.events] == ["--ft-cycle-info-dir: /info: Permission denied"]


def test_what_the_flags_leave_is_read_and_nothing_is_nothing():
    assert not settings_of({}, None).wanted
    assert settings_of({"iteration_file": "x", "most": 3, "least": 2}, None).track == Track(2, 3)
    assert not settings_of({"iteration_file": "x", "most": 0}, None).wanted
    assert settings_of({"info_dir": "x"}, ("a", "b")).wanted


@pytest.mark.parametrize(("text", "expected"), [("12\n", 12), (" 0 ", 0), ("release", None), ("", None), (None, None)])
def test_an_iteration_is_read_or_is_not_known(tmp_path, text, expected):
    if text is not None:
        (tmp_path / "latest").write_text(text)
    assert clerk.read(str(tmp_path / "latest")) == expected


def test_a_file_stands_whole_and_the_link_leads_to_it(tmp_path):
    for number in range(2):
        order = {"folder": str(tmp_path / "info"), "name": f"cycle.{number}", "link": "current", "is": {"n": number}}
        assert clerk.write(order) == ""
        assert json.loads((tmp_path / "info/current").read_text()) == {"n": number}
    assert sorted(os.listdir(tmp_path / "info")) == ["current", "cycle.0", "cycle.1"]
    (tmp_path / "file").touch()
    assert "exists" in clerk.write(order | {"folder": str(tmp_path / "file")})
