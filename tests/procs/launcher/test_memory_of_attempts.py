"""IR-01 and E26 in a whole job: the model of a failed attempt is dead before the function is called again."""

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]

JOB = """
import weakref
from torch import nn
from torch.distributed.fsdp import fully_shard
models, optimizers = [], []
class Heap(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena a b c mapped d e used free f".split()]
def in_use():  # what free() has kept for later is not in it: that is glibc's, and it comes to an end by itself
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Heap
    now = mallinfo2()
    return (now.used + now.mapped) / 2**20
@everstep.resilient
def train(run):
    alive = sum(m() is not None for m in models), sum(o() is not None for o in optimizers)
    note("enter", alive=alive, used=in_use(), generation=run.generation)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Dropout(0.1), nn.Linear(1000, 1000))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    models.append(weakref.ref(model))
    optimizers.append(weakref.ref(optimizer))
    kept = {"activations": torch.ones(5_000_000), "of": model}  # 20 MB in the frame that raises
    for step in run.steps(23, model=model, optimizer=optimizer):
        loss = model(torch.ones(4, 1000)).square().mean()
        loss.backward()
        if step % 2 == 0 and step // 2 == run.generation + 1 and step // 2 % 2 == run.rank:
            try:
                raise ValueError(f"at {step}", kept)
            except ValueError as error:
                raise RuntimeError(f"again at {step}") from error
        optimizer.step()
        optimizer.zero_grad()
    note("end", used=in_use())
train()
"""


def test_ten_attempts_leave_nothing(start):
    ended = start(JOB, "--nproc-per-node", "2").ended(150)
    assert ended.code == 0, ended.err
    for rank in range(2):
        entries = [n for n in ended.of("enter") if n["rank"] == rank]
        assert [n["generation"] for n in entries] == list(range(12))
        assert [n["alive"] for n in entries] == [[0, 0]] * 12
        assert len({n["pid"] for n in entries}) == 1
        levels = [n["used"] for n in entries]
        assert levels[-1] - levels[1] < 5, f"MiB in use at the entries; an attempt needs 50: {levels}"
