"""What resilience costs a step: one loop under torchrun (plain) and under `everstep run` (native), turn about.

usage: python scripts/measure_step.py [--state llama|linear] [--rounds 5] [--steps 200]

Two ranks, one thread each. Both sides run the same steps on the same batches; the native side takes a snapshot after
every step and keeps its ledger. Rank 0's medians are told, the first steps left out:

    step      wall time from one end of a step to the next
    between   processor time of the training thread from the end of a step's body to the begin of the next one
    process   processor time of the whole process in a step, threads of the communication library included
    take      of `between`, the snapshot; `copy` is what copying the same tensors costs alone (processor time)

Processor time of the thread is the figure to trust: on a machine with two shared cores wall time moves by far more
than what is measured. The budget is 2 % of the plain step, and the bare copy: bytes ÷ 4 GB/s.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
WARM_UP = 20
BUDGET_SHARE = 0.02
BUDGET_RATE = 4e9


def llama(steps: int):
    """The tiny Llama of the example: FSDP2, AdamW, a scheduler, a stateful loader."""
    spec = importlib.util.spec_from_file_location("train_llama", HERE.parents[1] / "examples" / "train_llama.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    argv, sys.argv = sys.argv, ["train_llama.py", "--steps", str(steps)]
    args = example.arguments()
    sys.argv = argv
    parts = example.build(args)
    return *parts, lambda step, batch: example.train_step(args, step, batch, *parts[:3])


def linear(steps: int):
    """Sixteen square layers under FSDP2 and AdamW: little to compute, and state."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(16)])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loader = StatefulDataLoader(torch.randn(64 * steps, 256), 32)

    def step_fn(step: int, batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, scheduler, loader, step_fn


def loop(pairs, step_fn, log) -> dict:
    """Run the steps; return one row a step: wall, between, process."""
    wall, between, process = [], [], []
    ended, ended_cpu, ended_process = time.perf_counter(), time.thread_time(), time.process_time()
    for step, batch in pairs:
        between.append(time.thread_time() - ended_cpu)
        log(loss=step_fn(step, batch))
        now, now_process = time.perf_counter(), time.process_time()
        wall.append(now - ended)
        process.append(now_process - ended_process)
        ended, ended_process, ended_cpu = now, now_process, time.thread_time()
    return {"wall": wall, "between": between, "process": process}


def worker(args: argparse.Namespace) -> None:
    import torch.distributed as dist

    if args.worker == "plain":
        dist.init_process_group("gloo")
        *state, loader, step_fn = {"llama": llama, "linear": linear}[args.state](args.steps)
        logged = []
        rows = loop(zip(range(1, args.steps + 1), endless(loader), strict=False), step_fn,
                    lambda loss: logged.append(loss.item()))  # fmt: skip
        rows |= bare_copy(dict(zip(("model", "optimizer", "scheduler"), state, strict=True)))
        save(args, dist.get_rank(), rows)
        dist.destroy_process_group()
        return

    import everstep
    from everstep.checkpoint.snapshot import Snapshotter

    taken, plain_take = [], Snapshotter.take

    def take(self, step, hold=False):
        begun = time.thread_time()
        done = plain_take(self, step, hold)
        taken.append((time.thread_time() - begun, done.bytes))
        return done

    Snapshotter.take = take
    profile = __import__("cProfile").Profile(time.thread_time) if args.profile else None

    @everstep.resilient
    def train(run: everstep.Run) -> None:
        model, optimizer, scheduler, loader, step_fn = {"llama": llama, "linear": linear}[args.state](args.steps)
        pairs = run.steps(args.steps, loader, model=model, optimizer=optimizer, scheduler=scheduler)
        if profile is not None and run.rank == 0:
            pairs = profiled(pairs, profile)
        rows = loop(pairs, step_fn, run.log)
        save(args, run.rank, rows | {"take": [t for t, _ in taken], "bytes": taken[-1][1]})

    train()
    if profile is not None and os.environ["RANK"] == "0":
        profile.dump_stats(args.profile)


def profiled(pairs, profile):
    """Profile what happens between the steps, after the warm-up, and nothing else."""
    for n in itertools.count():
        if n > WARM_UP:
            profile.enable()
        try:
            pair = next(pairs)
        except StopIteration:
            return
        finally:
            profile.disable()
        yield pair


def endless(loader):
    while True:
        yield from loader


def bare_copy(state: dict) -> dict:
    """Processor time of copying the very tensors that a snapshot holds, and nothing else."""
    import torch

    from everstep.checkpoint.walk import StateWalk

    sources = [source for part in StateWalk(state).collect()[1] for source in part.sources]
    targets = [[torch.empty_like(source) for source in sources] for _ in range(3)]
    seconds = []
    for n in range(40):
        begun = time.thread_time()
        torch._foreach_copy_(targets[n % 3], sources)
        seconds.append(time.thread_time() - begun)
    return {"copy": seconds[10:], "leaves": len(sources)}


def save(args: argparse.Namespace, rank: int, rows: dict) -> None:
    if rank == 0:
        Path(args.out).write_text(json.dumps(rows))


def run_once(side: str, args: argparse.Namespace, folder: Path, n: int) -> dict:
    out = folder / f"{side}-{n}.json"
    ours = [str(HERE), "--worker", side, "--state", args.state, "--steps", str(args.steps), "--out", str(out)]
    if side == "plain":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *ours]
    else:
        ours += ["--profile", args.profile] if args.profile else []
        run_dir = str(folder / f"run-{n}")
        command = [sys.executable, "-m", "everstep.cli", "run", "--nproc-per-node", "2", "--run-dir", run_dir, *ours]
    paths = [str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode or not out.exists():
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    rows = json.loads(out.read_text())
    told = {name: statistics.median(values[WARM_UP:] if name != "copy" else values) * 1e3
            for name, values in rows.items() if isinstance(values, list)}  # fmt: skip
    return told | {name: value for name, value in rows.items() if not isinstance(value, list)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=["llama", "linear"], default="llama")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", help="write a profile of the native side's time between steps to FILE")
    parser.add_argument("--worker", choices=["plain", "native"], help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    sides: dict[str, list[dict]] = {"plain": [], "native": []}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(args.rounds):
            for side in ("plain", "native") if n % 2 == 0 else ("native", "plain"):
                told = run_once(side, args, Path(folder), n)
                sides[side].append(told)
                shown = [name for name in ("wall", "between", "process", "take", "copy") if name in told]
                print(f"round {n + 1} {side:6}", *[f"{name} {told[name]:7.3f}" for name in shown], flush=True)
    report(args, sides)


def report(args: argparse.Namespace, sides: dict[str, list[dict]]) -> None:
    def of(side: str, name: str) -> float:
        return statistics.median(told[name] for told in sides[side])

    size, leaves = sides["native"][0]["bytes"], sides["plain"][0]["leaves"]
    wall, budget_copy = of("plain", "wall"), size / BUDGET_RATE * 1e3
    budget = BUDGET_SHARE * wall + budget_copy
    extra, extra_wall = of("native", "between") - of("plain", "between"), of("native", "wall") - wall
    paired = statistics.median(n["wall"] - p["wall"] for n, p in zip(sides["native"], sides["plain"], strict=True))
    process = of("native", "process") - of("plain", "process")
    take, copy = of("native", "take"), of("plain", "copy")
    print(f"\n{args.state}: {leaves} tensors, {size / 2**20:.2f} MiB; plain step {wall:.2f} ms wall; "
          f"medians of {args.rounds} runs of {args.steps} steps")  # fmt: skip
    print(
        f"  between steps, thread     +{extra:.3f} ms: take {take:.3f} (bare copy {copy:.3f}), rest {extra - take:.3f}"
    )
    print(f"  whole process             {process:+.3f} ms")
    print(f"  step, wall                {extra_wall:+.3f} ms of medians, {paired:+.3f} ms of pairs")
    print(f"  budget                    {budget:.3f} ms = 2 % of the step + {budget_copy:.3f} ms of copy: "
          f"{'kept' if extra <= budget else 'EXCEEDED'} by processor time")  # fmt: skip


if __name__ == "__main__":
    main()
