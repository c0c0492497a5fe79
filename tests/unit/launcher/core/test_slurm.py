"""What Slurm's variables fill in. They are those that srun 22.05 set for a step of two nodes, one task on each."""

import pytest

from everstep.errors import UsageError
from everstep.launcher.core.slurm import fill, first_host

STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_PROCID": "1", "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "2",
}  # fmt: skip
NOTHING = {
    "nnodes": "1:1", "node_rank": None, "rdzv_endpoint": "", "master_addr": "127.0.0.1", "rdzv_id": "none",
    "standalone": False, "spare_nodes": 0, "master_port": None,
}  # fmt: skip
PLACE = "n0:22387"


@pytest.mark.parametrize(
    ("given", "step", "filled"),
    [
        ({}, {}, {"nnodes": "2", "node_rank": 1, "rdzv_endpoint": PLACE, "rdzv_id": "slurm-77.0"}),
        ({"spare_nodes": 1}, {}, {"nnodes": "1", "node_rank": 1, "rdzv_endpoint": PLACE, "rdzv_id": "slurm-77.0"}),
        ({"nnodes": "1:2"}, {}, {"node_rank": 1, "rdzv_endpoint": PLACE, "rdzv_id": "slurm-77.0"}),
        ({"rdzv_endpoint": "x:1"}, {}, {"nnodes": "2", "node_rank": 1, "rdzv_id": "slurm-77.0"}),
        ({"master_addr": "x"}, {}, {"nnodes": "2", "node_rank": 1, "rdzv_id": "slurm-77.0"}),
        ({"master_port": 4000, "rdzv_id": "me"}, {}, {"nnodes": "2", "node_rank": 1, "rdzv_endpoint": "n0:4000"}),
        ({"nnodes": "2", "rdzv_endpoint": "x:1", "node_rank": 0}, {}, {}),
        ({"nnodes": "1"}, {}, {}),  # a job of its own on each node
        ({"standalone": True}, {}, {}),
        ({}, {"SLURM_STEP_NUM_TASKS": "1"}, {}),
        ({"standalone": True}, {"SLURM_STEP_TASKS_PER_NODE": "2"}, {}),
    ],
)
def test_what_flags_leave_out_comes_from_the_step(given, step, filled):
    before = NOTHING | given
    after = dict(before)
    fill(after, STEP | step)
    after.pop("scheduler", None)
    assert {name: value for name, value in after.items() if value != before[name]} == filled


def test_it_is_said():
    given = dict(NOTHING)
    fill(given, STEP)
    assert given["scheduler"] == f"from Slurm: --nnodes 2, --node-rank 1, --rdzv-endpoint {PLACE}, --rdzv-id slurm-77.0"


def test_jobs_at_one_node_meet_at_ports_of_their_own():
    def place(job, step):
        given = dict(NOTHING)
        fill(given, STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        return given["rdzv_endpoint"]

    assert len({place(job, step) for job in range(500) for step in range(8)}) == 4000


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, "--ntasks-per-node=1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, "Slurm has started 8 tasks on a node"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "names no node"),
    ],
)
def test_what_cannot_be_meant_is_refused(step, words):
    with pytest.raises(UsageError, match=words):
        fill(dict(NOTHING), STEP | step)


def test_a_batch_script_that_forgot_srun_is_told_so():
    given = dict(NOTHING)
    fill(given, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"})
    assert "this Slurm job has 4 nodes, and only this one is used" in given["scheduler"]
    for alone in ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, {}):
        given = dict(NOTHING)
        fill(given, alone)
        assert given == NOTHING


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n[0-1]", "n0"), ("a[08-11,14],b", "a08"), ("login", "login"), ("x1,x2", "x1"),
        ("r[2,4]n[007-009]-ib", "r2n007-ib"),
        ("gpu-a-1.site.org", "gpu-a-1.site.org"), ("", ""),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first
