"""NVRx's `Wrapper` without an agent, as its users have written for it, after a change of import."""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.procs


def launched(rank, front, env):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(front)}
    os.environ |= env


def wrapped(rank, port, front, env, kind, culprit, times):
    """One fault in iteration 0; returns what every iteration saw."""
    import datetime

    import torch
    import torch.distributed as dist

    from everstep import inprocess

    launched(rank, front, env)
    seen = []
    limits = {name: datetime.timedelta(seconds=seconds) for name, seconds in times.items()}

    @inprocess.Wrapper(**limits)
    def train(call: inprocess.CallWrapper = None):
        dist.init_process_group("gloo")
        dist.all_reduce(ones := torch.ones(1))
        seen.append([call.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(ones)])
        dist.barrier()
        if call.iteration == 0 and dist.get_rank() == culprit:
            if kind == "exception":
                raise ValueError("planned")
            if kind == "sleep":
                time.sleep(1000)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return dist.get_rank()

    return {"returned": train(), "seen": seen}


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception(bare, culprit):
    for rank, told in enumerate(bare.run(wrapped, 2, kind="exception", culprit=culprit, times={})):
        assert told["returned"] == rank
        assert told["seen"] == [[0, rank, 2, 2], [1, rank, 2, 2]]


def test_a_rank_that_sleeps_past_the_soft_timeout(bare):
    times = {"soft_timeout": 2.0, "hard_timeout": 60.0}
    for rank, told in enumerate(bare.run(wrapped, 2, kind="sleep", culprit=1, times=times)):
        assert told["seen"] == [[0, rank, 2, 2], [1, rank, 2, 2]]


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_death_shrinks_the_world_and_the_others_move_down(bare, culprit):
    """Rank 0 too, whose death NVRx's others wait out for ever: its process held their store."""
    found = bare.outcomes(wrapped, 3, kind="kill", culprit=culprit, times={})
    assert found[culprit] == {"died": -9}
    for new, old in enumerate(sorted({0, 1, 2} - {culprit})):
        told = found[old]["value"]
        assert told["returned"] == new
        assert told["seen"] == [[0, old, 3, 3], [1, new, 2, 2]]


def as_nvrx_users_wrote(rank, port, front, env):
    """A wrapper's store beside the script's own, both at ports counted from MASTER_PORT; prefixes by iteration."""
    import datetime

    import torch
    import torch.distributed as dist

    from everstep import inprocess

    launched(rank, front, env)
    beside = int(os.environ["MASTER_PORT"]) + 1
    seen = []

    @inprocess.Wrapper(
        store_kwargs={"timeout": datetime.timedelta(seconds=180), "port": beside},
        health_check=inprocess.health_check.CudaHealthCheck(),
        initialize=inprocess.initialize.RetryController(max_iterations=4),
    )
    def train(call_wrapper: inprocess.CallWrapper):
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], beside + 1, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]) == 0,
            multi_tenant=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=20),
        )  # fmt: skip
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(call_wrapper.iteration), store), rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )  # fmt: skip
        dist.all_reduce(ones := torch.ones(1))
        seen.append([call_wrapper.iteration, int(ones)])
        dist.barrier()
        if call_wrapper.iteration < 2 and rank == call_wrapper.iteration:
            raise ValueError("planned")
        dist.barrier()
        return "done"

    return {"returned": train(), "seen": seen}


def test_a_script_of_nvrxs_users(bare):
    for told in bare.run(as_nvrx_users_wrote, 2):
        assert told == {"returned": "done", "seen": [[0, 2], [1, 2], [2, 2]]}
