"""A plain loop with NVRx's rank monitor: sections with timeouts, which it calculates from what it has seen.

everstep run --nproc-per-node 2 --max-restarts 1 \\
    --ft-rank-section-timeouts setup:60,step:10,checkpointing:30 examples/rank_monitor.py --hang 40

Only the import is Everstep's; with `from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient` the same file
runs under NVRx's ft_launcher.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.fault_tolerance import RankMonitorClient

CALCULATE_AFTER = 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--dir", type=Path, default=Path("rank-monitor"))
    parser.add_argument("--hang", type=int, default=0, metavar="STEP", help="in the first attempt the last rank hangs")
    return parser.parse_args()


class Training:
    def __init__(self, monitor: RankMonitorClient, folder: Path) -> None:
        torch.manual_seed(0)
        self.monitor, self.folder, self.rank = monitor, folder, dist.get_rank()
        self.model = DistributedDataParallel(nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.done = 0

    def load(self) -> None:
        if (self.folder / "state.pt").exists():
            state = torch.load(self.folder / "state.pt")
            self.done = state["step"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        if (self.folder / "timeouts.json").exists():
            self.monitor.load_state_dict(json.loads((self.folder / "timeouts.json").read_text()))

    def save(self) -> None:
        self.monitor.start_section("checkpointing")
        if self.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.done}
            torch.save(state, self.folder / "new.pt")
            os.replace(self.folder / "new.pt", self.folder / "state.pt")
            (self.folder / "timeouts.json").write_text(json.dumps(self.monitor.state_dict()))
        dist.barrier()
        self.monitor.end_section("checkpointing")

    def step(self) -> float:
        generator = torch.Generator().manual_seed(1000 * self.done + self.rank)
        inputs = torch.randn(16, 32, generator=generator)
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return loss.item()


def main() -> None:
    told = arguments()
    told.dir.mkdir(parents=True, exist_ok=True)
    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    monitor.start_section("setup")
    dist.init_process_group("gloo")
    training = Training(monitor, told.dir)
    training.load()
    monitor.end_section("setup")
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    while training.done < told.steps:
        monitor.start_section("step")
        if first and training.done + 1 == told.hang and training.rank == dist.get_world_size() - 1:
            print(f"step {told.hang}: rank {training.rank} hangs", flush=True)
            time.sleep(3600)
        loss = training.step()
        monitor.end_section("step")
        if training.done == CALCULATE_AFTER:
            monitor.calculate_and_set_section_timeouts(selected_sections=["step"], calc_out_of_section=False)
        if training.done % told.interval == 0:
            training.save()
    if training.rank == 0:
        limit = monitor.section_timeouts.section["step"]
        print(f"step {training.done}: loss {loss:.4f}; a step may last {limit:.2f} s", flush=True)
    monitor.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
