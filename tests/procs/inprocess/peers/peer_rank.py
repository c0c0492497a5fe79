"""One rank of a world without an agent: plain `init_process_group` in each generation, and a fault where it is told."""

import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist

from everstep.inprocess.call import Caller
from everstep.inprocess.cleaning import Cleaning
from everstep.inprocess.interrupt import Interrupter
from everstep.inprocess.peers import Settings, open_peers


class Rank:
    """A process as a launcher has started it; `call` runs a body in every generation."""

    def __init__(self, rank, front, env, **settings) -> None:
        os.environ |= {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(front)} | env
        self.initial, self.settings = rank, Settings(**settings)
        self.entered, self.harmed = {}, {}  # when, by generation; one clock for all processes of a machine
        self.seen = []  # (generation, rank, world size, the sum of all ranks' ones)
        self.cleaning = Cleaning()

    def call(self, body=None, init=None):
        """Return what the body returned; `seen` says what happened in each generation."""
        with open_peers(self.settings) as session:
            self.session = session
            cleaner = Ticking(self.cleaning)
            try:
                return Caller(session).call(lambda place: self._one(place, body, init), Interrupter(), cleaner)
            finally:
                self.cleaning.close()

    def _one(self, place, body, init):
        with self.cleaning.meeting.entered(place):
            if init is None:
                dist.init_process_group("gloo")
            else:
                init(place)
            ones = torch.ones(1)
            dist.all_reduce(ones)
            self.seen.append((place.generation, place.rank, place.world_size, int(ones)))
            self.entered[place.generation] = time.monotonic()
            self.session.page.step_done(place.generation + 1, time.monotonic())
            found = body(self, place) if body is not None else None
            dist.barrier()
            return found

    @staticmethod
    def harm(kind):
        """Do what a fault does."""
        if kind == "exception":
            raise ValueError("planned")
        if kind == "sleep":
            time.sleep(1000)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "lock":
            ctypes.PyDLL(None).sleep(1000)  # a call into C that keeps the interpreter lock
        if kind == "exit":
            raise SystemExit(3)


class Ticking:
    """A cleaner that has nothing to do beside the loop."""

    def __init__(self, cleaning) -> None:
        self.begin, self.abort, self.clean = cleaning.begin, cleaning.abort, cleaning.clean

    def tick(self) -> None:
        pass
