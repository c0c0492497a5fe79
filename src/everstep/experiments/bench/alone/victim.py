"""The training function of `everstep bench inprocess`, wrapped by any module with NVRx's in-process interface.

    victim.py --impl MODULE --tape FOLDER [--fault exception] [--faults 5] …

`--impl everstep` is the native surface instead (`@everstep.resilient` and `run.steps`). Every process appends what it
comes to, with the machine's monotonic time, to a file of its own; the figures are made from these files alone, so the
implementation that is measured has no say in them. Needs torch and MODULE, and nothing else.
"""

import argparse
import ctypes
import datetime
import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn, Optional

HOST = "127.0.0.1"
LAST_STEPS = 3


def main() -> None:
    """Train through the faults that were asked for."""
    args = parser().parse_args()
    for name, value in (("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"), ("NCCL_NVLS_ENABLE", "0")):
        os.environ.setdefault(name, value)
    tape = Tape(args.tape)
    try:
        result = native(args, tape)() if args.impl == "everstep" else compatible(args, tape)()
    except BaseException as error:
        tape.mark("failed", text=f"{type(error).__name__}: {error}"[:300])
        raise
    tape.mark("done", text=str(result))


def parser() -> argparse.ArgumentParser:
    """Return the parser; `everstep bench` writes these flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--impl", required=True)
    flags.add_argument("--tape", required=True)
    flags.add_argument("--ranks", type=int, default=1, help="with how many the job began")
    flags.add_argument("--fault", default="exception", choices=FAULTS)
    flags.add_argument("--faults", type=int, default=5)
    flags.add_argument("--injured", type=int, default=1)
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--backend", default="gloo")
    flags.add_argument("--tuned", action="store_true")
    flags.add_argument("--soft", type=float)
    flags.add_argument("--meet", default="own", choices=["own", "plain"])
    flags.add_argument("--ports", type=lambda text: [int(word) for word in text.split(",")], default=[0, 0])
    return flags


class Tape:
    """What this process comes to, one JSON line each; a line is whole before the next thing happens."""

    def __init__(self, folder: str) -> None:
        self._fd = os.open(
            os.path.join(folder, f"tape-{os.getpid()}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )
        self._place: dict[str, int] = {}

    def mark(self, what: str, generation: int | None = None, text: str = "") -> None:
        """Write one line. The world and the rank are those of the environment when a generation is entered."""
        now = time.monotonic()
        if generation is not None and self._place.get("gen") != generation:
            world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
            self._place = {"gen": generation, "rank": rank, "world": world}
        line = {"t": now, "is": what, "pid": os.getpid(), **self._place} | ({"text": text} if text else {})
        os.write(self._fd, json.dumps(line).encode() + b"\n")


def steps(args: argparse.Namespace, tape: Tape, generation: int, count: Callable[[int], Any]) -> None:
    """Train in one generation, its groups made: the first step is marked, the last of `count` may be the fault."""
    import torch  # noqa: PLC0415 - the module under test decides when torch is first imported
    import torch.distributed as dist  # noqa: PLC0415 - likewise

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    x = torch.ones(1 << 16, device="cuda" if args.backend == "nccl" else "cpu")
    due = generation < args.faults and (world > 1 or args.ranks == 1)  # the last of several is left alone
    for number, _ in enumerate(count(args.steps if due else LAST_STEPS)):
        if due and number == args.steps - 1 and rank == min(args.injured, world - 1):
            tape.mark("fault", generation)
            FAULTS[args.fault]()
        dist.all_reduce(x)
        x /= world
        if args.backend == "nccl":
            torch.cuda.synchronize()
        if number == 0:
            tape.mark("step", generation)


def raise_error() -> NoReturn:
    """Fail as user code fails."""
    raise RuntimeError("simulated by everstep bench")


def sleep_on() -> None:
    """Hang where the interpreter waits."""
    while True:
        time.sleep(3600)


def wait_in_c(*, gil: bool) -> None:
    """Hang in a call of C, with the interpreter lock or without."""
    library = ctypes.PyDLL(None) if gil else ctypes.CDLL(None)
    library.pause()


FAULTS: dict[str, Callable[[], None]] = {
    "exception": raise_error,
    "hang": sleep_on,
    "hang_c": lambda: wait_in_c(gil=False),
    "gil": lambda: wait_in_c(gil=True),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def native(args: argparse.Namespace, tape: Tape) -> Callable[[], Any]:
    """Return the training function on Everstep's own surface."""
    everstep = importlib.import_module("everstep")
    total = args.faults * (args.steps - 1) + LAST_STEPS

    @everstep.resilient(backend=args.backend)  # type: ignore[untyped-decorator, unused-ignore]
    def train(run: Any) -> str:
        torch = _torch()
        tape.mark("enter", run.generation)
        tape.mark("group", run.generation)  # the wrapper has made it
        model = torch.nn.Linear(16, 16)
        steps(args, tape, run.generation, lambda _: run.steps(total, model=model))
        return "ok"

    return train  # type: ignore[no-any-return, unused-ignore]


def compatible(args: argparse.Namespace, tape: Tape) -> Callable[[], Any]:
    """Return the training function as a user of NVRx's `inprocess` writes it."""
    torch = _torch()
    dist = torch.distributed
    inprocess = importlib.import_module(args.impl)
    base = None
    if args.meet == "own":  # groups of each attempt on one living store, as NVRx's published examples do
        rank = int(os.environ["RANK"])
        limit = datetime.timedelta(seconds=300)
        base = dist.TCPStore(HOST, args.ports[1], None, rank == 0, wait_for_workers=False, timeout=limit)

    def train(call_wrapper: Any = None) -> str:
        generation = call_wrapper.iteration
        tape.mark("enter", generation)
        if args.backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if base is None:
            dist.init_process_group(args.backend)
        else:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = dist.PrefixStore(f"attempt{generation}", base)
            dist.init_process_group(args.backend, store=store, rank=rank, world_size=world)
        tape.mark("group", generation)
        steps(args, tape, generation, range)
        dist.barrier()  # where one rank is at fault, the others wait in native code
        dist.destroy_process_group()
        return "ok"

    train.__annotations__["call_wrapper"] = Optional[inprocess.CallWrapper]  # noqa: UP045 - the form that NVRx looks for
    return wrapper(args, inprocess)(train)  # type: ignore[no-any-return]


def wrapper(args: argparse.Namespace, inprocess: Any) -> Any:
    """Return the module's Wrapper, at its defaults but for what must be given."""
    ranks = inprocess.rank_assignment
    return inprocess.Wrapper(
        store_kwargs={"host_name": HOST, "port": args.ports[0]},
        health_check=inprocess.health_check.FaultCounter(max_rank_faults=args.faults + 1),
        initialize=inprocess.initialize.RetryController(max_iterations=args.faults + 2, min_active_world_size=1),
        rank_assignment=inprocess.Compose(ranks.ActivateAllRanks(), ranks.ShiftRanks()),
        **times(args),
    )


def times(args: argparse.Namespace) -> dict[str, datetime.timedelta]:
    """Return the intervals and limits that differ from the defaults: none, unless they were asked for."""
    given: dict[str, float] = {}
    if args.tuned:
        names = ("monitor_thread_interval", "monitor_process_interval", "progress_watchdog_interval")
        given |= dict.fromkeys((*names, "heartbeat_interval", "last_call_wait"), 0.01)
    if args.soft is not None:
        soft: float = args.soft
        given |= {"soft_timeout": soft, "heartbeat_timeout": soft + 5, "hard_timeout": soft + 10}
        given |= dict.fromkeys(("barrier_timeout", "completion_timeout"), soft + 40)
    return {name: datetime.timedelta(seconds=value) for name, value in given.items()}


def _torch() -> Any:
    torch = importlib.import_module("torch")
    importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    return torch


if __name__ == "__main__":
    main()
