"""A function in the main thread, a waiter that interrupts it, a ticker that pursues: a worker in small."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from everstep.inprocess.core.pursuit import Patience, Verdict
from everstep.inprocess.interrupt import Interrupter, RankShouldRestart

_spec = importlib.util.spec_from_file_location(
    "jobs_of_the_launcher", Path(__file__).parent.parent / "launcher/conftest.py"
)
jobs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(jobs)
start = jobs.start  # whole jobs under `everstep run`, for what is of this package all the same


@pytest.fixture
def head():
    """What the script of a whole job begins with where `start` is not to say so."""
    return jobs.HEAD


@dataclass
class Chased:
    """What became of one interrupted call."""

    raised: bool
    seconds: float  # from the interrupt to the function left
    verdicts: list[Verdict] = field(default_factory=list)
    value: object = None


class Rig:
    """Runs functions and interrupts them after a delay."""

    def __init__(self, patience: Patience | None = None, signum: int | None = None) -> None:
        self.interrupter = Interrupter(signum=signum, patience=patience or Patience(settle_s=0.05, grace_s=0.3))
        self._generation = 0

    def run(self, function, after_s: float = 0.05) -> Chased:
        self._generation += 1
        generation, over, sent, verdicts = self._generation, threading.Event(), [0.0], []

        def outside():
            over.wait(after_s)
            sent[0] = time.monotonic()
            self.interrupter.interrupt(generation)
            while not over.wait(0.02):
                verdict = self.interrupter.pursue(time.monotonic())
                if verdict is not Verdict.KEEP:
                    verdicts.append(verdict)

        thread = threading.Thread(target=outside)
        thread.start()
        raised, value = False, None
        try:
            value = self.interrupter.call(generation, function)
        except RankShouldRestart:
            raised = True
        finally:
            seconds = time.monotonic() - sent[0]
            over.set()
            thread.join()
        return Chased(raised, seconds, verdicts, value)


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.interrupter.close()


class Forks:
    """Runs scenarios of several ranks; see zygote.py."""

    def __init__(self) -> None:
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        lookups = {"RES_OPTIONS": "timeout:1 attempts:1"}  # torch's store looks names up; a lost packet costs 5 s
        environment = {**os.environ, **threads, **lookups}
        self._zygote = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def run(self, function, ranks: int = 2, limit_s: float = 45.0, **arguments) -> list:
        """Return what each rank returned; a rank that raised or died is an error that says how."""
        answers = self.outcomes(function, ranks, limit_s, **arguments)
        bad = {rank: answer for rank, answer in enumerate(answers) if "value" not in answer}
        assert not bad, f"ranks failed: {bad}"
        return [answer["value"] for answer in answers]

    def outcomes(self, function, ranks: int = 2, limit_s: float = 45.0, **arguments) -> list[dict]:
        """Return {"value": …}, {"error": …} or {"died": status} for each rank."""
        request = {
            "file": function.__code__.co_filename,
            "function": function.__name__,
            "ranks": ranks,
            "limit_s": limit_s,
            "arguments": arguments,
        }
        self._zygote.stdin.write(json.dumps(request) + "\n")
        self._zygote.stdin.flush()
        return json.loads(self._zygote.stdout.readline())

    def close(self) -> None:
        self._zygote.stdin.close()
        self._zygote.stdout.close()
        self._zygote.wait(60)


@pytest.fixture(scope="session")
def forks():
    made = Forks()
    yield made
    made.close()
