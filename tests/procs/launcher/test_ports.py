"""Jobs beside each other on one machine: each meets at a port of its own, and no job has another's ranks (LA-19)."""

import socket

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

MEETS = """
dist.init_process_group("gloo")
jobs = [None] * dist.get_world_size()
dist.all_gather_object(jobs, os.environ["NUMBER"])
note("met", jobs=sorted(set(jobs)), size=dist.get_world_size(), port=os.environ["MASTER_PORT"])
time.sleep(float(os.environ.get("STAYS", "0")))
dist.barrier()
dist.destroy_process_group()
"""
TWO = ("--nproc-per-node", "2", "--spares", "0")
C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


@pytest.mark.long
def test_jobs_that_begin_at_once_never_share_a_port_or_a_rank(start):
    """With nothing said, --standalone, port 0, and one end point and --rdzv-id given to two by mistake."""
    shared = f"localhost:{free_port()}"
    ways = [(), (), ("--standalone",), (*C10D, "localhost:0"), *[(*C10D, shared, "--rdzv-id", "same")] * 2]
    jobs = [
        start(MEETS, *TWO, *flags, wrapped=False, env={"NUMBER": str(number), "STAYS": "4"})
        for number, flags in enumerate(ways)
    ]
    every = [job.ended() for job in jobs]
    for number, ended in enumerate(every):
        assert ended.code == 0, ended.err
        assert [(n["jobs"], n["size"]) for n in ended.of("met")] == 2 * [([str(number)], 2)]
    assert len({ended.of("met")[0]["port"] for ended in every}) == len(ways)


@pytest.mark.long
def test_a_port_that_two_jobs_were_given_is_the_first_one_s(start):
    port = str(free_port())
    first = start(MEETS, *TWO, "--master-port", port, wrapped=False, env={"NUMBER": "0", "STAYS": "12"})
    first.wait_for("met", 2)
    second = start(MEETS, *TWO, "--master-port", port, wrapped=False, env={"NUMBER": "1"}).ended()
    assert second.code == 78
    assert f"port {port} on 127.0.0.1 cannot be used" in second.err
    assert second.notes == []
    ended = first.ended()
    assert ended.code == 0, ended.err
    assert {(n["port"], *n["jobs"]) for n in ended.of("met")} == {(port, "0")}
