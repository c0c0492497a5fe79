"""What the machine's facts come to: each with its level, and with a mend unless it is ok."""

import dataclasses

import pytest

from everstep.checkpoint.core.budget import Memory
from everstep.doctor.core.machine import Limits, Machine, judge, memory

GB = 10**9
GOOD = Machine(python=(3, 11), kernel="6.1.0-13-amd64", shm=(8 << 30, 8 << 30), groups="v2")


def found(what, ranks=8, **changes):
    (one,) = [each for each in judge(dataclasses.replace(GOOD, **changes), ranks) if each.what == what]
    assert one.level.value == "ok" or (one.expected and one.mend)
    return one


def test_nothing_is_wrong_with_a_good_machine():
    assert {each.level.value for each in judge(GOOD, 8)} == {"ok"}


@pytest.mark.parametrize(
    ("what", "changes", "level", "word"),
    [
        ("python", {"python": (3, 10)}, "problem", "3.10"),
        ("python", {"python": (3, 12)}, "ok", "3.12"),
        ("python", {"python": (3, 14)}, "warning", "3.14"),
        ("kernel", {"kernel": "4.18.0-553.el8"}, "problem", "4.18"),
        ("kernel", {"kernel": "5.3.0"}, "ok", "5.3"),
        ("kernel", {"kernel": "5.10.0"}, "ok", "5.10"),
        ("kernel", {"kernel": "strange"}, "problem", "strange"),
        ("pidfd", {"pidfd": "Operation not permitted"}, "problem", "not permitted"),
        ("memfd", {"memfd": "Function not implemented"}, "problem", "not implemented"),
        ("open files", {"limits": Limits(files=256)}, "problem", "256"),
        ("open files", {"limits": Limits(files=1024)}, "ok", "1024"),
        ("processes", {"limits": Limits(tasks=100)}, "warning", "100"),
        ("processes", {"limits": Limits(tasks=30_000)}, "ok", "30000"),
        ("locked memory", {"limits": Limits(locked=1 << 16)}, "ok", "64.0 KiB"),
        ("locked memory", {"limits": Limits(locked=1 << 16), "infiniband": True}, "warning", "InfiniBand"),
        ("locked memory", {"infiniband": True}, "ok", "no limit"),
        ("/dev/shm", {"shm": (64 << 20, 64 << 20)}, "warning", "64.0 MiB"),
        ("/dev/shm", {"shm": None}, "warning", "not there"),
        ("control groups", {"oom_group": True}, "warning", "memory.oom.group is 1"),
        ("control groups", {"groups": ""}, "ok", "none"),
        ("ptrace", {"ptrace": 1}, "ok", "scope 1"),
        ("ptrace", {"ptrace": 3}, "warning", "scope 3"),
    ],
)
def test_each_fact_has_its_level(what, changes, level, word):
    one = found(what, **changes)
    assert (one.level.value, word in one.seen) == (level, True), one


def test_more_ranks_need_more_files():
    limits = Limits(files=1024)
    assert found("open files", ranks=8, limits=limits).level.value == "ok"
    assert found("open files", ranks=64, limits=limits).level.value == "problem"


def test_snapshots_are_judged_by_the_job_s_own_budget():
    """Four buffers of each rank's part, however many ranks share the state; a container's limit counts."""
    assert memory(Memory(200 * GB), 8, 40 * GB).level.value == "ok"
    short = memory(Memory(150 * GB), 8, 40 * GB)
    assert short.level.value == "problem"
    assert "8 ranks" in short.expected
    assert "149.0 GiB" in short.expected
    assert "this machine has available" in short.mend
    held = memory(Memory(200 * GB, 100 * GB, "/kubepods/a"), 8, 40 * GB)
    assert "control group /kubepods/a" in held.mend
    assert memory(Memory(1 * GB), 8, None).level.value == "ok"
