"""What `everstep ps` shows."""

import pytest

from everstep.operator.core.rows import COLUMNS, ago, head, rows, seconds, silent, size


def process(role, name, rank=None, **more):
    base = {"role": role, "name": name, "pid": 7, "state": "S", "cpu_s": 1.0, "resident_bytes": 5_000_000, "rank": rank}
    return base | more


def node(name, *processes, step=3, **more):
    facts = {"node": name, "script": "train.py", "phase": "running", "generation": 2, "world_size": 4, "step": step}
    return facts | {"processes": list(processes)} | more


def test_ranks_come_in_their_order_and_after_what_serves_them():
    told = {
        "nodes": [
            node(
                "node-0", process("writer", "writer-0"),
                process("rank", "worker-10", 10, step=4, mark_age_s=0.2, phase="step"),
                process("spare", "spare-4"), process("rank", "worker-9", 9), process("agent", "agent"),
            ),
            node("node-1", process("rank", "worker-1", 1)),
        ],
        "silent": [],
    }  # fmt: skip
    found = rows(told)
    names = [row[:2] for row in found]
    assert names == [
        ("node-0", "agent"), ("node-0", "rank 9"), ("node-0", "rank 10"), ("node-0", "spare-4"), ("node-0", "writer-0"),
        ("node-1", "rank 1"),
    ]  # fmt: skip
    assert found[2] == ("node-0", "rank 10", "7", "sleeps", "1.0 s", "5.0 MB", "4", "0.2 s ago", "step")
    assert all(len(row) == len(COLUMNS) for row in found)


def test_the_line_above_says_how_the_job_stands_and_no_step_that_a_node_has_not_done():
    told = {"nodes": [node("node-0", step=5), node("node-1", step=4)], "silent": ["node-2"]}
    assert head(told) == "train.py, running, generation 2, 4 ranks on 3 nodes, step 4 done on all"
    assert "node-2 did not answer" in silent(told)
    told = {"nodes": [node("node-0", step=None, generation=None, phase="gathering")], "silent": []}
    assert head(told) == "train.py, gathering, 4 ranks"
    assert silent(told) == ""
    assert head({"nodes": [], "silent": []}) == "no node has answered"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.04, "0.0 s"), (99.9, "99.9 s"), (100.0, "1 min 40 s"), (7260.0, "2 h 1 min")],
)
def test_times(value, text):
    assert seconds(value) == text
    assert ago(value) == (f"{text} ago" if text else "")


def test_a_mark_of_the_moment_is_never_in_the_future():
    assert ago(-0.1) == "0.0 s ago"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0, ""), (4096, "4 kB"), (5_250_000, "5.2 MB"), (2 * 10**9, "2.0 GB"), (3 * 10**12, "3.0 TB")],
)
def test_sizes(value, text):
    assert size(value) == text
