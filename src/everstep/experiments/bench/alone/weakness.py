"""One weakness of NVRx each, run by any module with NVRx's in-process interface: `everstep bench weaknesses`.

    weakness.py --impl MODULE --case W2 --tape FOLDER --ports OWN,WRAPPER [--meet file]

What a case is about is told in `everstep.experiments.core.weaknesses`. The marks are those of `victim.py`, beside which
this file lies; `seen` holds a number that a case has counted itself.
"""

import argparse
import contextlib
import ctypes
import datetime
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Optional

victim: Any = importlib.import_module("victim")
ALWAYS = 1 << 30
LONG = 3600.0
SHARED = "EVERSTEP_BENCH_RUN"
"""The variable that all processes of a run carry."""


def seconds(number: float) -> datetime.timedelta:
    """Write a time as the interface has it."""
    return datetime.timedelta(seconds=number)


class Job:
    """One rank of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tape = victim.Tape(args.tape)
        self.module: Any = importlib.import_module(args.impl)
        self.torch: Any = importlib.import_module("torch")
        self.dist: Any = importlib.import_module("torch.distributed")
        self.torch.set_num_threads(1)
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._ports = args.ports
        self._base = self._store(args)

    def _store(self, args: argparse.Namespace) -> Any:
        """The script's own store, as NVRx's users need one; a file where rank 0 may die."""
        if args.meet == "file":
            return self.dist.FileStore(os.path.join(args.tape, "store"), self.ranks)
        limit = seconds(300)
        return self.dist.TCPStore(
            victim.HOST, self._ports[1], None, self.rank == 0, wait_for_workers=False, timeout=limit
        )

    def call(self, train: Callable[[Any], Any], **settings: Any) -> Any:
        """Call `train` wrapped, at the defaults of the module but for `settings`."""

        def function(call: Any = None) -> Any:
            self.tape.mark("enter", call.iteration)
            return train(call)

        function.__annotations__["call"] = Optional[self.module.CallWrapper]  # noqa: UP045 - the form that NVRx looks for
        kwargs = {"host_name": victim.HOST, "port": self._ports[0]}
        return self.module.Wrapper(store_kwargs=kwargs, **settings)(function)()

    def steps(
        self, call: Any, harm: Callable[[], Any] | None = None, who: int = 1, until: int = 1, steps: int = 5
    ) -> str:
        """Train some steps; in iterations below `until`, rank `who` comes to harm at the last."""
        number = call.iteration
        self.meet(number)
        x = self.torch.ones(1 << 12)
        for step in range(steps):
            if harm is not None and number < until and step == steps - 1 and self.place()[0] == who:
                self.tape.mark("fault", number)
                harm()
            self.dist.all_reduce(x)
            if step == 0:
                self.tape.mark("step", number)
        self.dist.barrier()
        self.dist.destroy_process_group()
        return "ok"

    def meet(self, number: int) -> None:
        """Make the group of an iteration."""
        rank, world = self.place()
        store = self.dist.PrefixStore(f"attempt{number}", self._base)
        self.dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def place(self) -> tuple[int, int]:
        """Return rank and size of the present world."""
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def seen(self, number: float) -> None:
        """Note what a case has counted."""
        self.tape.mark("seen", text=f"{number:.6g}")

    def watcher(self, call: Any) -> int:
        """Return the process that watches this one: the agent of the node where none watches it alone."""
        monitor = getattr(call, "monitor_process", None)
        if monitor is not None:
            return int(monitor.process_monitor_proc.pid)
        psutil: Any = importlib.import_module("psutil")
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or [""]
            if words[-1] == str(os.getpid()) and "peers.watcher" in " ".join(words):
                return int(process.pid)
        parent = psutil.Process().parent()
        if "everstep run" not in " ".join(parent.cmdline()):
            raise LookupError("nobody watches this process")
        return int(parent.pid)

    def callback(self, kind: str, does: Callable[[Any], Any]) -> Any:
        """Return an instance of a callback class, `initialize.Initialize` say, which does that."""
        module, name = kind.split(".")

        def run(_: Any, state: Any) -> Any:
            does(state)
            return state

        return type(name, (getattr(getattr(self.module, module), name),), {"__call__": run})()


# -- harm --------------------------------------------------------------------------------------------------------------


def raise_error() -> NoReturn:
    """Fail as user code fails."""
    raise RuntimeError("the loss is not a number")


def load_shard() -> None:
    """Hang where a person would like to know."""
    time.sleep(LONG)


def wait_holding_the_lock() -> None:
    """Hang in C with the interpreter lock, in a call that no signal ends, with a handler of SIGTERM that cannot run."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def send(number: int, pid: int | None = None) -> Callable[[], None]:
    """Return what sends a signal, to this process unless another is named."""
    return lambda: os.kill(os.getpid() if pid is None else pid, number)


# -- cases -------------------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[Job], Any]] = {}


def case(name: str) -> Callable[[Callable[[Job], Any]], Callable[[Job], Any]]:
    """Register a case."""

    def register(function: Callable[[Job], Any]) -> Callable[[Job], Any]:
        CASES[name] = function
        return function

    return register


def simple(
    name: str, harm: Callable[[], Any], *, who: int = 1, until: int = 1, steps: int = 5, **settings: Any
) -> None:
    """Register a case that is one harm, at the defaults but for `settings`."""
    CASES[name] = lambda job: job.call(lambda call: job.steps(call, harm, who, until, steps), **settings)


simple("exception", raise_error, until=5)
simple("W2", raise_error)
simple("W3", load_shard, steps=50)  # a limit that is learned from a run needs one
simple("W4", wait_holding_the_lock, steps=50)
simple("W4 stopped", send(signal.SIGSTOP), steps=50)
simple("W5", send(signal.SIGKILL))
simple("W11", send(signal.SIGKILL), who=0)
simple("W21", raise_error, until=ALWAYS)
simple("W1", load_shard, soft_timeout=seconds(5), hard_timeout=seconds(10), heartbeat_timeout=seconds(8),
       progress_watchdog_interval=seconds(0.3))  # fmt: skip
simple("W19", load_shard, soft_timeout=seconds(3), hard_timeout=seconds(8))


@case("W6")
def watcher_dies(job: Job) -> Any:
    """The watcher of rank 1 is killed, and then rank 1 raises."""

    def train(call: Any) -> str:
        def harm() -> None:
            send(signal.SIGKILL, job.watcher(call))()
            time.sleep(1.0)
            raise_error()

        return job.steps(call, harm)

    return job.call(train)


@case("W8")
def node_dies(job: Job) -> Any:
    """Rank 2 and its watcher are killed together, as when their machine goes."""

    def train(call: Any) -> str:
        def harm() -> None:
            send(signal.SIGKILL, job.watcher(call))()
            send(signal.SIGKILL)()

        return job.steps(call, harm, who=2)

    return job.call(train)


@case("W9")
def group_is_left_out(job: Job) -> Any:
    """Ranks belong to nodes of two, and a node that is not whole is left out."""
    ranks = job.module.rank_assignment

    def node(state: Any) -> str:
        return f"node{state.rank // 2}"

    whole = ranks.FilterCountGroupedByKey(node, (2).__eq__)
    assignment = job.module.Compose(ranks.ActivateAllRanks(), ranks.ShiftRanks(), whole)
    return job.call(lambda call: job.steps(call, send(signal.SIGKILL), who=3), rank_assignment=assignment)


@case("W13")
def atomic_waits(job: Job) -> Any:
    """Rank 0's abort takes two seconds, and its function wants to enter an atomic section: CPU a second of waiting."""
    slow = job.callback("abort.Abort", lambda _: time.sleep(2.0))

    def train(call: Any) -> str:
        if call.iteration or job.place()[0]:
            return job.steps(call, raise_error)
        job.meet(0)
        for _ in range(4):
            job.dist.all_reduce(job.torch.ones(1 << 12))
        job.tape.mark("step", 0)
        while True:
            time.sleep(0.001)
            began, used = time.monotonic(), time.thread_time()
            try:
                with call.atomic():
                    pass
            finally:
                took = time.monotonic() - began
                if took > 0.5:  # noqa: PLR2004 - an abort was waited for
                    job.seen((time.thread_time() - used) / took)

    abort = job.module.Compose(job.module.abort.AbortTorchDistributed(), slow)
    return job.call(train, abort=abort)


@case("W14 swallowed")
def swallows_once(job: Job) -> Any:
    """Rank 0 is in a loop that swallows the first BaseException it meets, as retry loops do."""

    def train(call: Any) -> str:
        if call.iteration or job.place()[0]:
            return job.steps(call, raise_error)
        job.meet(0)
        for _ in range(4):
            job.dist.all_reduce(job.torch.ones(1 << 12))
        job.tape.mark("step", 0)
        swallowed = 0
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                swallowed += 1
                if swallowed > 1:
                    raise

    return job.call(train)


@case("W14 autocast")
def leaves_autocast_on(job: Job) -> Any:
    """Rank 0 enters and leaves autocast without end while rank 1 raises, 15 times: how often is it on afterwards?"""
    torch = job.torch

    def train(call: Any) -> str:
        on = torch.is_autocast_enabled("cpu")
        job.seen(int(on))
        torch.set_autocast_enabled("cpu", False)
        if call.iteration >= 15 or job.place()[0]:  # noqa: PLR2004
            return job.steps(call, raise_error, until=15)
        job.meet(call.iteration)
        for _ in range(4):
            job.dist.all_reduce(torch.ones(1 << 12))
        job.tape.mark("step", call.iteration)
        while True:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pass

    tries = job.module.initialize.RetryController(max_iterations=20)
    return job.call(train, initialize=tries)


@case("W15")
def in_another_thread(job: Job) -> Any:
    """The wrapped function is called on a thread of the script's own, while the main thread waits for it."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(job.call(lambda call: job.steps(call, raise_error)))
        except BaseException as error:  # noqa: BLE001 - raised again on the main thread
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


@case("W16")
def what_it_costs(job: Job) -> Any:
    """Megabytes (PSS) of all processes of the job that are not ranks, by rank."""
    psutil: Any = importlib.import_module("psutil")
    token = os.environ[SHARED]

    def beside(ranks: list[int]) -> float:
        total = 0
        for process in psutil.process_iter():
            try:
                if process.pid not in ranks and process.environ().get(SHARED) == token:
                    total += process.memory_full_info().pss
            except (psutil.Error, OSError):
                continue
        return total / 1e6

    def train(call: Any) -> str:
        job.meet(call.iteration)
        job.dist.all_reduce(job.torch.ones(1))
        job.tape.mark("step", call.iteration)
        time.sleep(5.0)
        ranks: list[Any] = [None] * job.ranks
        job.dist.all_gather_object(ranks, os.getpid())
        if job.rank == 0:
            job.seen(beside(ranks) / job.ranks)
        job.dist.barrier()
        return "ok"

    return job.call(train)


class Counting:
    """As much of a store as a barrier needs, which counts the bytes that it hands out."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.read = 0

    def set(self, key: str, value: Any) -> None:
        """As torch's store."""
        self.values[key] = value if isinstance(value, bytes) else str(value).encode()

    def append(self, key: str, value: str) -> None:
        """As torch's store."""
        self.values[key] = self.values.get(key, b"") + value.encode()

    def add(self, key: str, amount: int) -> int:
        """As torch's store."""
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.get(key))

    def get(self, key: str) -> bytes:
        """As torch's store."""
        self.read += len(self.values[key])
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As torch's store."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """As torch's store."""
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], *limit: Any) -> None:
        """Wait for nothing: ranks arrive one after another."""


@case("W17")
def what_an_arrival_reads(job: Job) -> Any:
    """How many times more an arrival at a barrier reads among 256 ranks than among 16."""
    kind: Any = type("Store", (Counting, job.module.store.StoreMixin), {})

    def arrival(ranks: int) -> float:
        store, now = kind(), datetime.timedelta(0)
        for rank in range(ranks):
            with contextlib.suppress(job.module.store.BarrierTimeout):  # it does not wait for those to come
                store.reentrant_barrier(ranks=[rank], group_name="a", rendezvous_count=ranks, timeout=now)
        return float(store.read / ranks)

    job.seen(arrival(256) / arrival(16))
    return "ok"


@case("W18 hangs")
def abort_hangs(job: Job) -> Any:
    """Rank 0's abort never comes back."""
    stuck = job.callback("abort.Abort", lambda _: time.sleep(LONG) if job.place()[0] == 0 else None)
    abort = job.module.Compose(stuck, job.module.abort.AbortTorchDistributed())
    return job.call(lambda call: job.steps(call, raise_error), abort=abort)


@case("W18 raises")
def abort_raises(job: Job) -> Any:
    """Rank 0's abort fails. Who is told?"""

    def fail(_: Any) -> None:
        raise OSError("the switch does not answer")

    abort = job.module.Compose(job.callback("abort.Abort", fail), job.module.abort.AbortTorchDistributed())
    return job.call(lambda call: job.steps(call, raise_error), abort=abort)


@case("W20 copy")
def cannot_be_copied(job: Job) -> Any:
    """Rank 1 raises an exception that holds a lock; a callback is told of it."""

    class Held(RuntimeError):
        def __init__(self) -> None:
            super().__init__("the connection was lost")
            self.lock = threading.Lock()

    def harm() -> NoReturn:
        raise Held

    check = job.module.health_check.FaultCounter(max_rank_faults=3)
    return job.call(lambda call: job.steps(call, harm), health_check=check)


@case("W20 garbage")
def garbage_without_end(job: Job) -> Any:
    """Rank 1's function leaves cyclic garbage behind, whose finalizer leaves such garbage again."""

    class Phoenix:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            if threading.main_thread().is_alive():
                Phoenix()

    def harm() -> NoReturn:
        Phoenix()
        raise_error()

    return job.call(lambda call: job.steps(call, harm))


@case("W22")
def steps_done_again(job: Job) -> Any:
    """Rank 1 raises at the last of twenty steps. How many does rank 0 do again? No checkpoint is written by hand."""
    done: set[int] = set()

    def loop(number: int, steps: Any) -> str:
        x = job.torch.ones(1)
        for step in steps:
            if (number, step, job.rank) == (0, 19, 1):
                job.tape.mark("fault", number)
                raise_error()
            job.dist.all_reduce(x)
            job.tape.mark("step", number)
            if job.rank == 0:
                job.seen(int(step in done))
            done.add(step)
        return "ok"

    if hasattr(job.module, "resilient"):
        return native(job, loop)

    def train(call: Any) -> str:
        job.meet(call.iteration)
        return loop(call.iteration, range(20))

    return job.call(train)


def native(job: Job, loop: Callable[[int, Any], str]) -> Any:
    """Run a loop of twenty steps on our own surface, which keeps what it has reached."""

    @job.module.resilient(backend="gloo")  # type: ignore[untyped-decorator, unused-ignore]
    def train(run: Any) -> str:
        job.tape.mark("enter", run.generation)
        return loop(run.generation, (step - 1 for step in run.steps(20, model=job.torch.nn.Linear(2, 2))))

    return train()


def main() -> None:
    """Run one case, and write down how it ended."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--impl", required=True)
    flags.add_argument("--case", required=True, choices=CASES)
    flags.add_argument("--tape", required=True)
    flags.add_argument("--ports", type=lambda text: [int(word) for word in text.split(",")], required=True)
    flags.add_argument("--meet", default="own", choices=["own", "file"])
    args = flags.parse_args()
    job = Job(args)
    try:
        result = CASES[args.case](job)
    except BaseException as error:
        job.tape.mark("failed", text=f"{type(error).__name__}: {error}"[:300])
        raise
    job.tape.mark("done", text=json.dumps(result))


if __name__ == "__main__":
    main()
