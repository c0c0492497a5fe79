"""A death for lack of memory is told from another SIGKILL by the kernel's own count."""

import pytest

from everstep.process.shortage import Shortage

V1, V2 = "5:cpu:/\n4:memory:/job/inner\n", "0::/job/inner\n"


def machine(tmp_path, lines, name, limit):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    top = groups / "memory" if "memory" in lines else groups
    inner = top / "job" / "inner"
    (proc / "self").mkdir(parents=True)
    inner.mkdir(parents=True)
    (proc / "self/cgroup").write_text(lines)
    (proc / "vmstat").write_text("pgfault 9\noom_kill 3\n")
    (inner / name).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (top / "job" / limit).write_text(f"{2 << 30}\n")
    (inner / limit).write_text("max\n" if lines == V2 else f"{(1 << 63) - 4096}\n")
    return proc, groups, inner / name


@pytest.mark.parametrize(
    ("lines", "name", "limit"),
    [(V1, "memory.oom_control", "memory.limit_in_bytes"), (V2, "memory.events", "memory.max")],
)
def test_the_group_s_count_decides_and_its_narrowest_limit_is_named(tmp_path, lines, name, limit):
    proc, groups, file = machine(tmp_path, lines, name, limit)
    seen = Shortage(proc, groups)
    (proc / "vmstat").write_text("oom_kill 4\n")
    assert seen.told() == ""
    file.write_text("oom_kill 2\n")
    assert seen.told().startswith("killed by the kernel for lack of memory: ")
    assert seen.told() == ""
    file.write_text("oom_kill 3\n")
    assert "/job allows 2.00 GiB" in seen.told()


def test_without_a_group_the_machine_s_count_is_a_perhaps(tmp_path):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    seen = Shortage(proc, tmp_path / "none")
    assert seen.told() == ""
    (proc / "vmstat").write_text("oom_kill 1\n")
    assert seen.told().startswith("perhaps killed by the kernel for lack of memory")
    assert seen.told() == ""
