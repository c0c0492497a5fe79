"""A rank that waits inside the kernel, where SIGKILL does not reach it (LA-08)."""

import contextlib
import os
import shutil
import signal
import subprocess
import time

import pytest

pytestmark = [
    pytest.mark.procs,
    pytest.mark.skipif(
        shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK),
        reason="needs bindfs and a /dev/fuse that may be opened: no other file system here stops answering on demand",
    ),
]

SCRIPT = """
@everstep.resilient
def train(run):
    for step in run.steps(40):
        dist.barrier()
        note("step", step=step, generation=run.generation)
        if step == 12 and run.rank == 1 and run.generation == 0:
            note("reads")
            open(STUCK, "rb").read()
        time.sleep(0.02)
train()
"""


@pytest.fixture
def stuck(tmp_path):
    """A file whose reader is in state D once the outer file system has asked the inner one, which is stopped."""
    real, inner, outer = (tmp_path / name for name in ("real", "inner", "outer"))
    for folder in (real, inner, outer):
        folder.mkdir()
    (real / "file").write_bytes(os.urandom(1 << 20))
    servers = []
    for source, target, options in ((real, inner, []), (inner, outer, ["-o", "direct_io"])):
        servers.append(subprocess.Popen(["bindfs", "-f", *options, source, target]))
        until = time.monotonic() + 20
        while not os.path.ismount(target):
            assert time.monotonic() < until, "bindfs has not mounted"
            time.sleep(0.02)
    os.kill(servers[0].pid, signal.SIGSTOP)
    go = lambda: os.kill(servers[0].pid, signal.SIGCONT)  # noqa: E731
    yield outer / "file", go
    go()
    for target in (outer, inner):
        until = time.monotonic() + 20
        while os.path.ismount(target) and time.monotonic() < until:
            subprocess.run(["umount", target], check=False, capture_output=True)
            time.sleep(0.05)
    for server in servers:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.wait()


@pytest.mark.long
def test_a_rank_that_cannot_be_killed_is_named_and_nothing_begins_in_its_place(start, stuck):
    file, go = stuck
    text = SCRIPT.replace("STUCK", repr(str(file)))
    limits = ("--soft-timeout", "2", "--hard-timeout", "4", "--death-timeout", "8")
    job = start(text, "--nproc-per-node", "2", "--spares", "1", *limits)
    assert job.process.wait(100) == 75  # though what it could not end is still there, and holds its terminal
    left = job.left()
    go()
    ended = job.ended()
    assert ended.code == 75, ended.err
    (reads,) = ended.of("reads")
    assert left == [reads["pid"]]
    assert f"processes {left[0]} (state D, in " in ended.err
    job.gone_within(20)
    assert "the death of rank 1 (" in ended.err
    assert f"worker-1 (pid {reads['pid']}) does not die: state D" in ended.err
    assert {n["generation"] for n in ended.of("step")} == {0}  # nobody took its rank, nor its device
    assert ended.seconds < 60
