"""Weaknesses of NVRx's launcher (the W numbers), seen under it and not under ours: one script, both launchers (long).

The other's environment is made by `make peers`. Times are compared with one another, never with a clock.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(200)]

SCRIPT = """
import json, os, signal, sys, time
def note(what, **facts):
    facts |= {"what": what, "rank": rank, "attempt": attempt, "pid": os.getpid(), "at": time.monotonic()}
    with open(os.environ["NOTES"], "a") as f: f.write(json.dumps(facts) + "\\n")
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
note("begins")
import torch, torch.distributed as dist
from MODULE.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
mode = sys.argv[1]
client = RankMonitorClient()
client.init_workload_monitoring()
dist.init_process_group("gloo")
dist.barrier()
def stands_here():
    time.sleep(600)
if attempt == 0 and rank == 1:
    note("now")
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "sections":
        client.start_section("step")
        client.start_section("save")
        stands_here()
    if mode == "one section":
        client.start_section("step")
        stands_here()
if mode == "asks":
    if rank == 0:
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "loss is NaN"))
    for second in range(12):
        time.sleep(1)
        dist.barrier()
dist.barrier()
dist.destroy_process_group()
note("ends")
"""
FLAGS = ("--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-endpoint", "127.0.0.1:0",
         "--ft-rank-section-timeouts", "step:2,save:100", "--ft-workload-check-interval", "0.5")  # fmt: skip


class Ran:
    """What one launcher has made of it."""

    def __init__(self, folder: Path, python: str, module: str, words: tuple, limit_s: float) -> None:
        folder.mkdir()
        self.file = folder / "notes.jsonl"
        text = SCRIPT.replace("MODULE", module) if words[0] != "broken" else "def broken(:\n"
        (folder / "script.py").write_text(text)
        env = os.environ | {"NOTES": str(self.file), "EVERSTEP_RUN_DIR": str(folder / "run")}
        if module != "everstep":
            env["PYTHONPATH"] = ""
        command = [python, "-m", f"{module}.fault_tolerance.launcher", *FLAGS, "script.py", *words]
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True)
            try:
                self.code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.code = None
            self.ended_s = time.monotonic()
            if self.code is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    pass
            self.clear(process)
        self.said = (folder / "out").read_text()

    def clear(self, process: subprocess.Popen) -> None:
        """Whatever still writes notes, or is of its session, is ended: it hangs."""
        for note in self.notes():
            try:
                os.kill(note["pid"], signal.SIGKILL)
            except ProcessLookupError:
                pass
        if process.poll() is None:
            process.kill()
        process.wait()

    def notes(self, what: str = "") -> list[dict]:
        if not self.file.exists():
            return []
        told = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [note for note in told if what in ("", note["what"])]

    @property
    def back_s(self) -> float:
        """From the fault to the first line of the next attempt, of its last rank."""
        (now,) = self.notes("now")
        return max(n["at"] for n in self.notes("begins") if n["attempt"] == 1) - now["at"]

    @property
    def exit_s(self) -> float:
        """From the last line of the script to the launcher's end."""
        return self.ended_s - max(note["at"] for note in self.notes("ends"))


@pytest.fixture
def both(root, tmp_path):
    peers = root / ".venv-peers/bin/python"
    if not peers.exists():
        pytest.skip("`make peers` has not been run here")

    def run(*words, limit_s=60):
        theirs = Ran(tmp_path / "theirs", str(peers), "nvidia_resiliency_ext", words, limit_s)
        return theirs, Ran(tmp_path / "ours", sys.executable, "everstep", words, limit_s)

    return run


def test_a_restart_and_the_end_of_a_good_job_cost_a_part_of_theirs(both):
    """W24, W25: they sleep, and pay for the imports again."""
    theirs, ours = both("killed")
    assert (theirs.code, ours.code) == (0, 0), theirs.said + ours.said
    assert ours.back_s < theirs.back_s / 2, (ours.back_s, theirs.back_s)
    assert ours.exit_s < theirs.exit_s, (ours.exit_s, theirs.exit_s)


def test_a_section_that_has_expired_is_found_though_another_was_opened_later(both):
    """W27."""
    theirs, ours = both("sections", limit_s=25)
    assert theirs.code is None, "it looks at the section that was opened last"
    assert ours.code == 0, ours.said
    assert "section 'step' is open" in ours.said


def test_where_a_hung_rank_stood_is_known_afterwards(both):
    """W26, W40: found sooner, and not only killed."""
    theirs, ours = both("one section")
    assert (theirs.code, ours.code) == (0, 0), theirs.said + ours.said
    assert "stands_here" not in theirs.said
    told = "".join(path.read_text() for path in (ours.file.parent / "run/events").glob("agent-*.jsonl"))
    assert "in stands_here" in told
    assert ours.back_s < theirs.back_s, (ours.back_s, theirs.back_s)


def test_a_request_ends_a_job_that_runs(both):
    """W31: theirs is read when the next rendezvous begins, and there is none."""
    theirs, ours = both("asks")
    assert theirs.code == 0, "it has run to its end"
    assert len(theirs.notes("ends")) == 2
    assert ours.code == 93, ours.said
    assert ours.notes("ends") == []
    assert "loss is NaN" in ours.said


def test_what_cannot_succeed_is_begun_once(both):
    """W34: a script that is no Python burns their restarts."""
    theirs, ours = both("broken")
    assert len(re.findall("SyntaxError", theirs.said)) > 2
    assert ours.code == 1
    assert "the script is no Python, and no restart mends that" in ours.said
    assert ours.said.count("    def broken(:") <= 2, "once for each rank"
