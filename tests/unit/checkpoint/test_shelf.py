"""The agent's side alone: slices of allocation, budgets, older tiers."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from everstep.checkpoint import memory, segments, shelf
from everstep.checkpoint.core.budget import Memory, Need, bytes_of, shortage, size
from everstep.checkpoint.core.estimate import buffer_bytes, state_bytes, state_tensors
from everstep.checkpoint.core.plan import Committed
from everstep.checkpoint.segments import Segment
from everstep.checkpoint.shelf import Shelf
from everstep.errors import MemoryShortage, UsageError
from everstep.testing.loopback import LoopbackHost

PLENTY = Memory(8 << 30)


def asking(host: LoopbackHost, rank: int = 0) -> list:
    answers: list = []
    host.receivers[rank] = lambda message, fds: (answers.append((message, len(fds))), [os.close(fd) for fd in fds])
    return answers


def attach(ask: int = 1, needed: int = 1 << 20, have=()) -> dict:
    return {"kind": "snapshot.attach", "ask": ask, "bytes": needed, "have": list(have)}


def test_large_buffers_are_allocated_in_slices_between_which_the_agent_lives(monkeypatch):
    monkeypatch.setattr(shelf, "SLICE", 1 << 20)
    tier = Shelf(look=lambda: PLENTY)
    host = LoopbackHost(tier)
    host.enter()
    answers = asking(host)
    tier.on_message(0, attach(needed=1 << 20), ())
    turns = 0
    while not answers:
        turns += 1
        tier.on_tick(0.0)
    assert turns == 3  # four buffers, the first at once
    message, descriptors = answers[0]
    assert (message["kind"], descriptors) == ("snapshot.buffers", 4)
    assert message["sets"] == [{"set": 0, "bytes": 1 << 20, "buffers": [0, 1, 2, 3], "sent": True}]
    tier.close()


def test_who_asked_in_an_ended_generation_gets_no_answer(monkeypatch):
    monkeypatch.setattr(shelf, "SLICE", 1 << 19)
    tier = Shelf(look=lambda: PLENTY)
    host = LoopbackHost(tier)
    host.enter()
    answers = asking(host)
    tier.on_message(0, attach(), ())
    host.enter()
    host.settle()
    assert answers == []
    tier.on_message(0, attach(ask=1), ())
    host.settle()
    assert [m["ask"] for m, _ in answers] == [1]
    tier.close()


def test_a_buffer_takes_its_whole_size_and_cannot_be_cut():
    segment = Segment("test", 1 << 20)
    assert segment.header() == "void: not allocated yet"
    segment.allocate(1 << 30)
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    segment.close()


def test_a_kernel_that_refuses_is_an_error_that_says_so(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    tier = Shelf(look=lambda: PLENTY)
    host = LoopbackHost(tier)
    host.enter()
    answers = asking(host)
    tier.on_message(0, attach(), ())
    message, _ = answers[0]
    assert message["kind"] == "snapshot.refused"
    assert "the kernel refused" in message["text"]
    assert tier.bytes == 0
    segment = Segment("test", 4096)
    with pytest.raises(MemoryShortage, match="No space left"):
        segment.allocate(4096)
    segment.close()


def test_an_older_tier_serves_after_a_restart_and_is_struck_out_when_it_is_damaged():
    disk = [Committed(20, "disk", {"path": "/c/20"}), Committed(10, "disk", {"path": "/c/10"})]
    tier = Shelf(older=lambda: disk, look=lambda: PLENTY)
    host = LoopbackHost(tier, 2)
    told = host.enter()
    assert told[1]["restore"] == {"step": 20, "tier": "disk", "path": "/c/20"}
    assert told[1]["lineage"] == [0, 0, 20]
    tier.on_message(1, {"kind": "snapshot.damaged", "tier": "disk", "step": 20, "why": "shard 1 is torn"}, ())
    told = host.enter()
    assert told[0]["restore"] == {"step": 10, "tier": "disk", "path": "/c/10"}
    assert tier.plan is not None
    assert tier.plan.reason == "step 10 from disk: memory holds no snapshot"
    tier.close()


def test_the_tier_asks_for_nothing_else_of_an_agent():
    tier = Shelf()
    assert tier.drained(True)
    assert tier.problems() == ()


def test_no_memory_is_told_with_the_tightest_limit():
    need = Need(ranks=2, buffers=4, buffer_bytes=100 << 20, missing=800 << 20, held=0)
    assert shortage(need, Memory(1 << 30), None) is None
    node = shortage(need, Memory(800 << 20), None)
    assert node is not None
    assert "800.0 MiB (4 buffers of 100.0 MiB for each of 2 ranks), of which 800.0 MiB" in node
    assert "this machine has available 750.0 MiB" in node
    group = shortage(need, Memory(8 << 30, 400 << 20, "/sys/fs/cgroup/pod"), None)
    assert group is not None
    assert "control group /sys/fs/cgroup/pod leaves 375.0 MiB. Raise the container's memory limit" in group
    cap = shortage(need, Memory(8 << 30), 100 << 20)
    assert cap is not None
    assert "--snapshot-memory leaves 100.0 MiB. Raise --snapshot-memory" in cap
    assert [size(n) for n in (5, 1536, 1 << 20, 3 << 40)] == ["5 B", "1.5 KiB", "1.0 MiB", "3.0 TiB"]


def tree(base: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return base


MEMINFO = {"proc/meminfo": "MemTotal:       100 kB\nMemAvailable:       50 kB\nHugePages_Total: 0\n"}


def test_the_group_around_ours_may_be_the_tighter_one(tmp_path):
    base = tree(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/pod/main\n",
            "cg/pod/main/memory.max": "max\n", "cg/pod/main/memory.current": "10\n",
            "cg/pod/memory.max": "1000\n", "cg/pod/memory.current": "600\n",
            "cg/pod/memory.stat": "inactive_file 100\n",
        },
    )  # fmt: skip
    assert memory.read(base / "proc", base / "cg") == Memory(50 * 1024, 500, str(base / "cg/pod"))


def test_the_first_version_of_groups_is_read_too(tmp_path):
    base = tree(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/host/path\n0::/\n",
            "cg/memory/memory.limit_in_bytes": "900\n", "cg/memory/memory.usage_in_bytes": "500\n",
            "cg/memory/memory.stat": "total_inactive_file 50\n",
        },
    )  # fmt: skip
    assert memory.read(base / "proc", base / "cg").group_free == 450


def test_no_limit_and_no_files_are_no_limit(tmp_path):
    unlimited = {"cg/memory/memory.limit_in_bytes": str(2**63 - 4096), "cg/memory/memory.usage_in_bytes": "5"}
    base = tree(tmp_path, MEMINFO | {"proc/self/cgroup": "4:memory:/\n"} | unlimited)
    assert memory.read(base / "proc", base / "cg").group_free is None
    assert memory.read(base / "nowhere", base / "cg") == Memory(0, None, "")


@pytest.mark.parametrize(
    ("names", "group", "tensors"),
    [
        (["AdamW", "Adam"], {}, 2), (["Mine", "AdamW"], {"amsgrad": True}, 3), (["SGD"], {"momentum": 0}, 0),
        (["SGD"], {"momentum": 0.9}, 1), (["RMSprop"], {"momentum": 0.5, "centered": True}, 3), (["Unknown"], {}, 2),
        (["LBFGS"], {"history_size": 3}, 10), (["Adagrad"], {}, 1),
    ],
)  # fmt: skip
def test_state_to_come_is_counted_by_class(names, group, tensors):
    assert state_tensors(names, group) == tensors
    assert state_bytes(tensors, 100) == tensors * 128 + 192
    assert buffer_bytes(1000, 3, 4096) % 4096 == 0


@pytest.mark.parametrize(("text", "amount"), [("12", 12), ("1KB", 1000), ("1.5 GiB", 3 * 2**29), ("8gb", 8 * 10**9)])
def test_amounts_of_memory(text, amount):
    assert bytes_of(text) == amount


@pytest.mark.parametrize("text", ["", "GB", "1 XB", "-3", "1.2.3"])
def test_amounts_that_are_none(text):
    with pytest.raises(UsageError, match="write for example"):
        bytes_of(text)
