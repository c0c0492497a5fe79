"""A plain training loop and a Checkpointer: stop it at any moment, start it again, and it goes on where it was.

python examples/checkpoint_only.py --steps 300                                   # one process
torchrun --nproc-per-node 2 examples/checkpoint_only.py --steps 300              # several; --nnodes 2 too
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint import Checkpointer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="checkpoint-only")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--interval", type=int, default=50)
    return parser.parse_args()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs.sin().sum(1, keepdim=True)


def main() -> None:
    args = arguments()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    model = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, loss = {"model": model, "optimizer": optimizer}, torch.tensor(float("nan"))
    with Checkpointer(args.dir, interval=args.interval) as checkpointer:
        restored = checkpointer.restore(state)
        print(restored or "a fresh start")
        for step in range(restored.step + 1 if restored else 1, args.steps + 1):
            inputs, wanted = batch(step, rank)
            loss = nn.functional.mse_loss(model(inputs), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save(step, state)
    print(f"rank {rank}: {args.steps} steps, loss {loss.item():.6f}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
