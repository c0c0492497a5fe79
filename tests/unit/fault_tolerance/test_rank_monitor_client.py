"""RankMonitorClient over a page in memory, as its agent would read it; the same calls as were made of NVRx's."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="needs PyYAML, which is not installed here")
from everstep import environ, fault_tolerance
from everstep.fault_tolerance import access
from everstep.fault_tolerance.data import RankInfo, WorkloadAction, WorkloadControlRequest
from everstep.fault_tolerance.rank_monitor_client import RankMonitorClient, RankMonitorClientError
from everstep.process.monitor import PAGE, SETTINGS
from everstep.process.page import SIZE, Page

CALLS = json.loads((Path(__file__).parent / "nvrx/timeouts.json").read_text())["calls"]
GIVEN = {"rank_section_timeouts": {"load": 60.0, "step": 5.0, "save": None}, "rank_out_of_section_timeout": 9.0,
         "initial_rank_heartbeat_timeout": 30.0, "rank_heartbeat_timeout": 3.0}  # fmt: skip


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class Watched:
    """A client, its page, and its clock."""

    def __init__(self) -> None:
        self.fd, self.clock = Page.create("monitor"), Clock()
        self.page = Page(self.fd)
        self.page.began(0, self.clock.now())
        self.client = self.another()

    def another(self) -> RankMonitorClient:
        return RankMonitorClient(page=self.page, clock=self.clock)

    def said(self):
        return self.page.monitor.read()

    def open(self):
        return {section.name: section.limit_s for section in self.said().sections}


@pytest.fixture(autouse=True)
def rank(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(SETTINGS, json.dumps(GIVEN))
    monkeypatch.delenv(PAGE, raising=False)


@pytest.fixture
def watched():
    made = Watched()
    yield made
    made.client.shutdown_workload_monitoring()
    made.page.close()
    os.close(made.fd)


@pytest.mark.parametrize("title", CALLS)
def test_the_same_calls_are_errors_as_with_nvrx(watched, title):
    client = watched.client
    client.init_workload_monitoring()
    for (name, *arguments), raises in zip(CALLS[title]["calls"], CALLS[title]["raised"], strict=False):
        watched.clock.advance(0.01)
        with pytest.raises(RankMonitorClientError, match=r".{20}") if raises else contextlib.nullcontext():
            getattr(client, name)(*arguments)


def test_what_the_agent_reads(watched):
    client, clock = watched.client, watched.clock
    assert watched.said() is None
    client.init_workload_monitoring()
    began = clock.now()
    said = watched.said()
    assert (said.started_s, said.beats, said.pid) == (began, 0, os.getpid())
    assert (said.initial_s, said.subsequent_s, said.outside_limit_s) == (30.0, 3.0, 9.0)
    assert (said.outside_s, said.sections) == (began, ())
    clock.advance(1.0)
    client.send_heartbeat()
    clock.advance(1.0)
    client.start_section("step")
    client.start_section("save")
    said = watched.said()
    assert (said.beats, said.beat_s) == (1, began + 1.0)
    assert watched.open() == {"step": 5.0, "save": 0.0}
    assert said.outside_s == 0
    client.end_section("step")
    assert watched.said().outside_s == 0
    clock.advance(1.0)
    client.end_all_sections()
    assert watched.said().outside_s == clock.now()
    assert watched.open() == {}
    client.shutdown_workload_monitoring()
    assert watched.said() is None
    assert not client.is_initialized


def test_an_error_leaves_all_as_it_was(watched):
    watched.client.init_workload_monitoring()
    watched.client.start_section("step")
    before = watched.said()
    with pytest.raises(RankMonitorClientError, match=r"'save' is not open"):
        watched.client.end_section("save")
    with pytest.raises(RankMonitorClientError, match=r"not configured \(load, step, save\).*rank_section_timeouts"):
        watched.client.start_section("other")
    with pytest.raises(RankMonitorClientError, match="open already"):
        watched.client.start_section("step")
    assert watched.said() == before


def test_calculated_timeouts_hold_at_once_and_go_into_the_state(watched):
    client, clock = watched.client, watched.clock
    assert client.state_dict() == {"current_timeouts": {}}
    client.init_workload_monitoring()
    assert client.state_dict() == {"current_timeouts": {}}
    for seconds in (2.0, 0.5, 1.0):
        clock.advance(seconds)
        client.send_heartbeat()
        client.start_section("step")
        clock.advance(0.2)
        client.end_section("step")
    assert client.calculate_and_set_hb_timeouts()
    assert client.calculate_and_set_section_timeouts(["step"])
    assert client.hb_timeouts.are_valid
    assert client.hb_timeouts.were_calculated
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == pytest.approx((10.0, 6.0))
    assert client.section_timeouts.section == pytest.approx({"load": 60.0, "step": 1.0, "save": None})
    said = watched.said()
    assert (said.initial_s, said.subsequent_s, said.outside_limit_s) == pytest.approx((10.0, 6.0, 10.0))
    client.start_section("step")
    assert watched.open() == pytest.approx({"step": 1.0})

    state = json.loads(json.dumps(client.state_dict()))
    assert state["current_timeouts"]["section"]["calculated_sections"] == ["step"]
    client.shutdown_workload_monitoring()
    later = watched.another()
    later.load_state_dict(state)
    assert later.state_dict() == state
    later.init_workload_monitoring()
    assert later.state_dict()["current_timeouts"]["heartbeat"] == state["current_timeouts"]["heartbeat"]
    assert watched.said().subsequent_s == pytest.approx(6.0)
    later.shutdown_workload_monitoring()


def test_of_a_state_only_what_was_calculated_is_taken(watched, monkeypatch):
    """Settings that have changed since hold, and a section that is gone is left out."""
    state = {"section": {"section": {"load": 1.0, "step": 2.0, "gone": 3.0}, "out_of_section": 4.0,
                         "calculated_sections": ["step", "gone"], "is_out_of_section_calculated": False}}  # fmt: skip
    watched.client.init_workload_monitoring()
    watched.client.load_state_dict({"current_timeouts": state})
    assert watched.client.section_timeouts.section == {"load": 60.0, "step": 2.0, "save": None}
    assert watched.client.section_timeouts.out_of_section == 9.0
    assert watched.said().outside_limit_s == 9.0


@pytest.mark.parametrize(
    "state",
    [
        {"heartbeat": {"initial": "soon", "subsequent": 1.0, "were_calculated": True}},
        {"heartbeat": {"initial": float("nan"), "subsequent": 1.0, "were_calculated": True}},
        {"heartbeat": {"initial": None, "subsequent": None, "were_calculated": True}},
        {"heartbeat": {"something": 1}},
        {"section": {"section": {}, "calculated_sections": ["step"]}},
        {"section": {"section": {"step": -1.0}, "calculated_sections": ["step"]}},
        {"section": {"is_out_of_section_calculated": True}},
        {"section": 5},
        5,
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(watched, state):
    watched.client.init_workload_monitoring()
    before = watched.said()
    with pytest.raises(ValueError, match=r"no state of a RankMonitorClient"):
        watched.client.load_state_dict({"current_timeouts": state})
    assert watched.said() == before


def test_a_new_generation_begins_anew_and_closes_what_a_fault_left_open(watched):
    client, clock = watched.client, watched.clock
    client.init_workload_monitoring()
    client.send_heartbeat()
    client.start_section("step")
    clock.advance(50.0)
    watched.page.enter(1, clock.now())
    assert watched.said().generation == 0  # says nothing about the present one
    client.start_section("step")
    said = watched.said()
    assert (said.generation, said.beats, said.started_s) == (1, 0, clock.now())
    assert watched.open() == {"step": 5.0}


def test_one_client_at_a_time(watched):
    client = watched.client
    client.init_workload_monitoring()
    second = watched.another()
    with pytest.raises(RankMonitorClientError, match="shut that one down first"):
        second.init_workload_monitoring()
    watched.page.enter(1, watched.clock.now())  # a function that makes its client anew in each iteration
    second.init_workload_monitoring()
    client.shutdown_workload_monitoring()
    assert watched.said() is not None, "the first's end is not the second's"
    second.shutdown_workload_monitoring()
    assert watched.said() is None


def test_a_client_that_is_forgotten_monitors_no_more(watched):
    forgotten = watched.another()
    forgotten.init_workload_monitoring()
    assert watched.said() is not None
    del forgotten
    assert watched.said() is None


def test_the_limit_of_warm_up_holds_for_the_first_steps(watched, monkeypatch):
    """NVRx HEAD's two sections with a meaning; nothing of Megatron's is read for it (W38)."""
    monkeypatch.setenv(SETTINGS, json.dumps({"rank_section_timeouts": {"step": 5.0, "warmup": 70.0}}))
    watched.client.init_workload_monitoring(num_warmup_iters=2)
    found = []
    for _ in range(4):
        watched.client.start_section("step")
        found.append(watched.open()["step"])
        watched.client.end_section("step")
    assert found == [70.0, 70.0, 5.0, 5.0]


def test_requests_lie_where_the_agent_looks(watched):
    monitor = watched.page.monitor
    assert monitor.requested is None
    watched.client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "bad GPU 3"))
    assert (monitor.requested.number, monitor.requested.action, monitor.requested.text) == (1, 1, "bad GPU 3")
    watched.client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "é" * 500))
    assert (monitor.requested.number, monitor.requested.action) == (2, 2)
    assert monitor.requested.text == "é" * 192
    with pytest.raises(ValueError, match="WorkloadAction"):
        watched.client.send_workload_control_request("stop")


def test_without_an_agent_there_is_an_error_with_words(monkeypatch):
    client = RankMonitorClient()
    with pytest.raises(RankMonitorClientError, match=r"no agent watches this process.*everstep run"):
        client.init_workload_monitoring()
    with pytest.raises(RuntimeError, match="no agent"):
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload))
    with pytest.raises(RankMonitorClientError, match=r"init_workload_monitoring\(\) first"):
        client.send_heartbeat()
    monkeypatch.setenv(PAGE, "/proc/1/fd/none")
    with pytest.raises(RankMonitorClientError, match="is gone, or is not in this container"):
        client.init_workload_monitoring()
    monkeypatch.delenv(PAGE)
    monkeypatch.delenv("RANK")  # a bare script
    with pytest.raises(RankMonitorClientError, match="no agent watches this process"):
        client.init_workload_monitoring()


def test_a_watched_process_without_a_rank_is_an_error_with_words(watched, monkeypatch):
    monkeypatch.delenv("RANK")
    with pytest.raises(RuntimeError, match="no rank: RANK is not set"):
        watched.another().init_workload_monitoring()


def test_settings_that_cannot_be_meant_are_named(watched, monkeypatch):
    for text, words in (
        ("{", "is no JSON"),
        ("[1]", "a JSON object"),
        ('{"rank_heartbeat_timeout": 0}', "more than 0"),
    ):
        monkeypatch.setenv(SETTINGS, text)
        with pytest.raises(ValueError, match=words):
            watched.client.init_workload_monitoring()
        assert watched.said() is None


def test_timeouts_of_several_ranks_need_a_group(watched, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    watched.client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="no process group"):
        watched.client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)


def test_a_process_that_is_no_fork_finds_its_page_by_name(watched):
    text = (
        "from everstep.fault_tolerance import RankMonitorClient as C\n"
        "c = C()\nc.init_workload_monitoring()\nc.start_section('load')\n"
        "import os, sys\nsys.stdout.write(str(os.getpid()))\nsys.stdout.flush()\nos._exit(0)"
    )
    path = f"/proc/{os.getpid()}/fd/{watched.fd}"
    told = subprocess.run(
        [sys.executable, "-c", text], env=environ.snapshot() | {PAGE: path}, capture_output=True, check=True
    )
    assert watched.open() == {"load": 60.0}
    assert watched.said().pid == int(told.stdout)
    assert watched.said().signal > 0
    watched.client.init_workload_monitoring()  # that process has ended
    assert watched.open() == {}
    assert os.fstat(watched.fd).st_size == SIZE


def test_the_package_offers_nvrx_s_names_and_loads_no_torch():
    assert set(fault_tolerance.__all__) <= set(dir(fault_tolerance))
    assert fault_tolerance.RankMonitorClient is RankMonitorClient
    with pytest.raises(AttributeError, match="it offers FaultToleranceConfig"):
        fault_tolerance.RankMonitorServer  # noqa: B018
    text = "import sys, everstep.fault_tolerance.rank_monitor_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0


def test_who_a_rank_is():
    info = RankInfo.get_for_current_rank()
    assert (info.global_rank, info.local_rank, info.pid) == (3, 1, os.getpid())


def test_the_most_of_all_ranks_over_a_real_group():
    torch = pytest.importorskip("torch", reason="needs torch, which is not installed here")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert access.longest([1.5, -1.0]) == [1.5, -1.0]
    finally:
        torch.distributed.destroy_process_group()
