"""Rank monitors of a job of several nodes: judged over all of them, and a node that is to be left out (long)."""

import json
import socket

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(300)]

TEXT = """
import os, sys, time, json
import torch, torch.distributed as dist
from everstep.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
def note(what, **facts):
    who = {"pid": os.getpid(), "rank": int(os.environ["RANK"]), "at": time.monotonic()}
    with open(os.environ["NOTES"], "a") as f:
        f.write(json.dumps({"what": what, **who, **facts}) + "\\n")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
client = RankMonitorClient()
client.init_workload_monitoring()
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
for step in range(10):
    client.start_section("step")
    if attempt == 0 and step == 5 and rank == 1:
        if os.environ["MODE"] == "exclude":
            request = WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "GPU 3 is lost")
            client.send_workload_control_request(request)
            note("asked")
            sys.exit(1)
        note("hang")
        time.sleep(1000)
    dist.barrier()
    client.end_section("step")
    client.send_heartbeat()
note("done", attempt=attempt)
dist.destroy_process_group()
"""


@pytest.fixture
def nodes(start):
    def begin(count, mode, *flags):
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
        settings = {"rank_section_timeouts": {"step": 4}, "rank_heartbeat_timeout": 60}
        env = {"MODE": mode, "EVERSTEP_FAULT_TOLERANCE": json.dumps(settings)}
        base = ("--rdzv-endpoint", f"127.0.0.1:{port}", *flags)
        jobs = [start(TEXT, *base, "--node-rank", str(n), env=env, wrapped=None) for n in range(count)]
        return [job.ended() for job in jobs]

    return begin


def test_a_section_that_lasts_too_long_is_one_fault_of_all_nodes(nodes):
    ended = nodes(2, "hang", "--nnodes", "2")
    (hang,) = [note for one in ended for note in one.of("hang")]
    for one, place in zip(ended, ("", "node-1"), strict=True):
        assert one.code == 0, one.err[-3000:]
        (fault,) = one.events("FaultNoticed", place)
        assert (fault["kind"], fault["injured_rank"]) == ("stall", 1)
        assert "section 'step' is open for" in fault["text"]
        assert ", in <module>" in fault["stack"]
        assert fault["mono_s"] - hang["at"] < 12, "4 s, a look of the agent's, one of the hub's, and the load"
        assert [note["attempt"] for note in one.of("done")] == [1]


def test_a_node_that_a_rank_wants_left_out_goes_and_a_spare_node_takes_its_ranks(nodes):
    flags = ("--nnodes", "1:2", "--spare-nodes", "1", "--rdzv-conf", "last_call_timeout=240")
    first, excluded, spare = nodes(3, "exclude", *flags)
    assert excluded.code == 75, excluded.err[-3000:]
    assert "rank 1 has asked that this node be left out: GPU 3 is lost; the others go on without node-1" in excluded.err
    for one, rank in ((first, 0), (spare, 1)):
        assert one.code == 0, one.err[-3000:]
        assert [note["rank"] for note in one.of("done")] == [rank]
    assert len(excluded.of("asked")) == 1
    assert excluded.of("done") == []
