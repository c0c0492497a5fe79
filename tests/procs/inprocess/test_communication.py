"""A rank that is blocked in C++ gets out in milliseconds, and nothing else of the process is hurt."""

import http.client
import http.server
import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest

pytestmark = pytest.mark.procs
AT_ONCE = 0.3


class Worker:
    """One rank in small: interrupt and abort come from a second thread, after a delay or when asked."""

    def __init__(self, rank, port, world=2):
        import torch.distributed as dist

        from everstep.inprocess.communication import Communication
        from everstep.inprocess.interrupt import Interrupter

        self.dist, self.rank, self.port, self.world = dist, rank, port, world
        self.communication, self.interrupter = Communication(), Interrupter()
        assert self.communication.watch()

    def init(self, prefix="g", world=None, rank=None):
        with self.communication.opening(self.port):
            store = self.dist.TCPStore("127.0.0.1", self.port, None, timeout=timedelta(seconds=60))
        self.dist.init_process_group(
            "gloo",
            store=self.dist.PrefixStore(prefix, store),
            rank=self.rank if rank is None else rank,
            world_size=world or self.world,
            timeout=timedelta(seconds=60),
        )

    def stop_after(self, delay_s, function):
        """Run `function`, stop it from outside; return seconds from the stop to its end, what was done, what came."""
        told = {}

        def waiter():
            time.sleep(delay_s)
            told["at"] = time.monotonic()
            self.interrupter.interrupt(0)
            told["aborted"] = self.communication.abort(5.0)

        thread = threading.Thread(target=waiter)
        thread.start()
        came = None
        try:
            self.interrupter.call(0, function)
        except BaseException as error:
            came = type(error).__name__
        ended = time.monotonic()
        thread.join()
        began = time.monotonic()
        self.communication.finish()
        self.communication.let_go()
        return {
            "seconds": ended - told["at"],  # negative where a peer's abort has ended it already
            "severed": told["aborted"].severed,
            "stores": told["aborted"].stores,
            "abort_s": told["aborted"].seconds,
            "clean": told["aborted"].clean,
            "finish_s": time.monotonic() - began,
            "came": came,
        }


def _over_mesh(worker):
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    local = DTensor.from_local(torch.ones(1000), worker.mesh, [Partial()])
    return local.redistribute(worker.mesh, [Replicate()]).to_local().sum()


def _blocked(worker, what):
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1000)
    {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(tensor, src=0),
        "async_wait": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "sub_group": lambda: dist.all_reduce(tensor, group=worker.sub),
        "mesh": lambda: _over_mesh(worker),
        "object": lambda: dist.broadcast_object_list([None], src=0),
        "monitored_barrier": lambda: dist.monitored_barrier(timeout=timedelta(seconds=60)),
        "new_group": lambda: dist.new_group([0, 1]),
    }[what]()


def one_rank_blocks(rank, port, what):
    """Rank 1 is inside a collective that rank 0 never enters."""
    worker = Worker(rank, port)
    worker.init()
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    if what == "sub_group":
        worker.sub = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=worker.sub)
    if what == "mesh":
        worker.mesh = dist.init_device_mesh("cpu", (2,))
        _over_mesh(worker)
    if rank == 0:
        return worker.stop_after(0.6, lambda: time.sleep(60))
    return worker.stop_after(0.2, lambda: _blocked(worker, what))


WAITS = [
    "all_reduce",
    "barrier",
    "recv",
    "async_wait",
    "sub_group",
    "mesh",
    "object",
    "monitored_barrier",
    "new_group",
]


@pytest.mark.parametrize("what", WAITS)
def test_a_blocked_collective_ends_at_once(forks, what):
    both = forks.run(one_rank_blocks, what=what)
    for told in both:
        assert told["seconds"] < AT_ONCE
        assert told["abort_s"] < AT_ONCE
        assert told["clean"]
    assert both[1]["stores"] == (what == "new_group"), "a connection to the store that nobody waits in is kept"
    assert both[1]["severed"] >= (2 if what == "sub_group" else 1)


def nobody_comes(rank, port):
    worker = Worker(rank, port)
    told = worker.stop_after(0.3, worker.init)
    told["initialized"] = worker.dist.is_initialized()
    return told


def test_a_rank_inside_init_process_group_gets_out(forks):
    """E10: no signal ends this wait; its own connection to the store, shut down, does."""
    (told,) = forks.run(nobody_comes, ranks=1)
    assert told["seconds"] < AT_ONCE
    assert told["stores"] == 1
    assert not told["initialized"]


class _Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


def others_survive(rank, port):
    """A user's HTTP server and client, opened before, while and after groups are made; another store; an event loop."""
    import asyncio

    import torch
    import torch.distributed as dist

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def client():
        made = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=5)
        made.request("GET", "/")
        made.getresponse().read()
        return made

    clients = [client()]
    worker = Worker(rank, port)
    other = dist.TCPStore("127.0.0.1", port, None, timeout=timedelta(seconds=20))
    inside, made = threading.Event(), []

    def meanwhile():
        inside.wait()
        made.append(client())
        made.append(asyncio.new_event_loop())

    thread = threading.Thread(target=meanwhile)
    thread.start()
    with worker.communication.opening():
        inside.set()
        thread.join()
        worker.init()
    dist.all_reduce(torch.ones(1))
    clients += [made[0], client()]
    ours, theirs = socket.socketpair()
    told = worker.stop_after(0.2 if rank else 0.6, lambda: dist.all_reduce(torch.ones(1)) if rank else time.sleep(60))
    alive = 0
    for each in clients:
        each.request("GET", "/")
        alive += each.getresponse().read() == b"ok"
        each.close()
    other.set(f"still{rank}", "here")
    alive += other.get(f"still{rank}") == b"here"
    ours.send(b"x")
    alive += theirs.recv(1) == b"x"
    made[1].run_until_complete(asyncio.sleep(0))
    made[1].close()
    server.shutdown()
    server.server_close()
    return told | {"alive": alive}


def test_what_is_not_the_group_s_survives(forks):
    both = forks.run(others_survive)
    for told in both:
        assert told["alive"] == 5
        assert told["seconds"] < AT_ONCE
    assert both[1]["severed"] == 1


def aborted_twice(rank, port):
    import torch
    import torch.distributed as dist

    worker = Worker(rank, port)
    worker.init()
    dist.all_reduce(torch.ones(1))
    first = worker.stop_after(0.2, lambda: dist.barrier() if rank else time.sleep(60))
    second = worker.communication.abort(1.0)
    worker.init("again")
    one = torch.ones(1)
    dist.all_reduce(one)
    worker.communication.finish()
    return [first["severed"], second.severed, one.item()]


def test_an_abort_after_the_end_does_nothing_and_a_new_group_works(forks):
    both = forks.run(aborted_twice)
    assert sum(first for first, _, _ in both) >= 1
    assert [rest for _, *rest in both] == [[0, 2.0], [0, 2.0]]


def descriptors_stay(rank, port, rounds):
    import gc

    import torch
    import torch.distributed as dist

    worker, counts = Worker(rank, port), []
    for number in range(rounds):
        worker.init(f"g{number}")
        dist.all_reduce(torch.ones(1))
        worker.communication.abort(1.0)
        worker.communication.finish()
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


def test_descriptors_and_threads_do_not_pile_up(forks):
    for counts in forks.run(descriptors_stay, rounds=10):
        assert counts[2] == counts[-1]


def no_hook(rank, port):
    """A torch without the place we look from: the fallback, by what sets have come since."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from everstep.inprocess import communication as module

    module._HELPER = "not there"
    communication = module.Communication()
    watching = communication.watch()
    worker = Worker.__new__(Worker)
    worker.dist, worker.rank, worker.port, worker.world = dist, rank, port, 2
    from everstep.inprocess.interrupt import Interrupter

    worker.communication, worker.interrupter = communication, Interrupter()
    assert c10d._new_process_group_helper.__name__ == "_new_process_group_helper"
    worker.init()
    dist.all_reduce(torch.ones(1))
    told = worker.stop_after(0.2 if rank else 0.6, lambda: dist.barrier() if rank else time.sleep(60))
    return told | {"watching": watching}


def test_without_the_hook_sets_that_came_since_are_judged(forks):
    both = forks.run(no_hook)
    for told in both:
        assert not told["watching"]
        assert told["seconds"] < AT_ONCE
    assert both[1]["severed"] == 1


def a_peer_is_frozen(rank, port):
    """Rank 0 is stopped inside the collective; rank 1 still gets out, and its abort waits for nobody."""
    import torch
    import torch.distributed as dist

    worker = Worker(rank, port)
    worker.init()
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        time.sleep(60)
    return worker.stop_after(0.4, lambda: dist.all_reduce(torch.ones(1)))


def test_a_frozen_peer_does_not_hold_us(forks):
    frozen, told = forks.outcomes(a_peer_is_frozen, limit_s=5.0)
    assert frozen == {"died": -signal.SIGKILL}
    assert told["value"]["seconds"] < AT_ONCE


def a_peer_publishes_and_freezes(rank, port, frozen):
    """Its address is in the store, its listening socket takes connections, and it never says a word."""
    import torch.distributed as dist

    class Freezing(dist.Store):
        """A store that answers nothing after the first address."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def set(self, key, value):
            self.inner.set(key, value)

        def has_extended_api(self):
            return False

        def wait(self, *_):
            time.sleep(3)
            raise RuntimeError("thawed")

        get = wait

    from small import At, Small

    small = Small()
    if rank == frozen:
        inner = dist.PrefixStore("0/0", dist.TCPStore("127.0.0.1", port, None))
        try:
            dist.init_process_group("gloo", store=Freezing(inner), rank=rank, world_size=2)
        except RuntimeError:
            return None

    def attempt():
        small.ready.set()
        dist.init_process_group("gloo")

    small.stop(At(0, rank, 2, ("127.0.0.1", port)), attempt, after_s=1.0)
    return [small.left_s, list(small.dirt)]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_mesh_that_a_frozen_peer_never_completes_is_left(forks, frozen):
    told = forks.run(a_peer_publishes_and_freezes, frozen=frozen)
    left_s, dirt = told[1 - frozen]
    assert left_s < AT_ONCE
    assert dirt == []


def waits_by_itself(rank, port, what):
    """The user's own code waits where a first abort does not reach: in the store, or for a child in a `finally`."""
    import subprocess

    import torch.distributed as dist
    from small import At, Small
    from torch.distributed import distributed_c10d as c10d

    small = Small()

    def in_store():
        dist.init_process_group("gloo")
        small.ready.set()
        c10d._get_default_store().wait(["never"], timedelta(seconds=60))

    def for_a_child():
        child = subprocess.Popen(["sleep", "60"])
        small.ready.set()
        try:
            time.sleep(60)
        finally:
            while child.poll() is None:
                try:
                    child.wait()
                except BaseException:
                    continue

    small.stop(At(0, rank, 1, ("127.0.0.1", port)), in_store if what == "store" else for_a_child)
    return [small.left_s, list(small.dirt)]


@pytest.mark.parametrize("what", ["store", "child"])
def test_the_second_abort_ends_what_the_first_left(forks, what):
    ((left_s, dirt),) = forks.run(waits_by_itself, ranks=1, what=what)
    assert left_s < 5.0  # torch 2.8 wakes from its store earlier
    assert dirt == []


def the_model_goes_last(rank, port):
    """A script takes its groups down and then lets go of its model, again and again."""
    import sys

    import torch
    import torch.distributed as dist
    from torch import nn

    from everstep.inprocess.communication import Communication

    torch.set_num_threads(1)
    communication = Communication()
    communication.watch()
    held = []
    for _ in range(100):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        held.append(len(communication._books.groups))
        sys.setswitchinterval(100)  # only who waits gives the lock up: this finds the dead lock in the first rounds
        model(torch.ones(2, 4)).sum().backward()
        dist.destroy_process_group()
        del model
        sys.setswitchinterval(0.005)
    communication.let_go()
    return {"held": max(held), "left": len(communication._books.groups)}


def test_a_model_that_outlives_its_groups_does_not_stop_the_process(forks):
    """Without our hold the reducer frees the group, under a lock that the group's own thread waits for: for ever."""
    assert forks.run(the_model_goes_last) == [{"held": 1, "left": 0}] * 2


def meets_again_while_the_last_abort_goes_on(rank, port):
    """A backend whose abort joins for long, as NCCL's does; let go only when the next generation has reduced."""
    import threading

    import torch
    import torch.distributed as dist
    from small import At, Small
    from torch.distributed import distributed_c10d as c10d

    class Slow:
        _device_types = ("cpu",)

        def __init__(self):
            self.let_go = threading.Event()

        def _get_backend(self, device):
            return self

        def name(self):
            return "slow"

        def abort(self):
            self.let_go.wait(60)

    small, slow, store = Small(), Slow(), ("127.0.0.1", port)

    def stuck():
        dist.init_process_group("gloo")
        c10d._world.pg_names[slow] = "slow"
        small.ready.set()
        time.sleep(60)

    small.stop(At(0, rank, 2, store), stuck)
    left_s, cleaned_s, dirt = small.left_s, small.cleaned_s, list(small.dirt)
    going_on = small.cleaning.communication.unfinished(0.0)

    def again():
        dist.init_process_group("gloo")
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    reduced = small.run(At(1, rank, 2, store), again)
    still_going_on = small.cleaning.communication.unfinished(0.0)
    slow.let_go.set()
    small.cleaning.close()
    ended = small.cleaning.communication.unfinished(0.0)
    return [left_s + cleaned_s, dirt, going_on, reduced, still_going_on, ended]


def test_the_next_generation_reduces_while_the_last_one_s_abort_goes_on(forks):
    for gone_s, dirt, going_on, reduced, still_going_on, ended in forks.run(meets_again_while_the_last_abort_goes_on):
        assert going_on == still_going_on == ["slow group slow (1)"]
        assert (dirt, reduced, ended) == ([], 2.0, [])
        assert gone_s < AT_ONCE
