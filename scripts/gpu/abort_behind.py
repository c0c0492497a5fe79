"""Leaving NCCL groups on two GPUs while their abort's join goes on behind. One JSON line a case and rank.

usage: PYTHONPATH=src python scripts/gpu/abort_behind.py [--order] [--cpu | --one-gpu]        (two GPUs, under 150 s)

--cpu: over gloo. --one-gpu: both ranks on one GPU, over NCCL's sockets; each says that it is a host of its own, for
NCCL refuses two ranks on one GPU within a host.

Each case is a pair of fresh processes, forked from one that has imported torch. Rank 0 raises; rank 1 stands in a wait,
is interrupted and its groups are aborted, as a worker's are; both clean up, meet again and reduce. `behind` does so
while the abort goes on, `waited` waits for it first: what the difference costs is the difference of `back_s`, seconds
from the exception to the end of the next generation's first all-reduce. A rank that cannot be left says `replaced`.

`--order` asks what comes first, the abort or the interrupt, for a rank whose host runs ahead and issues collectives:
the abort holds the group's lock for as long as it joins, and who issues a collective then waits for it in C++, where
no signal is heard (FSDP2 in forward and backward). And for one that destroys its groups in a `finally`.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from datetime import timedelta

OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_CPP_LOG_LEVEL": "error",
    "NCCL_NVLS_ENABLE": "0",
    "OMP_NUM_THREADS": "1",
}
CASES = [
    ("all_reduce", "behind", 4),
    ("all_reduce", "waited", 4),
    ("synchronize", "behind", 2),
    ("sub-groups", "behind", 2),
    ("store wait", "behind", 2),
    ("init_process_group", "behind", 2),
    ("first collective", "behind", 2),
    ("destroy_process_group", "behind", 2),
]
"""(where rank 1 stands, how the abort is treated, generations)"""
ORDERS = [
    ("issues collectives", "abort first", 4),
    ("issues collectives", "interrupt first", 4),
    ("destroys in a finally", "abort first", 4),
    ("destroys in a finally", "interrupt first", 4),
    ("destroys in a finally", "interrupt first", 4),
]
CASE_S, ALL_S, STANDS_S = 16.0, 140.0, 0.5
CPU, ONE = "--cpu" in sys.argv, "--one-gpu" in sys.argv
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def tell(**facts) -> None:
    """Print one line, whole, whoever else prints."""
    line = json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()})
    os.write(1, f"{line}\n".encode())


class At:
    """One generation."""

    epoch, world_size = 0, 2

    def __init__(self, generation: int, rank: int, port: int) -> None:
        self.generation, self.rank, self.store = generation, rank, ("127.0.0.1", port)


class Peer:
    """A pipe to the other rank: one byte is one word."""

    def __init__(self, hears: int, tells: int) -> None:
        self.hears, self.tells = hears, tells

    def say(self, word: bytes) -> None:
        """Tell one word."""
        os.write(self.tells, word)

    def hear(self, limit_s: float) -> bytes:
        """Return the next word; empty after `limit_s`."""
        ready = select.select([self.hears], [], [], limit_s)[0]
        return os.read(self.hears, 1) if ready else b""


def device():
    """Where tensors are."""
    import torch

    return torch.device("cpu") if CPU else torch.device("cuda", torch.cuda.current_device())


def settle() -> None:
    """Wait for the device."""
    import torch

    if not CPU:
        torch.cuda.synchronize()


def groups(meeting):
    """Make a default group and three sub-groups, and use each once."""
    import torch
    import torch.distributed as dist

    meeting.init_process_group("gloo" if CPU else "nccl")
    made = [None, *(dist.new_group([0, 1]) for _ in range(3))]
    for group in made:
        dist.all_reduce(torch.ones(1, device=device()), group=group)
    settle()
    return made


def stand(where, meeting, ready):
    """Rank 1: wait for ever, `where`. Rank 0 does the same up to the last call, and raises instead."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    one = torch.ones(1, device=device())
    if where == "init_process_group":
        ready()
        meeting.init_process_group("gloo" if CPU else "nccl")
    elif where == "first collective":
        meeting.init_process_group("gloo" if CPU else "nccl")
        ready()
        dist.all_reduce(one)
        settle()
    elif where in ("issues collectives", "destroys in a finally"):
        made = groups(meeting)
        ready()
        try:
            while True:
                dist.all_reduce(one, async_op=True)
                time.sleep(0.002)  # far below what the device queues in the time
        finally:
            if where == "destroys in a finally":
                dist.destroy_process_group()
    else:
        made = groups(meeting)
        ready()
        if where == "store wait":
            c10d._get_default_store().wait(["never"], timedelta(seconds=600))
        streams = [] if CPU else [torch.cuda.Stream() for _ in made]
        for n, group in enumerate(made if where == "sub-groups" else made[:1]):
            if streams:
                torch.cuda.set_stream(streams[n])
            dist.all_reduce(one, group=group, async_op=where != "all_reduce")
        if where == "destroy_process_group":
            dist.destroy_process_group()
        settle()
        time.sleep(600)


class Worker:
    """One rank: generations, a waiter that is told, a pursuit."""

    def __init__(self, rank: int, port: int, peer: Peer, where: str, how: str) -> None:
        from everstep.inprocess.cleaning import Cleaning
        from everstep.inprocess.interrupt import Interrupter

        self.rank, self.port, self.peer, self.where, self.how = rank, port, peer, where, how
        self.interrupter, self.cleaning = Interrupter(), Cleaning()
        self.stopped_s = time.monotonic()  # until told: NCCL's init_process_group waits for nobody, and returns before
        self.told: dict = {"case": where, "how": how, "rank": rank}

    def fail(self, at: At) -> None:
        """Run a generation until rank 0 raises; leave it; clean."""
        over = threading.Event()
        self.cleaning.begin()
        waiter = threading.Thread(target=self.wait_for_fault, args=(at, over), name="everstep-waiter")
        if self.rank == 1:
            waiter.start()
        error = None
        try:
            with self.cleaning.meeting.entered(at):
                self.interrupter.call(at.generation, lambda: stand(self.where, self.cleaning.meeting, self.ready))
        except BaseException as raised:
            error = raised
        self.told["came"] = type(error).__name__
        if self.rank == 0:
            self.stopped_s = time.monotonic()
            self.peer.say(b"!")
            self.cleaning.abort()
        self.told["left_s"] = time.monotonic() - self.stopped_s
        over.set()
        if self.rank == 1:
            waiter.join()
        if self.how == "waited":
            self.told["late"] = self.cleaning.communication.unfinished(5.0)
        began = time.monotonic()
        dirt = self.cleaning.clean(error)
        self.told["clean_s"], self.told["dirt"] = time.monotonic() - began, dirt
        self.told["behind"] = len(self.cleaning.communication.unfinished(0.0))

    def ready(self) -> None:
        """The last thing before rank 1 stands still; rank 0 gives it time to, and raises."""
        if self.rank == 0:
            time.sleep(STANDS_S)
            raise RuntimeError("the fault")

    def wait_for_fault(self, at: At, over: threading.Event) -> None:
        """Rank 1's waiter and ticker."""
        from everstep.inprocess.core.pursuit import Verdict

        self.peer.hear(60)
        self.stopped_s = time.monotonic()
        if self.how == "interrupt first":
            self.interrupter.interrupt(at.generation)
        self.cleaning.abort()
        self.interrupter.interrupt(at.generation)
        while not over.wait(0.1):
            verdict = self.interrupter.pursue(time.monotonic())
            if verdict is Verdict.SEVER:
                self.cleaning.abort()
            elif verdict is Verdict.REPLACE:
                self.peer.say(b"r")
                self.say(replaced_after_s=time.monotonic() - self.stopped_s)
                os._exit(9)

    def meet(self, at: At) -> None:
        """Meet again and reduce."""
        import torch
        import torch.distributed as dist

        def reduce():
            began = time.monotonic()
            self.cleaning.meeting.init_process_group("gloo" if CPU else "nccl")
            one = torch.ones(1, device=device())
            dist.all_reduce(one)
            settle()
            self.told["meet_s"], self.told["sum"] = time.monotonic() - began, one.item()
            self.told["back_s"] = time.monotonic() - self.stopped_s

        with self.cleaning.meeting.entered(at):
            self.interrupter.call(at.generation, reduce)
        self.told["behind_then"] = len(self.cleaning.communication.unfinished(0.0))
        self.cleaning.abort()
        self.cleaning.clean(None)

    def say(self, **more) -> None:
        """Print one line."""
        tell(**{**self.told, **more})


def run(rank: int, port: int, peer: Peer, where: str, how: str, generations: int) -> None:
    """One rank of one case."""
    import torch

    if ONE:
        os.environ.update(SOCKETS | {"NCCL_HOSTID": f"host-{rank}"})
    if not CPU:
        torch.cuda.set_device(0 if ONE else rank)
        torch.ones(1, device="cuda")
    worker = Worker(rank, port, peer, where, how)
    for turn in range(generations // 2 if generations > 1 else 1):
        worker.fail(At(2 * turn, rank, port))
        worker.peer.say(b"l")
        if worker.peer.hear(CASE_S) != b"l":
            worker.say(peer="replaced")
            return
        worker.told["generation"] = 2 * turn + 1
        worker.meet(At(2 * turn + 1, rank, port))
        worker.say()
        worker.peer.say(b"m")
        worker.peer.hear(CASE_S)
    began = time.monotonic()
    late = worker.cleaning.communication.unfinished(5.0)
    tell(case=where, rank=rank, end_s=time.monotonic() - began, late=late)


def fork(work) -> int:
    """Run `work` in a child."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:
        tell(error=f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def pair(port: int, where: str, how: str, generations: int, limit_s: float) -> None:
    """Run one case; kill what is late."""
    to_one, to_zero = os.pipe(), os.pipe()
    peers = [Peer(to_zero[0], to_one[1]), Peer(to_one[0], to_zero[1])]
    pids = [fork(lambda r=r: run(r, port, peers[r], where, how, generations)) for r in range(2)]
    for fd in (*to_one, *to_zero):
        os.close(fd)
    until, statuses = time.monotonic() + limit_s, {}
    while len(statuses) < len(pids):
        for pid in [p for p in pids if p not in statuses]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    tell(case=where, how=how, exits=[statuses[p] for p in pids])


def host(pipe: int) -> None:
    """A store in a process of its own: a parent that forks has no threads of C++."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    os.write(pipe, f"{store.port}\n".encode())
    signal.pause()


def main() -> None:
    """All cases, one after another, each on a store of its own."""
    os.environ.update(OURS)
    import torch
    import torch.distributed

    from everstep.inprocess import cleaning, interrupt  # noqa: F401 - imported once, before the forks

    tell(torch=torch.__version__, cuda=torch.version.cuda)
    until = time.monotonic() + ALL_S
    for where, how, generations in ORDERS if "--order" in sys.argv else CASES:
        if time.monotonic() + 5 > until:
            tell(case=where, how=how, skipped="no time is left")
            continue
        ours, theirs = os.pipe()
        store = fork(lambda theirs=theirs: host(theirs))
        port = int(os.read(ours, 16))
        os.close(ours)
        os.close(theirs)
        pair(port, where, how, generations, min(CASE_S, until - time.monotonic()))
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)


if __name__ == "__main__":
    main()
