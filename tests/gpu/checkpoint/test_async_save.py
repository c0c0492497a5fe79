"""NVRx's names with state on a GPU: what is copied when a call returns, and that nobody of ours stays on the device."""

import contextlib
import gc
import os
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from everstep.checkpoint.archive_file import verify
from everstep.checkpoint.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from everstep.checkpoint.async_ckpt.filesystem_async import FileSystemWriterAsync
from everstep.checkpoint.async_ckpt.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
from everstep.checkpoint.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from everstep.checkpoint.dcp_storage import FileSystemReader
from everstep.checkpoint.local.basic_state_dict import BasicTensorAwareStateDict
from everstep.checkpoint.local.ckpt_managers.local_manager import LocalCheckpointManager
from everstep.testing.same import differs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]
SPIN = 1_000_000_000  # cycles: half a second and more


@pytest.fixture(params=["gloo", "nccl", "cpu:gloo,cuda:nccl"])
def group(request):
    """A world of one over each backend: NCCL alone moves nothing of the host's."""
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


@contextlib.contextmanager
def closing(one, *args, **kwargs):
    try:
        yield one
    finally:
        one.close(*args, **kwargs)


def state(seed=0):
    wide = torch.randn(1 << 20, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    return {
        "wide": wide,
        "many": [wide[n : n + 17].clone() for n in range(300)],
        "t": wide[:6000].view(60, 100).t(),
        "bf16": wide.bfloat16(),
        "fp8": wide[:999].to(torch.float8_e4m3fn),
        "u16": wide[:99].view(torch.uint16).clone(),
        "complex": torch.complex(wide[:9], wide[9:18]),
        "zero": wide[3].clone(),
        "host": torch.arange(5.0),
        "pinned": torch.arange(7.0).pin_memory(),
        "step": seed,
    }


def spoil(given):
    """What a step does next: everything changes."""
    for value in given.values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                tensor.view(torch.uint8).zero_() if tensor.dtype == torch.float8_e4m3fn else tensor.zero_()


def on_host(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    return [on_host(each) for each in value] if isinstance(value, list) else value


def late(given):
    """Values that a kernel behind a long one has yet to write: whoever copies beside the stream has others."""
    torch.cuda._sleep(SPIN)
    given["wide"].add_(1)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_save_holds_what_was_there_when_the_call_returned(tmp_path, persistent):
    expected = {}
    with closing(TorchAsyncCheckpoint(persistent_queue=persistent), abort=True) as checkpoint:
        for step in range(4):  # the second pinned save and later ones (CS-05)
            given = state(step)
            late(given)
            checkpoint.async_save(given, tmp_path / f"{step}.pt")
            expected[step] = on_host(given)
            spoil(given)
            if step % 2:
                checkpoint.finalize_async_save(blocking=True)
        for step in range(4):
            verify(str(tmp_path / f"{step}.pt"))
            found = torch.load(tmp_path / f"{step}.pt", weights_only=True)
            assert differs(expected[step], on_host(found)) == ""


def device_files(pid):
    """The driver's files that a process has open or mapped."""
    names = {line.rsplit(" ", 1)[-1].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            names.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sorted(name for name in names if name.startswith("/dev/nvidia"))


def test_the_worker_has_nothing_of_the_device_and_a_finished_save_holds_none_of_it(tmp_path):
    """CS-08, CS-10."""
    gc.collect()
    torch.cuda.empty_cache()
    base, others = torch.cuda.memory_allocated(), {p.pid for p in psutil.Process().children(recursive=True)}
    with closing(TorchAsyncCheckpoint(), abort=True) as checkpoint:
        given = {"w": torch.randn(1 << 26, device="cuda")}
        checkpoint.async_save(given, tmp_path / "x.pt")
        given.clear()
        gc.collect()
        assert torch.cuda.memory_allocated() == base
        workers = [p for p in psutil.Process().children(recursive=True) if p.pid not in others]
        assert len(workers) == 1
        assert device_files(workers[0].pid) == []
        assert device_files(os.getpid()), "the look sees nothing"
        checkpoint.finalize_async_save(blocking=True)
    assert torch.cuda.memory_allocated() == base


def test_dcp_in_the_background(tmp_path, group):
    """`FileSystemWriterAsync` and the queue: several files at once, published as one, read by ours and by torch's."""
    with closing(AsyncCallsQueue()) as queue:
        for step in range(3):
            given = state(step)
            late(given)
            planned = save_state_dict_async_plan(
                given, FileSystemWriterAsync(f"{tmp_path}/step-{step}", thread_count=3)
            )
            fn, preload, args = planned[0].get_save_function_and_args()
            finalize = partial(save_state_dict_async_finalize, *planned)
            queue.schedule_async_request(AsyncRequest(fn, args, [finalize], preload_fn=preload))
            expected = on_host(given)
            spoil(given)
            while queue.get_num_unfinalized_calls():
                queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
                time.sleep(0.01)
            for reader in (FileSystemReader, dcp.FileSystemReader):
                into = state(99)
                dcp.load(into, storage_reader=reader(f"{tmp_path}/step-{step}"))
                assert differs(expected, on_host(into)) == ""
                assert into["wide"].is_cuda


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_local_save_waits_for_the_copy_from_the_device(tmp_path, group, asynchronous):
    """W49: what stands behind a long kernel is in the file all the same; it comes back onto the device."""
    with closing(AsyncCallsQueue()) as queue:
        manager = LocalCheckpointManager(tmp_path, "job")
        for iteration in (1, 2, 3):
            given = state(iteration)
            late(given)
            request = manager.save(BasicTensorAwareStateDict(given), iteration, is_async=asynchronous)
            if asynchronous:
                expected = on_host(given)
                spoil(given)
                queue.schedule_async_request(request)
                queue.maybe_finalize_async_calls(blocking=True)
            else:
                expected = on_host(given)
            fresh = LocalCheckpointManager(tmp_path, "job")
            assert fresh.find_latest() == iteration
            found, id_ = fresh.load()
            assert id_ == (iteration, 0, "job")
            assert differs(expected, on_host(found.state_dict)) == ""
            assert found.state_dict["wide"].is_cuda
            assert not found.state_dict["host"].is_cuda
