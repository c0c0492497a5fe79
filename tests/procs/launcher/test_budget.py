"""How often a job begins anew: one count for the whole job, whichever node a fault comes from (LA-12)."""

import socket

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

FAILS = """
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
note("attempt", number=attempt)
if rank == attempt % 2 and attempt < int(os.environ["FAULTS"]):
    raise ValueError(f"fault {attempt}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def two_nodes(start):
    """What two agents of one job, each with a rank, left behind."""

    def run(allowed: int, faults: int):
        with socket.create_server(("127.0.0.1", 0)) as door:
            there = f"127.0.0.1:{door.getsockname()[1]}"
        flags = ("--nnodes", "2", "--rdzv-endpoint", there, "--max-restarts", str(allowed))
        env = {"FAULTS": str(faults)}
        jobs = [start(FAILS, *flags, "--node-rank", number, wrapped=False, env=env) for number in "01"]
        return [job.ended() for job in jobs]

    return run


def attempts(every):
    """Those that came to their first line on either node; a peer's fault may end one before it."""
    return {note["number"] for ended in every for note in ended.of("attempt")}


@pytest.mark.long
@pytest.mark.parametrize("allowed", [0, 2])
def test_faults_of_both_nodes_draw_on_one_budget(two_nodes, allowed):
    every = two_nodes(allowed, faults=9)
    assert attempts(every) == {*range(allowed + 1)}
    counted = [(number, allowed) for number in range(allowed + 1)]
    for ended, folder in zip(every, ("", "node-1"), strict=True):
        assert ended.code == 1
        assert f"all {allowed} restarts that --max-restarts allows are used" in ended.err
        assert [(g["number"], g["allowed"]) for g in ended.events("GenerationStarted", folder)] == counted
        for number in range(1, allowed + 1):
            assert f"(restart {number} of {allowed})" in ended.err
        for number in range(allowed):
            assert f"generation {number}: exception of rank {number % 2} (ValueError: fault {number})" in ended.err


@pytest.mark.long
def test_as_many_faults_as_are_allowed_end_nothing(two_nodes):
    every = two_nodes(2, faults=2)
    for ended in every:
        assert ended.code == 0, ended.err
    assert attempts(every) == {0, 1, 2}
