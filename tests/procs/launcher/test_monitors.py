"""Rank monitors in whole jobs: what a script says of itself is judged by its agent, once for each fault."""

import json
import sys

import pytest

pytestmark = pytest.mark.procs

MONITOR = """
import os, sys, time, json, signal, ctypes
import torch, torch.distributed as dist
from everstep.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def note(what, **facts):
    who = {"pid": os.getpid(), "rank": int(os.environ["RANK"]), "at": time.monotonic()}
    with open(os.environ["NOTES"], "a") as f:
        f.write(json.dumps({"what": what, **who, **facts}) + "\\n")
client = RankMonitorClient()
"""


def given(**settings) -> dict:
    return {"env": {"EVERSTEP_FAULT_TOLERANCE": json.dumps(settings)}}


STOPPED = """client.send_heartbeat()
    if attempt == 1 and step == 4 and rank == 0:
        client.start_section("step")
        os.kill(os.getpid(), signal.SIGSTOP)
        client.end_section("step")"""
UNWRAPPED = (
    MONITOR
    + """
client.init_workload_monitoring()
dist.init_process_group("gloo")
dist.barrier()
client.start_section("epoch")
for step in range(6):
    client.start_section("step")
    if attempt == 0 and step == 3 and rank == 1:
        client.start_section("save")
        note("hang")
        time.sleep(1000)
    dist.barrier()
    client.end_section("step")
    client.send_heartbeat()
client.end_all_sections()
client.calculate_and_set_hb_timeouts()
client.calculate_and_set_section_timeouts(["step"])
note("done", attempt=attempt, state=client.state_dict())
"""
)


SECTIONS = given(rank_section_timeouts={"epoch": 60, "step": 2, "save": 60}, rank_heartbeat_timeout=60)


def test_a_section_that_lasts_too_long_costs_one_restart_and_its_stack_is_told(start):
    """W27: the section that has expired is not the one that was opened last. W40: where it stood is told. W26."""
    ended = start(UNWRAPPED, "--nproc-per-node", "2", wrapped=None, **SECTIONS).ended()
    assert ended.code == 0, ended.err
    (fault,), (hang,) = ended.events("FaultNoticed"), ended.of("hang")
    assert (fault["kind"], fault["injured_rank"], hang["rank"]) == ("stall", 1, 1)
    assert "section 'step' is open for 2." in fault["text"]
    assert "limit 2.0 s" in fault["text"]
    assert ", in <module>" in fault["stack"]
    assert fault["mono_s"] - hang["at"] < 5.0, "the limit, two looks, and what a loaded machine takes"
    assert [note["attempt"] for note in ended.of("done")] == [1, 1]
    states = [note["state"]["current_timeouts"] for note in ended.of("done")]
    assert states[0] == states[1], "calculated over both ranks"
    assert states[0]["section"]["calculated_sections"] == ["step"]
    assert "longer timeout of its rank monitor" in ended.err


@pytest.mark.long
def test_a_rank_that_is_stopped_or_holds_its_lock_is_found_by_its_monitor(start):
    text = UNWRAPPED.replace("time.sleep(1000)", "while True: ctypes.PyDLL(None).sleep(1000)")
    text = text.replace("client.send_heartbeat()", STOPPED)
    ended = start(text, "--nproc-per-node", "2", wrapped=None, **SECTIONS).ended()
    assert ended.code == 0, ended.err
    holds, stopped = ended.events("FaultNoticed")
    assert (holds["injured_rank"], stopped["injured_rank"]) == (1, 0)
    assert ", in <module>" in holds["stack"]
    assert "stopped (state T); section 'step' is open" in stopped["text"]
    assert [note["attempt"] for note in ended.of("done")] == [2, 2]


WRAPPED = (
    MONITOR
    + """
import everstep
def once(name):
    if (name == "sleeps" or "more" in sys.argv) and not os.path.exists(name):
        open(name, "w").close()
        return True
    return False
@everstep.resilient
def train(run):
    if not client.is_initialized:
        client.init_workload_monitoring()
    dist.barrier()
    for step in run.steps(12):
        client.send_heartbeat()
        client.start_section("step")
        if step == 4 and run.rank == 1 and once("sleeps"):
            time.sleep(1000)
        if step == 8 and run.rank == 0 and once("holds"):
            while True:
                ctypes.PyDLL(None).sleep(1000)
        if step == 10 and run.rank == 0 and once("saves"):
            client.end_section("step")
            client.start_section("save")
            time.sleep(6.5)
        client.end_all_sections()
        dist.barrier()
        note("step", step=step)
train()
"""
)


LIMITS = given(rank_section_timeouts={"step": 2, "save": 60}, rank_heartbeat_timeout=20)


def test_a_wrapped_function_and_a_monitor_speak_of_one_fault(start):
    """The same ladder: the function is left in process, and its section that was left open is closed."""
    ended = start(WRAPPED, "--nproc-per-node", "2", wrapped=None, **LIMITS).ended()
    assert ended.code == 0, ended.err
    (sleeps,) = ended.events("FaultNoticed")
    assert (sleeps["kind"], sleeps["injured_rank"]) == ("stall", 1)
    assert "section 'step' is open for" in sleeps["text"]
    assert "time.sleep(1000)" in sleeps["stack"]
    assert len({note["pid"] for note in ended.of("step")}) == 2, "every process is kept"
    assert len(ended.events("GenerationStarted")) == 2


@pytest.mark.long
def test_who_cannot_leave_is_replaced_and_a_long_section_is_believed(start):
    """A save of 6.5 s in a section that may last 60 s: in a step of milliseconds 5 s would be a hang."""
    ended = start(WRAPPED, "--nproc-per-node", "2", args=("more",), wrapped=None, **LIMITS).ended()
    assert ended.code == 0, ended.err
    _, holds = ended.events("FaultNoticed")
    assert holds["injured_rank"] == 0
    assert "does not answer" in holds["text"]
    assert "section 'step' is open" in holds["text"]
    pids = {(note["rank"], note["pid"]) for note in ended.of("step")}
    assert len({pid for rank, pid in pids if rank == 1}) == 1
    assert len({pid for rank, pid in pids if rank == 0}) == 2, "one took its place"
    assert len(ended.events("GenerationStarted")) == 3


SHUTDOWN = (
    MONITOR
    + """
client.init_workload_monitoring()
if rank == 1:
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ACTION, "loss is NaN"))
    note("asked")
    time.sleep(0.5)
    open("finished", "w").close()
    sys.exit(3)
time.sleep(1000)
"""
)


def test_a_request_ends_the_job_at_once_and_who_asked_ends_first(start):
    """W31: NVRx reads it at its next rendezvous."""
    job = start(SHUTDOWN.replace("ACTION", "ShutdownWorkload"), "--nproc-per-node", "2", wrapped=None)
    ended = job.ended()
    assert ended.code == 93, ended.err
    assert (job.folder / "finished").exists()
    assert "rank 1 has asked for the end of the job, without a restart: loss is NaN" in ended.err
    assert ended.events("FaultNoticed") == []
    assert len(ended.of("asked")) == 1


@pytest.mark.long
def test_a_node_that_is_to_be_left_out_is_the_scheduler_s_to_replace(start):
    ended = start(SHUTDOWN.replace("ACTION", "ExcludeThisNode"), "--nproc-per-node", "2", wrapped=None).ended()
    assert ended.code == 75, ended.err
    assert "this node be left out: loss is NaN; the job has no other node" in ended.err


PROGRAM = f"""#!/bin/bash
{sys.executable} -u - <<'END'
{MONITOR}
client.init_workload_monitoring()
client.send_heartbeat()
def hangs(): time.sleep(1000)
if attempt == 0: hangs()
note('done', attempt=attempt)
END
"""


@pytest.mark.long
def test_a_script_that_another_program_begins_is_watched_too(start, tmp_path):
    """`--no-python`: the monitor is that of a child, and its stack is asked for, not the program's."""
    script = tmp_path / "job0/script.py"
    script.parent.mkdir()
    script.touch(mode=0o755)
    ended = start(PROGRAM, "--no-python", wrapped=None, **given(rank_heartbeat_timeout=1)).ended()
    assert ended.code == 0, ended.err
    (fault,) = ended.events("FaultNoticed")
    assert "no heartbeat for" in fault["text"]
    assert "in hangs" in fault["stack"]
    assert [note["attempt"] for note in ended.of("done")] == [1]
