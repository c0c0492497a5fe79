"""Train a Llama-architecture language model through faults: on two cores of a laptop, or on eight GPUs.

    everstep run --nproc-per-node 2 examples/train_llama.py --steps 200
    everstep run --nproc-per-node 8 examples/train_llama.py --model llama-3.1-8b --seq 4096 --batch 1

Weights are random and the text is the Python standard library's own source, byte by byte: nothing is downloaded.
What makes it resilient is five lines; README.md shows them against the plain loop.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import everstep

MODELS = json.loads((Path(__file__).parent / "models.json").read_text())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"{', '.join(MODELS)}, a name on the hub or a local folder")
    parser.add_argument("--parallel", choices=["fsdp", "ddp"], default="fsdp", help="FSDP2 (default) or DDP")
    parser.add_argument("--dataset", help="a Hugging Face data set with a `text` column, by name or path")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2, help="rows per rank and step")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a row")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="loader processes per rank")
    parser.add_argument("--record", help="append every step's exact loss, and at the end a hash of all state, to FILE")
    args = parser.parse_args()
    if args.dataset and importlib.util.find_spec("datasets") is None:
        parser.error("--dataset needs the Hugging Face library: pip install datasets")
    return args


class Rows(torch.utils.data.Dataset):
    """Text as rows of bytes: the standard library's sources in the order of their names, or a data set's."""

    def __init__(self, seq: int, dataset: str | None) -> None:
        data = _texts(dataset) if dataset else [p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py"))]
        tokens = torch.frombuffer(bytearray(b"\n".join(data)), dtype=torch.uint8)
        self.rows = tokens[: len(tokens) // seq * seq].view(-1, seq)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index].long()


def _texts(dataset: str) -> list[bytes]:
    import datasets  # noqa: PLC0415 - wanted by --dataset alone

    saved = (Path(dataset) / "state.json").exists()
    rows = datasets.load_from_disk(dataset) if saved else datasets.load_dataset(dataset, split="train")
    return [text.encode() for text in rows["text"]]


def build(args: argparse.Namespace):
    """Model, optimizer, scheduler and loader, the same on every rank and in every generation."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # sums depend on the number of threads
    known = MODELS.get(args.model)
    config = LlamaConfig(**known["config"]) if known else AutoConfig.from_pretrained(args.model)
    config.use_cache = False
    torch.manual_seed(args.seed)  # equal weights on every rank: FSDP2 shards what is there
    with device:
        model = LlamaForCausalLM(config) if known else AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if args.parallel == "ddp":  # one bucket layout for all steps: a rebuilt DDP would else sum in another order
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else MixedPrecisionPolicy()
        )
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # dropout differs from rank to rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    rows = Rows(args.seq, args.dataset)
    sampler = StatefulDistributedSampler(rows, shuffle=False, drop_last=True)
    loader = StatefulDataLoader(rows, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    return model, optimizer, scheduler, loader


def train_step(args, step, batch, model, optimizer, scheduler) -> torch.Tensor:
    batch = batch.to(next(model.parameters()).device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    record(args, step=step, loss=lambda: loss.item().hex())
    return loss.detach()


def record(args, **facts) -> None:
    """Append one line by one write: what the proof of a run reads, and the only thing that it believes."""
    if args.record:
        known = {name: fact() if callable(fact) else fact for name, fact in facts.items()}
        line = json.dumps({"pid": os.getpid(), "rank": dist.get_rank(), "at": time.monotonic()} | known) + "\n"
        with open(os.open(args.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), "wb", buffering=0) as file:
            file.write(line.encode())


def digest(state) -> str:
    """Hash this rank's part of a state dict: equal only where every bit is."""
    if isinstance(state, torch.Tensor):
        local = state.to_local() if hasattr(state, "to_local") else state
        return hashlib.sha256(local.detach().cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest()
    if isinstance(state, dict):
        state = [(key, digest(value)) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        state = [digest(value) for value in state]
    return hashlib.sha256(repr(state).encode()).hexdigest()


@everstep.resilient
def train(run: everstep.Run) -> None:
    model, optimizer, scheduler, loader = build(args)
    for step, batch in run.steps(args.steps, loader, model=model, optimizer=optimizer, scheduler=scheduler):
        run.log(loss=train_step(args, step, batch, model, optimizer, scheduler))
    record(args, model=lambda: digest(model.state_dict()), optimizer=lambda: digest(optimizer.state_dict()))


if __name__ == "__main__":
    args = arguments()
    train()
