"""State on a CUDA device: copies beside the step are exact, gated, and sealed when they have arrived.

Runs under pytest, or as a script where there is none: then it prints figures too.
"""

import json
import sys

import torch
from torch import nn

try:
    import pytest

    pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
except ImportError:
    pytestmark = []

from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.snapshot import Snapshotter
from everstep.clock import SYSTEM
from everstep.testing.loopback import LoopbackHost


class Rig:
    def __init__(self) -> None:
        self.shelf = Shelf(look=lambda: Memory(100 << 30))
        self.host = LoopbackHost(self.shelf)
        self.snapshotter = None

    def enter(self) -> Snapshotter:
        if self.snapshotter is not None:
            self.snapshotter.close()
        told = self.host.enter()
        self.snapshotter = Snapshotter(self.host.from_worker(0))
        self.host.receivers[0] = self.snapshotter.on_message
        self.snapshotter.begin(0, 1, told[0])
        return self.snapshotter

    def close(self) -> None:
        self.snapshotter.close()
        self.shelf.close()


def build(width: int = 512, depth: int = 4, seed: int = 0) -> dict:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1)) for _ in range(depth)]
    model = nn.Sequential(*layers).cuda()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True)}


def step(state: dict, batch: int = 64) -> torch.Tensor:
    width = state["model"][0][0].in_features
    loss = state["model"](torch.randn(batch, width, device="cuda")).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return loss


def everything(state: dict) -> list[torch.Tensor]:
    tensors = [*state["model"].state_dict().values()]
    for entry in state["optimizer"].state.values():
        tensors += entry.values()
    return [t.detach().clone() for t in tensors]


def test_each_snapshot_is_the_state_at_its_boundary():
    """Later steps change parameters, moments and BatchNorm's buffers while the copy runs."""
    rig = Rig()
    snapshotter = rig.enter()
    state = build(2048, 6)
    step(state)
    snapshotter.bind(state)
    expected = {}
    for n in range(1, 8):
        step(state, 2048)
        expected[n] = everything(state)
        snapshotter.take(n)
    losses = [step(state) for _ in range(3)]
    snapshotter.settle()
    assert sorted(s.step for s in rig.shelf.sealed()) == [4, 5, 6, 7]
    for n in (7, 6):
        snapshotter = rig.enter()
        resumed = build(2048, 6, seed=9)
        snapshotter.bind(resumed)
        recovered = snapshotter.restore()
        snapshotter.restore_generators()
        assert recovered.step == n
        assert all(torch.equal(a, b) for a, b in zip(everything(resumed), expected[n], strict=True))
        if n == 7:
            assert [step(resumed).item() for _ in range(3)] == [loss.item() for loss in losses]
            for source in [s for s in rig.shelf.sealed() if s.step == 7]:
                rig.shelf._segment(0, source.buffer).void()
    rig.close()


def test_the_ticker_seals_without_the_training_thread():
    rig = Rig()
    snapshotter = rig.enter()
    state = build()
    snapshotter.bind(state)
    step(state)
    snapshotter.take(1)
    deadline = SYSTEM.now() + 10
    while not snapshotter.poll():
        assert SYSTEM.now() < deadline
    assert [s.step for s in rig.shelf.sealed()] == [1]
    rig.close()


def timed(state: dict, batch: int, snapshotter: Snapshotter | None, count: int = 20) -> tuple[float, float, int]:
    """Return the median step, the median `take`, and its bytes."""
    times, calls, size = [], [0.0], 0
    for n in range(count):
        begun = SYSTEM.now()
        step(state, batch)
        if snapshotter is not None:
            taken = snapshotter.take(n)
            calls.append(taken.seconds)
            size = taken.bytes
        torch.cuda.current_stream().synchronize()
        times.append(SYSTEM.now() - begun)
    return sorted(times)[count // 2] * 1e3, sorted(calls)[len(calls) // 2] * 1e3, size


def figures() -> None:
    torch.set_float32_matmul_precision("high")  # as fast as training is: a slow step hides every copy
    for width, depth, batch in ((4096, 16, 4096), (4096, 16, 32768), (4096, 16, 65536), (256, 300, 4096)):
        rig = Rig()
        snapshotter = rig.enter()
        state = build(width, depth)
        step(state, batch)
        begun = SYSTEM.now()
        snapshotter.bind(state)
        bound = SYSTEM.now() - begun
        timed(state, batch, snapshotter)
        plain, _, _ = timed(state, batch, None)
        taking, call, size = timed(state, batch, snapshotter)
        told = {
            "gib": size / 2**30, "leaves": sum(1 for _ in snapshotter.walk.collect()[0].leaves()), "step_ms": plain,
            "with_snapshots_ms": taking, "take_ms": call, "first_bind_s": bound,
        }  # fmt: skip
        snapshotter.settle()
        begun = SYSTEM.now()
        snapshotter = rig.enter()
        snapshotter.bind(state)
        recovered = snapshotter.restore()
        bound, rate = SYSTEM.now() - begun - recovered.seconds, recovered.bytes / recovered.seconds / 1e9
        told |= {"bind_again_s": bound, "restore_s": recovered.seconds, "restore_gb_s": rate}
        print(json.dumps({name: round(value, 3) for name, value in told.items()}), flush=True)
        rig.close()


if __name__ == "__main__":
    test_each_snapshot_is_the_state_at_its_boundary()
    test_the_ticker_seals_without_the_training_thread()
    print("exact", torch.__version__, torch.cuda.get_device_name(), sys.version.split()[0], flush=True)
    figures()
