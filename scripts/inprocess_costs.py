"""What leaving a function costs, piece by piece: the figures of docs/inprocess.md.

usage: python scripts/inprocess_costs.py        (about 20 s; on a busy machine read the medians)
"""

import contextlib
import gc
import os
import queue
import socket
import statistics
import subprocess
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor

from everstep.inprocess import frames, reset
from everstep.inprocess.cleaning import Cleaning
from everstep.inprocess.interrupt import Interrupter, RankShouldRestart

interrupter = Interrupter()


def show(what: str, seconds: list[float]) -> None:
    """Print the median and the worst of some times."""
    print(f"{what:<58} {1e3 * statistics.median(seconds):9.3f} ms   worst {1e3 * max(seconds):9.3f} ms")


def interrupted(function, generation: int) -> float:
    """Return the seconds from the interrupt to the function left."""
    sent = [0.0]

    def outside() -> None:
        time.sleep(0.05)
        sent[0] = time.perf_counter()
        interrupter.interrupt(generation)

    thread = threading.Thread(target=outside)
    thread.start()
    with contextlib.suppress(RankShouldRestart):
        interrupter.call(generation, function)
    left = time.perf_counter()
    thread.join()
    return left - sent[0]


def lock() -> None:
    """Wait for a lock that is held."""
    held = threading.Lock()
    held.acquire()
    held.acquire()


def receive() -> None:
    """Wait for bytes that never come."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def bytecode() -> None:
    """Count."""
    n = 0
    while True:
        n += 1


def matmuls() -> None:
    """Multiply small matrices."""
    a = torch.randn(64, 64)
    while True:
        a = (a @ a).tanh()


WAITS = {
    "time.sleep": lambda: time.sleep(60),
    "Lock.acquire": lock,
    "queue.get": lambda: queue.Queue().get(),
    "socket.recv": receive,
    "subprocess.run": lambda: subprocess.run(["sleep", "60"], check=True),
    "a loop of bytecode": bytecode,
    "a loop of matmuls": matmuls,
}


def times(function, count: int) -> list[float]:
    """Call and time."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return taken


class At:
    """A world of one."""

    epoch, rank, world_size = 0, 0, 1

    def __init__(self, generation: int, port: int) -> None:
        self.generation, self.store = generation, ("127.0.0.1", port)


def main() -> None:
    """Measure."""
    for number, (name, wait) in enumerate(WAITS.items()):
        show(f"interrupt of {name}", [interrupted(wait, 100 * number + n) for n in range(1, 6)])
    show("an entry (self-test of the signal, arming, disarming)", times(lambda: interrupter.call(10**6, int), 200))
    baseline = reset.record()
    show("record process-global state", times(reset.record, 20))
    show("restore it, nothing changed", times(lambda: reset.restore(baseline), 20))
    show("fingerprint it", times(lambda: reset.fingerprint(baseline), 20))
    show("gc.collect before settling", times(gc.collect, 3))
    show("settle (once, before the first call)", times(frames.settle, 1))
    show("gc.collect after settling", times(gc.collect, 20))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    cleaning, meet, abort, clean = Cleaning(), [], [], []
    cleaning.begin()
    for generation in range(20):
        with cleaning.meeting.entered(At(generation, store.port)):
            meet += times(lambda: dist.init_process_group("gloo"), 1)
            abort += times(cleaning.abort, 1)
            clean += times(lambda: cleaning.clean(None), 1)
    cleaning.close()
    show("meet (world of one, init_process_group)", meet)
    show("abort", abort)
    show("clean", clean)


main()
