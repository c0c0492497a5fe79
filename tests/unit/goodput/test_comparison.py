"""The companion that says it live."""

from everstep.goodput.comparison import ComparisonCompanion
from everstep.testing.loopback import LoopbackHost


def test_a_rank_that_comes_back_with_other_threads_is_told_of_once():
    host = LoopbackHost(ComparisonCompanion(), world_size=2)
    for threads in ("8", "8", "2", "2"):
        host.enter()
        for rank in range(2):
            host.from_worker(rank)({"kind": "numerics.here", "facts": {"threads": threads}})
    assert host.notices() == [
        "losses are not comparable bit for bit with those of a run without faults: "
        f"rank {rank}: threads 2, and 8 when the run began"
        for rank in range(2)
    ]
