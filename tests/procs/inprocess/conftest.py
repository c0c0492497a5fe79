"""A function in the main thread, a waiter that interrupts it, a ticker that pursues: a worker in small."""

import threading
import time
from dataclasses import dataclass, field

import pytest

from everstep.inprocess.core.pursuit import Patience, Verdict
from everstep.inprocess.interrupt import Interrupter, RankShouldRestart


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
