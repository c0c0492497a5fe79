"""What is read of /proc and of control groups, from trees that a test has made."""

import pytest

from everstep.doctor import machine


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def proc(tmp_path):
    write(tmp_path / "proc", {"self/cgroup": "0::/pod/box\n", "sys/kernel/yama/ptrace_scope": "1\n"})
    return tmp_path / "proc"


def test_what_stands_there_is_read_from_every_group_around_us(proc, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "geteuid", lambda: 0)
    groups = tmp_path / "cgroup"
    write(
        groups,
        {
            "cgroup.controllers": "memory pids",
            "pod/pids.max": "500",
            "pod/pids.current": "460",
            "pod/box/pids.max": "max",
            "pod/box/pids.current": "3",
            "pod/memory.oom.group": "1",
        },
    )
    seen = machine.look(proc, groups)
    assert (seen.limits.tasks, seen.groups, seen.oom_group, seen.ptrace) == (40, "v2", True, 1)


def test_groups_of_the_first_version(proc, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "geteuid", lambda: 0)
    write(proc, {"self/cgroup": "8:pids:/box\n4:memory:/box\n"})
    groups = tmp_path / "cgroup"
    write(groups, {"memory/x": "", "pids/box/pids.max": "64", "pids/box/pids.current": "70"})
    seen = machine.look(proc, groups)
    assert (seen.limits.tasks, seen.groups, seen.oom_group) == (0, "v1", False)


def test_what_the_user_may_still_make_counts_threads_of_all_its_processes(proc, tmp_path, monkeypatch):
    write(proc, {"7/task/7/x": "", "7/task/9/x": "", "8/task/8/x": "", "net/x": ""})
    monkeypatch.setattr(machine.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (10, 20))
    assert machine.look(proc, tmp_path).limits.tasks == 7


def test_what_is_not_there_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "geteuid", lambda: 0)
    seen = machine.look(tmp_path, tmp_path)
    assert (seen.limits.tasks, seen.groups, seen.ptrace, seen.pidfd, seen.memfd) == (None, "", None, "", "")


def test_nvidia_s_driver(tmp_path):
    assert machine.driver(tmp_path, str(tmp_path)) == ""
    (tmp_path / "nvidia0").touch()
    assert machine.driver(tmp_path, str(tmp_path)) == "of unknown version"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2"
    write(tmp_path, {"driver/nvidia/version": line})
    assert machine.driver(tmp_path, str(tmp_path)) == "580.95.05"
