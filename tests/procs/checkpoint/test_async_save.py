"""Saves in the background, with real workers: what is copied, what is found, and how every failure is told."""

import collections
import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
import torch

from everstep.checkpoint.archive_file import verify
from everstep.checkpoint.async_ckpt.core import AsyncCallsQueue, AsyncRequest, abort_nvrx_checkpoint
from everstep.checkpoint.async_ckpt.filesystem_async import FileSystemWriterAsync
from everstep.checkpoint.async_ckpt.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
from everstep.checkpoint.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from everstep.checkpoint.local.basic_state_dict import BasicTensorAwareStateDict
from everstep.checkpoint.local.ckpt_managers.local_manager import LocalCheckpointManager
from everstep.errors import CheckpointError, MemoryShortage
from everstep.inprocess.abort import AbortPersistentCheckpointProcesses
from everstep.inprocess.state import State

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120)]
Pair = collections.namedtuple("Pair", "a b")


@pytest.fixture(params=[True, False], ids=["persistent", "temporal"])
def saving(request):
    with closing(TorchAsyncCheckpoint(persistent_queue=request.param)) as checkpoint:
        yield checkpoint


@contextlib.contextmanager
def closing(checkpoint):
    try:
        yield checkpoint
    finally:
        checkpoint.close(abort=True)


def load(path, **kwargs):
    verify(str(path))
    return torch.load(path, weights_only=False, **kwargs)


def children():
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


OTHERS: set[int] = set()


@pytest.fixture(autouse=True)
def others():
    """Children that this process has for other tests, for all of a session."""
    OTHERS.clear()
    OTHERS.update(p.pid for p in children())


def workers():
    return [p for p in children() if p.pid not in OTHERS]


def kinds():
    base = torch.arange(1_000_000.0)
    weight = torch.nn.Parameter(torch.randn(5, 3))
    return {
        "w": weight, "tied": weight.detach(), "view": base[10:20], "every": base[0:20:2], "t": torch.randn(3, 4).t(),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "wide": torch.ones(1).expand(4),
        "zero": torch.tensor(3.5), "empty": torch.empty(0, 3), "bool": torch.tensor([True, False]),
        "bf16": torch.randn(5).bfloat16(), "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "u16": torch.arange(3).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64), "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag, "sparse": torch.eye(3).to_sparse(),
        "grad": torch.ones(2, requires_grad=True), "n": 3, "none": None,
        "bytes": b"x", "pair": Pair(torch.ones(2), [1]),
        "ordered": collections.OrderedDict(b=1, a=torch.zeros(2)), 7: "int key", "rng": torch.get_rng_state(),
    }  # fmt: skip


def row(value):
    dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    return dense.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).tolist()


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and row(a) == row(b)
    if isinstance(a, dict):
        return list(a) == list(b) and type(a) is type(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_every_kind_of_value_is_what_it_was_when_the_call_returned(tmp_path):
    state = kinds()
    expected = {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()
    }
    with closing(TorchAsyncCheckpoint()) as checkpoint:
        checkpoint.async_save(state, tmp_path / "x.pt")
        with torch.no_grad():
            for key in ("w", "view", "t", "zero", "bf16", "complex", "bool"):
                state[key].zero_()
        state["ordered"]["a"].add_(1)
        del state["n"]
        checkpoint.finalize_async_save(blocking=True)
        found = load(tmp_path / "x.pt")
        expected["ordered"]["a"].sub_(1)
        assert equal(found, expected)
        assert type(found["w"]) is torch.nn.Parameter
        assert found["grad"].requires_grad
        assert found["w"].data_ptr() == found["tied"].data_ptr()
        assert found["t"].stride() == expected["t"].stride()
        assert found["last"].is_contiguous(memory_format=torch.channels_last)
        assert load(tmp_path / "x.pt", mmap=True)["w"].shape == (5, 3)
        assert os.stat(tmp_path / "x.pt").st_size < 40_000  # of a view its own elements


def test_the_synchronous_save_is_the_same_save(tmp_path, saving):
    state = kinds()
    saving.async_save(state, str(tmp_path / "a.pt"))
    saving.save(state, tmp_path / "b.pt")
    saving.finalize_async_save(blocking=True, terminate=True)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert workers() == []
    saving.save(state, buffer := __import__("io").BytesIO())
    assert buffer.getvalue()
    with pytest.raises(TypeError, match="a path"):
        saving.async_save(state, buffer)
    with pytest.raises(TypeError, match="no file"):
        saving.async_save(state, tmp_path)


def test_a_failure_is_never_reported_as_finished(tmp_path, saving):
    (tmp_path / "x.pt").write_bytes(b"old")
    saving.async_save({"w": torch.ones(3)}, tmp_path / "no/x.pt")
    with pytest.raises(CheckpointError, match=r"FileNotFoundError.*no/\.x\.pt.*is what it was before"):
        saving.finalize_async_save(blocking=True)
    saving.async_save({"w": torch.ones(3)}, tmp_path / "x.pt")
    saving.finalize_async_save(blocking=True)
    assert load(tmp_path / "x.pt")["w"].sum() == 3
    saving.finalize_async_save(blocking=True)


def staying():
    """Return a function that travels by value: its worker needs neither this module nor torch."""

    def stay(path):
        import time

        open(path, "w").close()
        time.sleep(600)

    return stay


def begun(path):
    while not path.exists():
        time.sleep(0.01)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_worker_that_dies_is_an_error_at_once_and_the_next_call_works(tmp_path, persistent):
    queue, finalized = AsyncCallsQueue(persistent), []
    restarted = []
    queue.schedule_async_request(AsyncRequest(os._exit, (17,), [lambda: finalized.append(1)]))
    with pytest.raises(CheckpointError, match="exit status 17"):
        queue.maybe_finalize_async_calls(blocking=True)
    queue.schedule_async_request(AsyncRequest(staying(), (str(tmp_path / "begun"),), [lambda: finalized.append(2)]))
    if persistent:
        queue.persistent_caller.register_worker_restart_callback(lambda: restarted.append(1))
    begun(tmp_path / "begun")
    assert queue.maybe_finalize_async_calls() == []
    assert queue.get_num_unfinalized_calls() == 1
    for worker in workers():
        worker.send_signal(signal.SIGKILL)  # as the kernel does when memory is short
    with pytest.raises(CheckpointError, match="ended by signal 9"):
        queue.maybe_finalize_async_calls(blocking=True)
    queue.schedule_async_request(AsyncRequest(os.mkdir, (str(tmp_path / "made"),), [lambda: finalized.append(3)]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    queue.close()
    assert finalized == [3]
    assert restarted == [1] * persistent
    assert (tmp_path / "made").is_dir()


def test_what_a_call_raises_is_told_with_its_trace(tmp_path):
    queue = AsyncCallsQueue()
    bound = {"x": [1]}

    def broken(row, *, factor):
        assert sum(row) == 2 * factor, "the sum is another"
        raise ValueError(f"no, {bound['x']} {os.path.basename('a/b')}")

    row = [1, 1]
    queue.schedule_async_request(AsyncRequest(broken, (row,), [], {"factor": 1}))
    row.clear()
    with pytest.raises(CheckpointError, match=r"ValueError: no, \[1\] b") as raised:
        queue.close()
    assert "in broken" in raised.value.__notes__[0]


def test_what_cannot_be_sent_to_a_process_is_done_on_a_thread(tmp_path, capfd):
    queue, lock, seen = AsyncCallsQueue(), __import__("threading").Lock(), []
    value = torch.ones(3)

    def locked(tensor):
        with lock:
            seen.append(tensor.tolist())

    queue.schedule_async_request(AsyncRequest(locked, (value,), []))
    value.zero_()
    queue.close()
    assert seen == [[1, 1, 1]]
    assert "thread of the trainer" in capfd.readouterr().err


def test_preload_takes_the_place_of_the_second_argument(tmp_path):
    def write(path, values, more):
        with open(path, "w") as file:
            file.write(f"{values} {more}")

    request = AsyncRequest(write, (str(tmp_path / "x"), None, 3), [], None, lambda: [1, 2])
    queue = AsyncCallsQueue(persistent=False)
    queue.schedule_async_request(request)
    queue.close()
    assert (tmp_path / "x").read_text() == "[1, 2] 3"
    request.execute_sync()
    frozen = request.freeze()
    with pytest.raises(RuntimeError, match="scheduled already"):
        frozen.add_finalize_fn(print)
    assert AsyncRequest(None, (), []).async_fn_kwargs is None


def test_an_abort_ends_the_worker_at_once_and_leaves_nothing(tmp_path):
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    queue = checkpoint._async_calls_queue
    for end in (lambda: checkpoint.close(abort=True), abort_nvrx_checkpoint,
                lambda: AbortPersistentCheckpointProcesses()(State.from_env().freeze())):  # fmt: skip
        (tmp_path / "begun").unlink(missing_ok=True)
        queue.schedule_async_request(AsyncRequest(staying(), (str(tmp_path / "begun"),), []))
        checkpoint.async_save({"w": torch.zeros(3)}, tmp_path / "x.pt")
        begun(tmp_path / "begun")
        end()
        assert workers() == []
        assert queue.get_num_unfinalized_calls() == 0
        checkpoint.finalize_async_save(blocking=True)
    assert load(tmp_path / "x.pt")["w"].sum() == 3
    assert sorted(os.listdir(tmp_path)) == ["begun", "x.pt"]


def test_what_an_aborted_attempt_left_under_way_neither_ends_nor_overwrites_the_next_ones_save(tmp_path, capfd):
    first, path = TorchAsyncCheckpoint(), tmp_path / "x.pt"
    first._async_calls_queue.schedule_async_request(AsyncRequest(staying(), (str(tmp_path / "begun"),), []))
    first.async_save({"attempt": 0}, path)
    begun(tmp_path / "begun")
    with closing(TorchAsyncCheckpoint()) as second:
        second.async_save({"attempt": 1}, path)
        second.finalize_async_save(blocking=True)
        assert load(path)["attempt"] == 1
        assert "dropped for the new one" in capfd.readouterr().err
    first.finalize_async_save(blocking=True)
    first.close()
    assert load(path)["attempt"] == 1
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


def test_descriptors_and_memory_do_not_grow_with_tensors_or_saves(tmp_path):
    state = {f"w{n}": torch.full((10,), float(n)) for n in range(1000)}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with closing(TorchAsyncCheckpoint()) as checkpoint:
            for n in range(3):
                checkpoint.async_save(state, tmp_path / "x.pt")
                checkpoint.finalize_async_save(blocking=True)
                open_now = len(os.listdir("/proc/self/fd"))
                fds = open_now if n == 0 else fds  # noqa: F821
                assert open_now == fds
            assert len(workers()) == 1
            big = {"w": torch.zeros(16 << 18)}  # 16 MiB
            rss = []
            for _ in range(6):
                checkpoint.async_save(big, tmp_path / "x.pt")
                checkpoint.finalize_async_save(blocking=True)
                rss.append(psutil.Process().memory_info().rss)
            assert rss[-1] - rss[2] < 8 << 20
            worker = workers()[0]
            assert worker.num_fds() < 20
            assert worker.memory_full_info().uss < 40 << 20  # no torch in it
            assert worker.nice() == min(19, os.nice(0) + 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    gc.collect()


def test_too_little_memory_is_an_error_with_both_numbers(tmp_path, monkeypatch):
    from everstep.checkpoint import memory
    from everstep.checkpoint.core.budget import Memory

    monkeypatch.setattr(memory, "read", lambda: Memory(10 << 20))
    with closing(TorchAsyncCheckpoint()) as checkpoint, pytest.raises(MemoryShortage, match=r"16\.0 MiB.*10\.0 MiB"):
        checkpoint.async_save({"w": torch.zeros(4 << 20)}, tmp_path / "x.pt")


SCRIPT = """
import sys, torch
from everstep.checkpoint.async_ckpt.filesystem_async import FileSystemWriterAsync
from everstep.checkpoint.async_ckpt.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan
from everstep.checkpoint.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from everstep.checkpoint.local.basic_state_dict import BasicTensorAwareStateDict
from everstep.checkpoint.local.ckpt_managers.local_manager import LocalCheckpointManager
class Config: pass
checkpoint = TorchAsyncCheckpoint()
checkpoint.async_save({"w": torch.ones(3), "config": Config()}, sys.argv[1] + "/x.pt")
checkpoint.async_save({"w": torch.ones(3)}, sys.argv[1] + "/no/y.pt")
"""


def test_a_script_without_a_guard_that_never_asks_keeps_its_save_and_hears_of_the_failure(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "was lost" in done.stderr
    assert "no/.y.pt" in done.stderr
    verify(str(tmp_path / "x.pt"))


def dies(folder, told):
    """A trainer, forked from this process, that is killed in the midst of a save."""
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"w": torch.ones(3)}, folder / "x.pt")
    checkpoint.finalize_async_save(blocking=True)
    queue = checkpoint._async_calls_queue
    queue.schedule_async_request(AsyncRequest(staying(), (str(folder / "begun"),), []))
    checkpoint.async_save({"w": torch.zeros(3)}, folder / "x.pt")
    begun(folder / "begun")
    os.write(told, str(queue.persistent_caller.process.pid).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_ends_with_its_trainer(tmp_path):
    reads, writes = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        with contextlib.suppress(BaseException):
            dies(tmp_path, writes)
        os._exit(1)
    os.close(writes)
    assert os.WTERMSIG(os.waitpid(trainer, 0)[1]) == signal.SIGKILL
    worker = int(os.read(reads, 20))
    os.close(reads)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(worker).wait(10)
    assert not psutil.pid_exists(worker)
    assert load(tmp_path / "x.pt")["w"].sum() == 3


def test_objects_that_nobody_holds_any_more_and_forked_children_lose_no_save(tmp_path):
    for n in range(3):
        TorchAsyncCheckpoint().async_save({"n": n}, tmp_path / f"{n}.pt")
    gc.collect()
    with closing(TorchAsyncCheckpoint()) as checkpoint:
        checkpoint.async_save({"n": 3}, tmp_path / "3.pt")
        child = os.fork()
        if child == 0:  # as a loader's worker
            code = 1
            with contextlib.suppress(BaseException):
                checkpoint.finalize_async_save(blocking=True)
                checkpoint.close()
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        checkpoint.finalize_async_save(blocking=True)
        while len(workers()) > 1:
            checkpoint.async_save({"n": 4}, tmp_path / "4.pt")
            checkpoint.finalize_async_save(blocking=True)
    assert [load(tmp_path / f"{n}.pt")["n"] for n in range(4)] == [0, 1, 2, 3]


def test_a_full_disk_fails_each_kind_of_save_by_name_leaves_what_was_there_and_serves_again(tmp_path):
    """CS-26, W41, W44, on a real tmpfs of 1 MB: a file, a DCP save, a local one, each by a real worker."""
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(where)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs leave to mount a file system: {done.stderr.strip()}")
    small, large = ({"w": torch.ones(n), "n": n} for n in (1000, 400_000))
    queue, manager = AsyncCallsQueue(), LocalCheckpointManager(str(where / "local"))
    try:
        with closing(TorchAsyncCheckpoint()) as own:

            def saved(state, n):
                own.async_save(state, where / "x.pt")
                own.finalize_async_save(blocking=True)
                writer = FileSystemWriterAsync(str(where / f"step-{n}"), thread_count=2)
                planned = save_state_dict_async_plan(state, writer)
                fn, preload, args = writer.get_save_function_and_args()
                finish = partial(save_state_dict_async_finalize, *planned)
                queue.schedule_async_request(AsyncRequest(fn, args, [finish], preload_fn=preload))
                queue.schedule_async_request(manager.save(BasicTensorAwareStateDict(state), n, is_async=True))
                queue.maybe_finalize_async_calls(blocking=True)

            saved(small, 1)
            own.async_save(large, where / "x.pt")
            with pytest.raises(CheckpointError, match=r"No space left on device.*x\.pt is what it was before"):
                own.finalize_async_save(blocking=True)
            request = manager.save(BasicTensorAwareStateDict(large), 2, is_async=True)
            queue.schedule_async_request(request)
            with pytest.raises(CheckpointError, match="No space left on device"):
                queue.maybe_finalize_async_calls(blocking=True)
            assert load(where / "x.pt")["n"] == 1000
            assert LocalCheckpointManager(str(where / "local")).find_latest() == 1
            saved(small, 3)
            assert load(where / "x.pt")["n"] == 1000
            assert LocalCheckpointManager(str(where / "local")).find_latest() == 3
            assert {name for name in os.listdir(where) if not name.startswith("x.pt")} == {"step-1", "step-3", "local"}
    finally:
        queue.close(abort=True)
        subprocess.run(["umount", "--lazy", str(where)], capture_output=True)
