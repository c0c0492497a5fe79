"""SIGINT and SIGTERM in the midst of `Checkpointer.close` and `restore`, at many instants: an end, and a directory."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from everstep.checkpoint import Checkpointer, catalog

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("signal_victims.py")
LIMIT_S = 60.0
WAYS = [("SIGINT", False), ("SIGTERM", True), ("SIGTERM", False)]
ENDS = {("SIGINT", False): -2, ("SIGTERM", True): 3, ("SIGTERM", False): -15}


class Victims:
    """The process that forks them."""

    def __init__(self, directory, errors):
        self.directory = directory
        self._lines = {}
        self.errors = errors
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )

    def run(self, call, signal="SIGINT", handler=False, at=0, after_s=0.0):
        """Let one live and end; return what it said, and how it ended."""
        order = {"call": call, "signal": signal, "handler": handler, "at": at, "after_s": after_s}
        self.process.stdin.write(json.dumps({**order, "directory": str(self.directory)}) + "\n")
        self.process.stdin.flush()
        told = {}
        while "ended" not in told:
            told.update(json.loads(self.process.stdout.readline()))
        return told

    def lines(self, call):
        """How many lines of ours it comes to when nothing disturbs it."""
        if call not in self._lines:
            told = self.run(call)
            assert told["ended"] == 0
            self._lines[call] = told["lines"]
        return self._lines[call]

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(LIMIT_S) == 0
        self.process.stdout.close()


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    with (folder / "errors").open("w") as errors:
        made = Victims(folder / "ckpt", errors)
        assert made.run("close")["ended"] == 0  # so that there is something to restore
        yield made
        made.close()


def gone(pid):
    deadline = time.monotonic() + LIMIT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"keeper {pid} was left behind"
        time.sleep(0.01)


def serves(directory, step):
    """Somebody else has the directory at once, with that step in it."""
    state = {"weight": torch.zeros(1000), "rows": [torch.zeros(3)], "step": 0}
    with Checkpointer(directory) as ckpt:
        restored = ckpt.restore(state)
        assert restored is not None
        assert restored.step == state["step"] == step
        assert torch.equal(state["weight"], torch.full((1000,), float(step)))
        gone_too = ckpt._line.pid
    gone(gone_too)
    assert {one.complete for one in catalog.scan(str(directory))} == {True}
    strangers = [n for n in os.listdir(directory) if not n.startswith((".everstep", "step-")) or n.endswith(".tmp")]
    assert strangers == []


def strike(victims, seed):
    """One seeded blow; what was saved is there, and nothing else is left. True where it came before the call's end."""
    rng = random.Random(f"signals {seed}")
    call, way = rng.choice(["close", "restore", "again"]), rng.choice(WAYS)
    way = ("SIGINT", False) if call == "again" else way
    when = {"after_s": rng.uniform(0.001, 0.2)}
    if call == "again" or rng.random() < 0.75:
        when = {"at": rng.randint(1, victims.lines(call))}
    before = max((one.step for one in catalog.scan(str(victims.directory))), default=0)
    told = victims.run(call, *way, **when)
    blow = f"seed {seed}: {call}, {way}, {when}: {told}"
    assert told["ended"] == 0 or (call != "again" and told["ended"] == ENDS[way]), blow
    gone(told["keeper"])
    serves(victims.directory, told.get("saved", before))
    return told["ended"] != 0 or "interrupted" in told


@pytest.mark.parametrize(
    "seeds",
    [range(6, 7), *(pytest.param(range(n, n + 50), marks=pytest.mark.long) for n in (1000, 1050, 1100, 1150))],
    ids=str,
)
def test_a_signal_in_close_or_restore_ends_it_and_the_directory_serves_at_once(victims, seeds):
    struck = [strike(victims, seed) for seed in seeds]
    assert any(struck), "none came in the midst of a call"
