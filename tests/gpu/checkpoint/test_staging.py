"""Copies beside the step on a real device: who waits for them, what they hold, and that every bit arrives.

A kernel that only spins stands between the copies, so that "still under way" is a fact and no race.
"""

import gc
import mmap
import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from everstep.checkpoint.core.layout import ITEM_BYTES, align
from everstep.checkpoint.staging import (
    SCRATCH,
    DeviceStager,
    Gathered,
    Group,
    Scratch,
    grouped,
    page_lock,
    page_unlock,
)
from everstep.clock import SYSTEM

pytestmark = pytest.mark.gpu
SPIN = 1_000_000_000  # cycles: half a second and more
DTYPES = [getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name) and name != "complex32"]


class Spin:
    """Among the groups of a stager: a kernel in their stream that takes its time."""

    device, sources = "cuda", ()

    def copy(self, *, non_blocking=False):
        del non_blocking
        torch.cuda._sleep(SPIN)


@pytest.fixture
def pinned():
    """Page-locked memory of a mapping of our own kind: a memfd, as the agent hands them out."""
    made = []

    def make(size):
        fd = os.memfd_create("everstep-gpu-test")
        os.ftruncate(fd, size)
        raw = torch.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
        os.close(fd)
        assert page_lock(raw), "the driver did not lock the pages of a memfd"
        made.append(raw)
        return raw

    yield make
    torch.cuda.synchronize()
    for raw in made:
        page_unlock(raw)


def model(width=512, depth=4):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)]).cuda()


def snapshot_of(parameters, raw):
    """Groups that copy parameters into `raw`, and their places."""
    places, at = [], 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        places.append(raw[at : at + size].view(parameter.dtype).view(parameter.shape))
        at += align(size, 64)
    sources = [p.detach() for p in parameters]
    return places, [Group("cuda", places, sources)]


@pytest.mark.parametrize("gated", [True, False])
def test_only_the_optimizer_s_step_waits_for_a_copy(pinned, gated):
    """M4: forward and backward run beside it; the step waits. Without the gate the snapshot is a later state."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parameters = list(net.parameters())
    raw = pinned(16 << 20)
    stager = DeviceStager([optimizer])
    if not gated:
        for hook in stager._hooks:
            hook.remove()
    places, groups = snapshot_of(parameters, raw)
    for _ in range(3):  # every kernel is loaded: the first launch of one waits for the whole device
        stager.stage([], groups)
        net(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
    before = [p.detach().clone() for p in parameters]
    copy = stager.stage([], [Spin(), *groups])
    net(torch.randn(64, 512, device="cuda")).square().mean().backward()
    passed = torch.cuda.Event()
    passed.record()
    passed.synchronize()
    assert not copy.done(), "forward and backward have waited for the copy"
    optimizer.step()
    stepped = torch.cuda.Event()
    stepped.record()
    if gated:
        assert not stepped.query()
    else:
        stepped.synchronize()
        assert not copy.done(), "without the gate the step does not wait"
    copy.wait()
    torch.cuda.synchronize()
    arrived = [torch.equal(place, was.cpu()) for place, was in zip(places, before, strict=True)]
    later = [torch.equal(place, now.detach().cpu()) for place, now in zip(places, parameters, strict=True)]
    if gated:
        assert all(arrived)
        assert not any(later)
    else:
        assert not any(arrived), "the check sees nothing: it passes without the gate too"
        assert all(later)
    stager.close()


def test_what_anything_may_change_is_copied_before_later_work(pinned):
    """Early groups: the stream waits for them, the host does not."""
    stager = DeviceStager([])
    buffer = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    was = buffer.cpu()
    raw = pinned(4 << 20)
    place = raw.view(torch.float32)
    torch.cuda.synchronize()
    begun = SYSTEM.now()
    copy = stager.stage([Spin(), Group("cuda", [place], [buffer])], [])
    buffer.add_(1)
    called_s = SYSTEM.now() - begun
    assert not copy.done()
    copy.wait()
    assert torch.equal(place, was)
    torch.cuda.synchronize()
    assert torch.equal(buffer.cpu(), was + 1)
    assert called_s < SYSTEM.now() - begun
    stager.close()


def test_sources_are_held_until_they_have_arrived_and_no_longer(pinned):
    """M13, CS-10: memory that the user lets go of is not handed out again while it is read, and is free afterwards."""
    stager, size = DeviceStager([]), 64 << 20
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    source = torch.full((size,), 7, dtype=torch.uint8, device="cuda")
    raw = pinned(size)
    torch.cuda.synchronize()
    copy = stager.stage([], [Spin(), Group("cuda", [raw], [source])])
    del source
    others = [torch.full((size,), 9, dtype=torch.uint8, device="cuda") for _ in range(3)]  # written at once
    assert not copy.done()
    assert torch.cuda.memory_allocated() - base >= 4 * size
    copy.wait()
    assert bool((raw == 7).all())
    del others
    gc.collect()
    assert torch.cuda.memory_allocated() == base
    again = torch.full((size,), 3, dtype=torch.uint8, device="cuda")
    copy = stager.stage([], [Group("cuda", [raw], [again])])
    del again
    torch.cuda.synchronize()
    assert copy.done()  # whoever polls lets go as well
    assert torch.cuda.memory_allocated() == base
    stager.close()


def bits(rng, dtype, count):
    raw = bytearray(b % 2 if dtype == torch.bool else b for b in rng.randbytes(max(1, count) * dtype.itemsize))
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)[:count]


def mixture(rng):
    """Tensors of a device of every dtype and size, views among them; what each is, in bytes."""
    sources = []
    for _ in range(rng.randrange(20, 60)):
        shape = tuple(rng.choice([1, 2, 3, 5, 16, 40, 300]) for _ in range(rng.randrange(3)))
        whole = bits(rng, rng.choice(DTYPES), torch.Size(shape).numel()).cuda().view(shape)
        match rng.randrange(5):
            case 1 if whole.dim() == 2:
                whole = whole.t()
            case 2 if whole.dim():
                whole = whole[::2]
            case 3 if whole.is_complex():
                whole = rng.choice([whole.conj(), whole.conj().imag])
        if whole.numel():
            sources.append(whole)
    return sources


def row(value):
    plain = value.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(plain.view(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_small_tensors_arrives_by_way_of_the_scratch(pinned, seed):
    """Every dtype, every view, whatever lay in the scratch before; nothing beside them is touched but gaps."""
    rng = random.Random(seed)
    stager = DeviceStager([])
    for _ in range(3):
        sources, places, at = mixture(rng), [], 0
        for source in sources:
            at = align(at, rng.choice([64, 64, 4096]))
            places.append(at)
            at += source.numel() * source.element_size()
        raw = pinned(align(4096 + at + 4096, 4096))
        raw.fill_(0xEE)
        pairs = []
        for begin, source in zip(places, sources, strict=True):
            part = raw[4096 + begin : 4096 + begin + source.numel() * source.element_size()]
            pairs.append((part.view(source.dtype).view(source.shape), source))
        half = rng.randrange(len(pairs))
        early, late = (grouped(some, raw, stager.scratch) for some in (pairs[:half], pairs[half:]))
        stager.stage(early, late).wait()
        assert [row(to) for to, _ in pairs] == [row(source) for _, source in pairs]
        assert bytes(raw[:4096].numpy()) + bytes(raw[4096 + at :].numpy())[:4096] == b"\xee" * 8192
    stager.close()


def test_thousands_of_small_tensors_cross_in_a_few_copies(pinned):
    """A model of 1,426 parameters under AdamW: 5,704 leaves. Counted: copies from the device that were launched."""
    sources = [
        torch.randn((), device="cuda") if n % 4 == 0 else torch.randn(64, 16, device="cuda") for n in range(5704)
    ]
    raw, pairs, at = pinned(64 << 20), [], 0
    for source in sources:
        size = source.numel() * 4
        pairs.append((raw[at : at + size].view(torch.float32).view(source.shape), source))
        at += align(size, 64)
    spent = {}
    for name, scratch in (("gathered", Scratch()), ("one by one", None)):
        groups = grouped(pairs, raw, scratch)
        raw.zero_()
        stream = torch.cuda.Stream()
        for _ in range(4):
            torch.cuda.synchronize()
            begun = SYSTEM.now()
            with torch.cuda.stream(stream):
                for group in groups:
                    group.copy(non_blocking=True)
            called_s = SYSTEM.now() - begun
            torch.cuda.synchronize()
            spent[name] = (called_s, SYSTEM.now() - begun)
        assert all(torch.equal(to, source.cpu()) for to, source in pairs)
        if scratch is not None:
            assert [type(group) for group in groups] == [Gathered]
            assert scratch.bytes <= SCRATCH
    print({name: [round(s * 1e3, 2) for s in times] for name, times in spent.items()}, "ms: calls, until arrived")
