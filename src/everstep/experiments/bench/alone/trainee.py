"""A script that knows nothing of its launcher, but for the rank monitor that it may be told to speak to.

    trainee.py --tape FOLDER [--fault sigkill] [--faults 3] [--speak-to MODULE] …

Every process appends what it comes to, with the machine's monotonic time, to a file of its own; which attempt it is in
it reads from the faults there. Needs torch, and MODULE where one is named. With `--idle S` it trains nothing.
"""

import time

BEGAN_S = time.monotonic()

import argparse  # noqa: E402 - the first line is the first moment
import datetime  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
from typing import Any  # noqa: E402

LAST_STEPS = 3


def main() -> None:
    """Train through the faults that were asked for."""
    args = parser().parse_args()
    generation = sum(name.startswith("fault-") for name in os.listdir(args.tape))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    file = os.open(os.path.join(args.tape, f"tape-{os.getpid()}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def mark(what: str, at: float) -> None:
        line = {"t": at, "is": what, "pid": os.getpid(), "gen": generation, "rank": rank, "world": world}
        os.write(file, json.dumps(line).encode() + b"\n")

    mark("enter", BEGAN_S)
    if args.idle:
        mark("step", time.monotonic())
        time.sleep(args.idle)
        return
    train(args, generation, rank, world, mark)
    mark("done", time.monotonic())


def train(args: argparse.Namespace, generation: int, rank: int, world: int, mark: Any) -> None:
    """Do the steps of one attempt: the last may be the fault."""
    import torch  # noqa: PLC0415 - part of the script's own set-up, where nobody has loaded it before
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    monitor = importlib.import_module(args.speak_to).RankMonitorClient() if args.speak_to else None
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    if monitor is not None:
        monitor.init_workload_monitoring()
    mark("group", time.monotonic())
    x = torch.ones(1 << 16)
    due = generation < args.faults
    for number in range(args.steps if due else LAST_STEPS):
        if due and number == args.steps - 1 and rank == min(1, world - 1):
            with open(os.path.join(args.tape, f"fault-{generation}"), "w"):
                mark("fault", time.monotonic())
            fail(args.fault, generation)
        dist.all_reduce(x)
        x /= world
        if monitor is not None:
            monitor.send_heartbeat()
        if number == 0:
            mark("step", time.monotonic())
    dist.barrier()  # where one rank is at fault, the others wait in native code
    if monitor is not None:
        monitor.shutdown_workload_monitoring()
    dist.destroy_process_group()


def fail(how: str, number: int) -> None:
    """Fail as it was asked for."""
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    while how == "hang":
        time.sleep(3600)
    raise RuntimeError(f"simulated by the benchmark, number {number}")  # of one that repeats, restarts are put off


def parser() -> argparse.ArgumentParser:
    """Return the parser; the benchmark writes these flags."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--tape", required=True)
    flags.add_argument("--fault", default="exception", choices=["exception", "hang", "sigkill"])
    flags.add_argument("--faults", type=int, default=3)
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--speak-to", default="")
    flags.add_argument("--idle", type=float, default=0.0)
    return flags


if __name__ == "__main__":
    main()
