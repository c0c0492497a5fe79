"""A worker in small: generations without an agent. Imported by scenarios only, inside the zygote's children."""

import threading
import time
from dataclasses import dataclass

from everstep.inprocess.cleaning import Cleaning
from everstep.inprocess.core.pursuit import Verdict
from everstep.inprocess.interrupt import Interrupter, RankShouldRestart


@dataclass(frozen=True)
class At:
    """One generation, as an agent would tell of it."""

    generation: int
    rank: int
    world_size: int
    store: tuple[str, int]
    epoch: int = 0


class Small:
    """Runs one function a generation; each may be stopped from outside once it says that it is ready."""

    def __init__(self, threads_s=1.0):
        self.interrupter, self.cleaning = Interrupter(), Cleaning(threads_s=threads_s)
        self.ready = threading.Event()
        self.stopped_s = self.left_s = self.cleaned_s = 0.0
        self.dirt = ()
        self.error = None

    def run(self, at, function):
        """Run to the end; returns what it returned."""
        self.cleaning.begin()
        with self.cleaning.meeting.entered(at):
            return self.interrupter.call(at.generation, function)

    def stop(self, at, function, after_s=0.15):
        """Run, stop `after_s` after the function has set `ready`, leave, clean."""
        self.cleaning.begin()
        self.ready.clear()
        over = threading.Event()

        def waiter():
            self.ready.wait(30)
            over.wait(after_s)
            self.stopped_s = time.monotonic()
            self.interrupter.interrupt(at.generation)
            self.cleaning.abort()
            while not over.wait(0.05):
                if self.interrupter.pursue(time.monotonic()) is Verdict.SEVER:
                    self.cleaning.abort()

        thread = threading.Thread(target=waiter, name="everstep-waiter")
        thread.start()
        self.error = None
        try:
            self.run(at, function)
        except RankShouldRestart as error:
            self.error = error
        except BaseException as error:
            self.error = error
        self.left_s = time.monotonic() - (self.stopped_s or time.monotonic())  # a peer's abort may have been earlier
        over.set()
        thread.join()
        self.clean()

    def clean(self):
        """Drop what the attempt left."""
        began = time.monotonic()
        error, self.error = self.error, None
        self.dirt = self.cleaning.clean(error)
        self.cleaned_s = time.monotonic() - began
