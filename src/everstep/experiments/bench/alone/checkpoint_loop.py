"""The loop of `everstep bench checkpoint`: the same steps with and without checkpoints, one way of saving to a process.

    checkpoint_loop.py --mode torch.save --folder DIR --tape DIR --interval 10 --step 0.05 --state 64000000 …

In turn: steps without checkpoints, two saves on the idle disk, steps with saves, steps without. What happened when is
written to the tape as it was; the figures are made elsewhere (core/checkpoints.py). A state's tensors carry the number
of their step at both ends, so that what is read back says which step it is of. Needs torch and what the mode is of.

Of several ranks each is a process like this one. Each step ends with an all-reduce, as that of a training does: a rank
that is blocked blocks all. It carries rank 0's word on whether a stretch is over, so that all do the same steps. The
state is sharded evenly, as DTensors.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import statistics
import time
from typing import Any

TENSORS = 16
COPIES = 24
TARGETS = 4  # in turn: a copy into memory that the cache still holds is no save's copy
LOOK_S = 0.002
ELEMENT = 4  # bytes of float32


def main() -> None:
    """Measure one window and write it down."""
    args = parser().parse_args()
    import torch.distributed as dist  # noqa: PLC0415 - a daemon of DCP imports this file too

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        body = Loop(args, rank, dist.get_world_size()).measure()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        write(args.tape, rank, {"failed": said, "at": time.monotonic()})
        raise
    write(args.tape, rank, body)
    dist.destroy_process_group()


def write(folder: str, rank: int, body: dict[str, Any]) -> None:
    """Write a rank's tape whole or not at all."""
    path = os.path.join(folder, f"window-{rank}.json")
    with open(path + ".new", "w") as out:
        json.dump(body, out)
    os.replace(path + ".new", path)


def parser() -> argparse.ArgumentParser:
    """Return the parser; `everstep bench` writes these flags."""
    found = argparse.ArgumentParser(description=__doc__)
    for name in ("--mode", "--folder", "--tape"):
        found.add_argument(name, required=True)
    for name in ("--interval", "--state"):
        found.add_argument(name, type=int, required=True)
    for name in ("--step", "--with-s", "--bare-s"):
        found.add_argument(name, type=float, required=True)
    found.add_argument("--work", default="sleep", choices=["sleep", "matmul"])
    found.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return found


class State:
    """Parameters of so many bytes over all ranks, stamped with the number of their step at both ends, by an optimizer.

    `objects` is what a script hands to whoever takes modules and optimizers, `tensors` to whoever takes tensors,
    `parts` this rank's own parts of them, to whoever knows no shards.
    """

    def __init__(self, size: int, device: str, rank: int, ranks: int) -> None:
        import torch  # noqa: PLC0415 - as in `main`

        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        count = max(2, size // TENSORS // ELEMENT // ranks)
        self.parts: dict[str, Any] = {f"tensor{n}": torch.zeros(count, device=device) for n in range(TENSORS)}
        self.tensors = self.parts if ranks == 1 else sharded(self.parts, device, ranks)
        self._ends = [t[:: count - 1] for t in self.parts.values()]
        module = torch.nn.Module()
        for name, each in self.tensors.items():
            module.register_parameter(name, torch.nn.Parameter(each, requires_grad=False))
        self._optimizer = stamper(module.parameters(), self._ends)
        self.objects: dict[str, Any] = {"model": module, "optimizer": self._optimizer}

    def stamp(self, step: int) -> None:
        """Change the state, as a step does."""
        self._optimizer.number = step
        self._optimizer.step()

    def stamps(self) -> list[int]:
        """Return the steps that are found in it."""
        return sorted({int(value) for ends in self._ends for value in ends.tolist()})

    def targets(self) -> list[Any]:
        """Return tensors of the host to copy into."""
        import torch  # noqa: PLC0415 - as in `main`

        every = list(self.parts.values())
        return [torch.zeros(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in every]

    def copy_to(self, targets: list[Any]) -> None:
        """Copy bare to the host."""
        for target, source in zip(targets, self.parts.values()):  # noqa: B905 - as many by construction
            target.copy_(source)


def sharded(parts: dict[str, Any], device: str, ranks: int) -> dict[str, Any]:
    """Return each part as this rank's shard of a tensor, as FSDP2 has it."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - as in `main`
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415 - as in `main`

    mesh = init_device_mesh(device, (ranks,))
    return {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in parts.items()}


class Loop:
    """One process's loop."""

    def __init__(self, args: Any, rank: int, ranks: int) -> None:
        self.args, self.rank, self.ranks = args, rank, ranks
        self.state = State(args.state, args.device, rank, ranks)
        self._work = sleeper(args.step) if args.work == "sleep" else multiplier(args.step, args.device)
        self.before: list[Any] = []
        self.ends: list[Any] = []
        self.saves: list[Any] = []
        self.durable: list[Any] = []
        self._known: set[int] = set()

    def measure(self) -> dict[str, Any]:
        """Do all stretches; return what happened as plain values."""
        every = self.args.interval
        self.bare()  # nobody's figure: caches and clocks come up
        copy_s = self.copy_s()
        bare = [self.bare()]
        ways: Any = importlib.import_module("checkpoint_ways")  # beside this file, wherever that is
        way = ways.WAYS[self.args.mode](self.args.folder, every, self.rank, self.ranks)
        way.begin()
        with contextlib.closing(way):
            write_s = min(self.alone(way, every), self.alone(way, 2 * every))  # the first starts what it needs
            self.window(way, 3 * every)
            self.drain(way)
        claimed = max((step for step, _ in self.durable), default=None)
        bare.append(self.bare())
        holds = [] if claimed is None else self.read(way, claimed)
        return {
            "bare": bare, "before": self.before, "ends": self.ends, "saves": self.saves, "durable": self.durable,
            "write_s": write_s, "copy_s": copy_s, "holds": holds, "claimed": claimed,
        }  # fmt: skip

    def bare(self) -> tuple[int, float]:
        """Do steps without checkpoints; return how many and how long they took."""
        begun, steps, over = time.monotonic(), 0, False
        while not over:
            over = self.step(1, begun + self.args.bare_s)
            steps += 1
        return steps, time.monotonic() - begun

    def copy_s(self) -> float:
        """Return the seconds of a bare copy of the state where a save would be, after a step: the median of some."""
        targets, took = [self.state.targets() for _ in range(TARGETS)], list[float]()
        for number in range(COPIES + TARGETS):
            self.step(1)
            begun = time.monotonic()
            self.state.copy_to(targets[number % TARGETS])
            took.append(time.monotonic() - begun)
        return statistics.median(took[TARGETS:])

    def step(self, number: int, until: float = math.inf) -> bool:
        """Do one step; return whether rank 0 has come to `until`."""
        self._work()
        self.state.stamp(number)
        return self.agreed(time.monotonic() >= until)

    def agreed(self, word: bool) -> bool:
        """Return rank 0's word, to all ranks."""
        if self.ranks == 1:
            return word
        import torch  # noqa: PLC0415 - as in `main`
        import torch.distributed as dist  # noqa: PLC0415 - as in `main`

        told = torch.tensor(float(word and self.rank == 0))
        dist.all_reduce(told)
        return bool(told)

    def alone(self, way: Any, step: int) -> float:
        """Save once on the idle disk, wait until it is durable; return how long that took."""
        self.step(step)
        begun = time.monotonic()
        way.save(step, self.state)
        while step not in way.durable():
            time.sleep(LOOK_S)
        took = time.monotonic() - begun
        self._known.add(step)
        self.before.append((step, begun))
        self.durable.append((step, begun + took))
        return took

    def window(self, way: Any, first: int) -> None:
        """Step and save, from the return of one save to that of another."""
        self.step(first)
        self.save(way, first)
        begun, step = time.monotonic(), first
        while True:
            step += 1
            self.step(step)
            self.look(way)
            self.ends.append((step, time.monotonic()))
            if step % self.args.interval == 0:
                self.save(way, step)
                if self.agreed(time.monotonic() - begun >= self.args.with_s):
                    return
            else:
                way.pass_by(step, self.state)

    def save(self, way: Any, step: int) -> None:
        """Save, and note when."""
        begun = time.monotonic()
        way.save(step, self.state)
        self.saves.append((step, begun, time.monotonic()))
        if way.waits_for_all:
            self.look(way)

    def look(self, way: Any) -> None:
        """Note what has become durable."""
        for step in way.durable() - self._known:
            self._known.add(step)
            self.durable.append((step, time.monotonic()))

    def drain(self, way: Any) -> None:
        """Wait for what is under way, outside of every stretch."""
        way.wait()
        self.look(way)

    def read(self, way: Any, claimed: int) -> list[int]:
        """Return which steps the newest durable one holds parts of; nothing where it cannot be read."""
        self.state.stamp(-1)
        try:
            way.load(claimed, self.state)
        except Exception as error:  # noqa: BLE001 - whatever it is, it cannot be read
            print(f"step {claimed} cannot be read: {type(error).__name__}: {error}", flush=True)  # noqa: T201
            return []
        return self.state.stamps()


def stamper(parameters: Any, ends: list[Any]) -> Any:
    """Return an optimizer whose step writes a number into the ends of parameters."""
    import torch  # noqa: PLC0415 - as in `main`

    class Stamper(torch.optim.Optimizer):  # type: ignore[misc]
        """See `stamper`."""

        number = 0

        def step(self, closure: Any = None) -> Any:
            """Write it."""
            del closure
            for each in ends:
                each.fill_(self.number)

    return Stamper(parameters, {})


def sleeper(seconds: float) -> Any:
    """Return work that waits, as one waits for a device."""
    return lambda: time.sleep(seconds)


def multiplier(seconds: float, device: str) -> Any:
    """Return work that multiplies matrices for about that long and reads one number at its end, as one reads a loss."""
    import torch  # noqa: PLC0415 - as in `main`

    side, kind = (4096, torch.bfloat16) if device != "cpu" else (256, torch.float32)
    left = torch.rand(side, side, device=device, dtype=kind) / side

    def work(times: int) -> None:
        made = left
        for _ in range(times):
            made = torch.mm(left, made)
        made.sum().item()

    took = []
    for _ in range(50):
        begun = time.monotonic()
        work(10)
        took.append((time.monotonic() - begun) / 10)
    times = max(1, round(seconds / statistics.median(took)))
    return lambda: work(times)


if __name__ == "__main__":
    main()
