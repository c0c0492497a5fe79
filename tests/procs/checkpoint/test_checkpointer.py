"""A Checkpointer in a plain loop, with real keepers, writers and files: what it keeps, says and survives."""

import contextlib
import gc
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from everstep.checkpoint import Checkpointer, Keep, Local, catalog
from everstep.errors import CheckpointError, ConfigurationError, StateMismatch, UsageError

pytestmark = [pytest.mark.procs, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
PATIENCE_S = 60.0
torch.set_num_threads(1)  # a forked child of a process with an OpenMP pool hangs in its first parallel region


def gone(pid):
    """Wait for a process that is not ours to end."""
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} was left behind"
        time.sleep(0.01)


@pytest.fixture
def make(tmp_path):
    """Make Checkpointers; at the end none of their processes is left."""
    made = []

    def checkpointer(where="ckpt", **arguments):
        made.append(Checkpointer(tmp_path / where, **arguments))
        return made[-1]

    yield checkpointer
    for one in made:
        with contextlib.suppress(CheckpointError):
            one.close(PATIENCE_S)
        gone(one._line.pid)


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False))
    model[3].weight = model[2].weight
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, step):
    torch.manual_seed(step)
    model(torch.randn(6, 5)).square().mean().backward()
    optimizer.step()


def everything(seed, step=0):
    """A state of every kind that a script holds."""
    model, optimizer = build(seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    generator = torch.Generator().manual_seed(seed)
    large = torch.arange(1_000_000.0) * (seed + 1)
    return {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "generator": generator,
        "nets": {"pair": [build(seed + 7)[0], build(seed + 8)[0]]},
        "step": step, "name": f"run {seed}", "none": None, "nan": float("nan"), "big": 2**100 + seed,
        "zero_dim": torch.tensor(3.0 + seed), "slice": large[10:20], "bf16": torch.full((3,), seed + 0.5).bfloat16(),
        "array": np.arange(4) + seed,
        "nested": {"history": [1, (2, seed)], "shadow": {"w": torch.full((2, 2), float(seed))}},
    }  # fmt: skip


def plain(value):
    """What is compared, to the bit."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            bytes(value.detach().contiguous().view(-1).view(torch.uint8).numpy()),
        )
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if isinstance(value, torch.Generator):
        return plain(value.get_state())
    if hasattr(value, "state_dict"):
        return plain(value.state_dict())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return repr(value)


def test_every_kind_of_state_comes_back_in_place_from_memory_and_from_disk(make, tmp_path):
    """CS-01, CS-17, CS-18, CS-20, CS-21, CL-09, CL-21: into the very objects, as it was when it was saved."""
    state = everything(1)
    ckpt = make()
    ckpt.save(0, state)  # before the first step: the optimizer has no state
    fresh = plain(state)
    for step in (1, 2):
        train(state["model"], state["optimizer"], step)  # gradients stand
        state["scheduler"].step()
        state["step"] = step
    state["new"] = torch.ones(2)  # structure may change between saves
    handle = ckpt.save(2, state)
    saved, drawn = plain(state), torch.rand(1)
    with torch.no_grad():  # what changes later is not in it
        for parameter in state["model"].parameters():
            parameter.zero_()
        state["slice"].zero_()
        state["zero_dim"].fill_(-1)
    state["step"], state["nested"]["history"][0] = -5, "changed"
    assert handle.wait(PATIENCE_S).what == "committed"
    before = state["slice"], state["nested"]["shadow"], state["model"][0].weight
    restored = ckpt.restore(state)
    assert (restored.step, restored.tier) == (2, "memory")
    assert "step 2 from memory" in str(restored)
    assert plain(state) == saved
    assert torch.equal(torch.rand(1), drawn)  # generators come back too
    assert (state["slice"], state["nested"]["shadow"], state["model"][0].weight) == before
    assert state["slice"] is before[0]
    ckpt.close()
    check_from_disk(make, tmp_path, saved, fresh)


def check_from_disk(make, tmp_path, saved, fresh):
    """Another process's Checkpointer has the same, of either step."""
    found = {one.step: one.manifest.total_bytes for one in catalog.scan(str(tmp_path / "ckpt"))}
    assert sorted(found) == [0, 2]
    assert found[2] < 200_000  # a slice is saved, not the storage behind it
    other = everything(9) | {"new": torch.zeros(2)}
    again = make()
    restored = again.restore(other)
    assert (restored.step, restored.tier) == (2, "disk")
    assert restored.age_s < 3600
    assert plain(other) == saved
    assert other["model"][3].weight is other["model"][2].weight  # tied, once
    del other["new"]
    assert again.restore(other, step=0).step == 0
    assert plain(other) == fresh
    assert other["optimizer"].state == {}
    with pytest.raises(CheckpointError, match="there is no step 7 to restore; there are: 0, 2"):
        again.restore(other, step=7)
    assert again.save(1, other).wait(PATIENCE_S).what == "committed"  # steps go back; what was ahead is left behind
    again.close()
    assert [one.step for one in catalog.scan(str(tmp_path / "ckpt"))] == [1, 0]


def test_what_does_not_fit_is_named_and_nothing_is_written(make):
    """CL-11: the missing key is named, all of them; the state is as it was."""
    ckpt = make()
    model, optimizer = build(1)
    ckpt.save(1, {"model": model, "optimizer": optimizer, "ema": torch.ones(3)})
    larger = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 8))
    state = {"model": larger, "optimizer": torch.optim.SGD(larger.parameters()), "epoch": 3}
    before = plain(state)
    with pytest.raises(StateMismatch) as caught:
        ckpt.restore(state)
    for part in ("epoch is not in the saved state", "ema was saved", "model/2.weight was saved as float32[7, 7]"):
        assert part in str(caught.value)
    assert "run.steps" not in str(caught.value)
    assert plain(state) == before
    with pytest.raises(StateMismatch, match=r"ema was saved as float32\[3\] and is float32\[4\]"):
        ckpt.restore({"model": model, "optimizer": optimizer, "ema": torch.ones(4)})
    state = {"model": larger, "epoch": 3, "ema": torch.zeros(3), "extra": nn.Linear(2, 2)}
    before = plain(larger[2])
    restored = ckpt.restore(state, strict=False)  # what fits is taken, the rest is named and stays
    assert plain(larger[2]) == before
    assert torch.equal(larger[0].weight, model[0].weight)
    assert torch.equal(state["ema"], torch.ones(3))
    assert state["epoch"] == 3
    told = "; ".join(restored.missing)
    for part in ("epoch", "extra/weight", "model/2.bias", "model/2.weight was saved as"):
        assert part in told
    with pytest.raises(TypeError, match="thing"):
        ckpt.save(2, {"model": model, "thing": object()})
    assert ckpt.save(3, {"model": model}).wait(PATIENCE_S).step == 3


class Schedule:
    """An object of a user's own, which nothing but pickle can keep."""

    def __init__(self, rate):
        self.rate, self.history = rate, [torch.full((2,), rate)]


def test_any_other_object_with_leave_at_the_save_and_at_the_load_else_refused_by_its_key(make):
    """CS-20: `allow_pickle=True`, here and there; without it nothing is unpickled, and nothing is written."""

    def state(rate):
        sparse = torch.eye(2).mul(rate).to_sparse()
        return {"n": rate, "deep": {"schedule": Schedule(rate), "sparse": sparse}, "kinds": {Path(str(rate)): 1}}

    ckpt = make("refused")
    with pytest.raises(TypeError, match=r"deep/schedule is a .*Schedule.*allow_pickle=True where it is saved"):
        ckpt.save(1, state(1.0))
    assert ckpt.restore(state(1.0)) is None
    with make(allow_pickle=True) as ckpt:
        assert ckpt.save(1, state(0.5)).wait(PATIENCE_S).what == "committed"
        back = state(2.0)
        assert ckpt.restore(back).tier == "memory"
        assert back["deep"]["schedule"].rate == 0.5
    plainly = make()
    with pytest.raises(TypeError, match=r"deep/schedule is a .*Schedule.*allow_pickle=True"):
        plainly.restore(back := state(2.0))
    assert (back["n"], back["deep"]["schedule"].rate) == (2.0, 2.0)
    empty = {"n": 2.0, "deep": None, "kinds": None}
    with pytest.raises(StateMismatch, match=r"was saved with allow_pickle=True.*if you trust whoever wrote it"):
        plainly.restore(empty)
    assert empty == {"n": 2.0, "deep": None, "kinds": None}
    restored = plainly.restore(empty, strict=False)
    assert empty == {"n": 0.5, "deep": None, "kinds": None}
    assert "deep/schedule" in "; ".join(restored.missing)
    plainly.close()
    again = make(allow_pickle=True)
    assert again.restore(back).tier == "disk"
    assert back["deep"]["schedule"].history[0].tolist() == [0.5, 0.5]
    assert back["deep"]["sparse"].to_dense().equal(torch.eye(2).mul(0.5))
    assert back["kinds"] == {Path("0.5"): 1}


def test_a_failed_write_is_told_by_the_handle_the_next_save_and_close(make, tmp_path):
    """CS-37, CL-03, W41: never only logged, and the newest durable one stands."""
    model, _ = build()
    ckpt = make()
    assert ckpt.save(1, {"model": model}).wait(PATIENCE_S).what == "committed"
    for step in (2, 3, 4):
        (tmp_path / "ckpt" / f"step-{step}").mkdir()  # somebody else's
    handle = ckpt.save(2, {"model": model})
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*no checkpoint of Everstep's"):
        handle.wait(PATIENCE_S)
    ckpt.save(3, {"model": model})
    while ckpt._last.fate is None:
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="step 3 was not saved"):
        ckpt.save(4, {"model": model})
    ckpt.save(4, {"model": model})
    with pytest.raises(CheckpointError, match="step 4 was not saved"):
        ckpt.close()
    again = make()
    assert again.restore({"model": model}).step == 1


def test_a_closed_one_holds_nothing_of_what_it_has_saved(make):
    """CS-10: whoever lets go of a model and an array after the last save has their memory back."""
    ckpt = make()
    model, optimizer = build()
    state = {"model": model, "optimizer": optimizer, "nested": {"t": torch.ones(3)}}
    ckpt.save(1, state).wait(PATIENCE_S)
    held = [weakref.ref(thing) for thing in (model, optimizer, state["nested"]["t"])]
    ckpt.close()
    del model, optimizer, state
    gc.collect()
    assert [one() for one in held] == [None] * 3


def test_release_gives_back_what_was_let_go_of_or_moved_between_saves(make, tmp_path):
    """CS-10: also the memory that a tensor had before it was given another; and saves go on, of these or of others."""
    ckpt = make()
    ckpt.release()  # nothing was saved
    model, optimizer = build()
    train(model, optimizer, 1)
    state = {"model": model, "optimizer": optimizer, "nested": {"t": torch.ones(3)}}
    handle = ckpt.save(1, state)
    moments = optimizer.state[model[0].weight]
    held = [weakref.ref(t.untyped_storage()) for t in (moments["exp_avg"], model[0].weight.data, state["nested"]["t"])]
    moments["exp_avg"] = moments["exp_avg"].clone()  # as it is moved to the host
    model[0].weight.data = model[0].weight.data.clone()
    state["nested"]["t"] = torch.zeros(3)
    ckpt.release()
    gc.collect()
    assert [one() for one in held] == [None] * 3
    assert handle.wait(PATIENCE_S).what == "committed"
    train(model, optimizer, 2)
    saved = plain(state)
    ckpt.save(2, state).wait(PATIENCE_S)
    lost = weakref.ref(model)
    del model, optimizer, state, moments
    ckpt.release()
    gc.collect()
    assert lost() is None
    other, its = build(5)
    state = {"model": other, "optimizer": its, "nested": {"t": torch.ones(3)}}
    assert ckpt.restore(state).step == 2
    assert plain(state) == saved
    ckpt.save(3, state).wait(PATIENCE_S)
    ckpt.close()
    with pytest.raises(UsageError, match="closed"):
        ckpt.release()


def test_nobody_waits_for_a_keeper_that_is_gone(make):
    """W42, CS-15: named at once, and what was committed serves another Checkpointer."""
    model, _ = build()
    ckpt = make()
    ckpt.save(1, {"model": model}).wait(PATIENCE_S)
    os.kill(ckpt._line.pid, signal.SIGSTOP)
    handle = ckpt.save(2, {"model": model})
    os.kill(ckpt._line.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match=r"keeper of the checkpoints \(process \d+\) is gone"):
        handle.wait(PATIENCE_S)
    with pytest.raises(CheckpointError, match="is gone"):
        ckpt.save(3, {"model": model})
    with pytest.raises(CheckpointError, match="is gone"):
        ckpt.restore({"model": model})
    ckpt.close()
    assert make().restore({"model": model}).step == 1


def test_a_writer_that_is_killed_or_stopped_fails_its_save_or_is_replaced(make):
    """W42: a dead or stopped writer holds up nobody."""
    model, _ = build()
    ckpt = make()
    until = time.monotonic() + PATIENCE_S
    while not (found := [p for p in psutil.Process(ckpt._line.pid).children() if p.name().startswith("everstep-wri")]):
        assert time.monotonic() < until, "a writer has not given itself its name"
        time.sleep(0.01)
    (writer,) = found
    writer.suspend()
    handle = ckpt.save(1, {"model": model})
    with pytest.raises(CheckpointError, match="writer of rank 0 ended by signal 9"):
        handle.wait(PATIENCE_S)
    assert ckpt.save(2, {"model": model}).wait(PATIENCE_S).what == "committed"


def test_a_holder_that_is_killed_is_told_and_takes_no_save_along(make, tmp_path):
    """The writers hold a share of the claim: nobody else gets the directory meanwhile."""
    model, _ = build()
    ckpt = make()
    (holder,) = [p for p in psutil.Process(ckpt._line.pid).children() if p.name() == "everstep-holder"]
    holder.kill()
    gone(holder.pid)
    assert ckpt.save(1, {"model": model}).wait(PATIENCE_S).what == "committed"
    with pytest.raises(ConfigurationError, match="is in use"):
        make()
    with pytest.raises(CheckpointError, match=r"the process that held the checkpoint directory .* ended by itself"):
        ckpt.close()
    assert make().restore({"model": model}).step == 1


def test_where_all_that_is_saved_is_damaged_a_restore_says_so_and_begins_nothing_anew(make, tmp_path):
    """CL-01: None means that nothing was saved; state that is lost is an error that names each."""
    model, _ = build()
    with make() as ckpt:
        ckpt.save(1, {"model": model}).wait(PATIENCE_S)
    shard = tmp_path / "ckpt" / "step-1" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-40])
    ckpt = make()
    with pytest.raises(CheckpointError, match=r"nothing that is saved is whole \(step 1 on disk is damaged"):
        ckpt.restore({"model": model})
    assert ckpt.save(2, {"model": model}).wait(PATIENCE_S).what == "committed"
    assert ckpt.restore({"model": model}).step == 2


def test_the_newest_damaged_one_is_named_and_the_next_best_taken(make, tmp_path):
    """CL-01, CL-03, CS-28, CS-29, W44, W46: by file and reason; other names are no checkpoints."""
    model, optimizer = build(1)
    with make(keep=Keep(5)) as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer, step)
            ckpt.save(step, {"model": model, "n": step}).wait(PATIENCE_S)
    (tmp_path / "ckpt" / "99").mkdir()
    (tmp_path / "ckpt" / "latest").symlink_to("step-1")
    shard = tmp_path / "ckpt" / "step-3" / "__0_0.distcp"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    (tmp_path / "ckpt" / "step-2" / "manifest.json").unlink()
    ckpt = make(keep=Keep(5))
    state = {"model": build(2)[0], "n": 0}
    restored = ckpt.restore(state)
    assert (restored.step, state["n"]) == (1, 1)
    assert "step 3 on disk is damaged" in restored.why
    assert "__0_0.distcp" in restored.why
    ckpt.save(3, state).wait(PATIENCE_S)  # a saved step that is damaged is replaced
    assert ckpt.restore(state, step=3).step == 3


def test_names_that_cannot_be_are_refused_before_anything_is_due(make):
    """At the first save or restore of any step, not at the first that is due."""
    ckpt = make(interval=1000)
    for name in ("rng", "ranks", "a/b", ""):
        for call in (lambda state: ckpt.save(1, state), ckpt.restore):
            with pytest.raises(TypeError, match="rename it"):
                call({name: 1.0})
    assert ckpt.save(1, {"a": 1.0}).wait(0).what == "not due"


def test_a_call_in_the_midst_of_another_is_refused_and_threads_wait_for_one_another(make):
    """A signal handler that saves would wait for ever for what its own thread holds."""
    ckpt = make()
    told = []

    class Nosy:
        def state_dict(self):
            for call in (lambda: ckpt.save(2, {"n": 2}), lambda: ckpt.restore({"n": 2}), ckpt.close):
                with pytest.raises(UsageError, match=r"in the midst of save\(\)") as error:
                    call()
                told.append(str(error.value))
            return {"n": 1}

        def load_state_dict(self, state):
            told.append(state)

    assert ckpt.save(1, {"nosy": Nosy()}).wait(PATIENCE_S).what == "committed"
    assert "have it set a flag" in told[0]
    with ThreadPoolExecutor(3) as pool:
        saves = [pool.submit(ckpt.save, 2, {"t": torch.full((20_000,), 7.0)}) for _ in range(12)]
        assert {each.result(PATIENCE_S).wait(PATIENCE_S).durable_step for each in saves} == {2}
    state = {"t": torch.zeros(20_000)}
    assert ckpt.restore(state).step == 2
    assert state["t"].unique().tolist() == [7.0]


def test_generators_of_every_kind_come_back(make):
    state = {"torch": torch.Generator(), "python": random.Random(1), "nested": [np.random.default_rng(2), {"n": 1}]}
    ckpt = make()
    ckpt.save(1, state)

    def drawn():
        return torch.rand(2, generator=state["torch"]).tolist(), state["python"].random(), state["nested"][0].random()

    first = drawn()
    ckpt.restore(state)
    assert drawn() == first


def test_what_cannot_serve_is_refused_at_construction(make, tmp_path, monkeypatch):
    """Two on one directory, a file in its place, arguments that cannot be meant; a missing directory is made."""
    ckpt = make("a/b/c")
    with pytest.raises(ConfigurationError, match="is in use"):
        make("a/b/c")
    other = make("d", tiers={"local": Local(tmp_path / "near", 1)})
    with pytest.raises(ConfigurationError, match="is in use"):
        make("e", tiers={"local": Local(tmp_path / "near", 1)})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        make("file")
    for wrong in (
        {"interval": 0}, {"on_busy": "wait"}, {"keep": 0}, {"tiers": {"s3": 1}}, {"tiers": {"local": 3}},
        {"tiers": {"local": Local(tmp_path / "f", 1)}, "where": "f"},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            make(**{"where": "f", **wrong})
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="init_process_group"):
        make("g")
    model, _ = build()
    with pytest.raises(UsageError, match="whole number"):
        ckpt.save("7", {"model": model})
    other.close()
    with pytest.raises(UsageError, match="it is closed"):
        other.save(1, {"model": model})
    other.close()


def test_both_disks_memory_and_intervals(make, tmp_path):
    """Tiers have intervals of their own; the nearest newest is restored; the last step in memory is written at last."""
    model, optimizer = build()
    tiers = {"memory": 1, "disk": 4, "local": Local(tmp_path / "near", 2, keep=1)}
    ckpt = make(tiers=tiers, on_busy="block")
    fates = {}
    for step in range(1, 8):
        train(model, optimizer, step)
        handle = ckpt.save(step, {"model": model, "n": step})
        fates[step] = handle.fate and handle.fate.what
    assert [fates[step] for step in (1, 2, 3, 5)] == ["in memory"] * 4
    assert ckpt._last.wait(PATIENCE_S).step == 4  # what is not begun at a restore is skipped
    state = {"model": build(3)[0], "n": 0}
    assert (ckpt.restore(state).tier, state["n"]) == ("memory", 7)
    ckpt.close()
    assert {one.step for one in catalog.scan(str(tmp_path / "ckpt"))} == {4, 7}
    assert [one.step for one in catalog.scan(str(tmp_path / "near"))] == [7]
    again = make(tiers=tiers)
    assert again.restore(state).step == 7
    again.close()
    for gone in (tmp_path / "ckpt").iterdir():  # another training, or a share that is not mounted
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)  # its holder may be ending
    with pytest.raises(ConfigurationError, match="are of another training"):
        make(tiers=tiers)
    assert [one.step for one in catalog.scan(str(tmp_path / "near"))] == [7]


def script(text, *arguments, **rest):
    """Run a script from standard input: no file, no `__main__` guard (W51)."""
    words = [sys.executable, "-", *map(str, arguments)]
    return subprocess.run(
        words, input=textwrap.dedent(text), capture_output=True, text=True, timeout=PATIENCE_S, check=False, **rest
    )


LEFT_OPEN = """
    import multiprocessing, sys, torch
    from everstep.checkpoint import Checkpointer
    checkpointer = Checkpointer(sys.argv[1])
    model = torch.nn.Linear(3, 3)
    checkpointer.save(1, {"model": model}).wait()
    checkpointer.save(int(sys.argv[2]), {"model": model})
"""


@pytest.mark.parametrize("bad", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_script_that_closes_nothing_ends_with_what_it_began(tmp_path, bad):
    """W51, CS-37, CS-39: without a guard, from standard input; finished at exit, and what failed is the exit code."""
    if bad:
        (tmp_path / "ckpt" / "step-2").mkdir(parents=True)
    done = script(LEFT_OPEN, tmp_path / "ckpt", 2)
    assert done.returncode == bad, done.stderr
    assert [one.step for one in catalog.scan(str(tmp_path / "ckpt"))] == ([1] if bad else [2, 1])
    if bad:
        assert "step 2 was not saved" in done.stderr
    assert [name for name in os.listdir(tmp_path / "ckpt") if name.endswith(".tmp")] == []


# Ranks: forked from here, where torch is loaded.


class World:
    """Ranks over gloo, forked; `wait` returns their statuses."""

    def __init__(self, size, body, tmp_path):
        self.pids = []
        store = tmp_path / f"store-{time.monotonic_ns()}"
        for rank in range(size):
            pid = os.fork()
            if not pid:
                _rank(rank, size, body, store)
            self.pids.append(pid)

    def wait(self):
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def _rank(rank, size, body, store):
    code = 1
    try:
        torch.set_num_threads(1)
        if size > 1:
            dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
        body(rank)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def step_of(state, rank, step):
    """One step of a rank: all meet, as in training."""
    state["own"] = torch.full((3,), float(100 * step + rank))
    state["n"] = step
    dist.all_reduce(torch.ones(1))


def ranks_save(tmp_path, size, last, *, die=None):
    def body(rank):
        ckpt = Checkpointer(tmp_path / "ckpt", tiers={"memory": 1, "disk": 10})
        state = {"own": torch.zeros(3), "n": 0}
        restored = ckpt.restore(state)
        begin = restored.step if restored else 0
        assert state["n"] == begin
        assert begin == 0 or torch.equal(state["own"], torch.full((3,), float(100 * begin + rank)))
        for step in range(begin + 1, last + 1):
            step_of(state, rank, step)
            ckpt.save(step, state)
            if rank == die and step == last - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        ckpt.close(PATIENCE_S)

    return body


def test_ranks_of_one_host_save_and_go_on_and_a_killed_world_loses_at_most_a_step(tmp_path, capfd):
    """CS-31, CS-39, CL-20, W47, W52: all killed; the keeper writes what they left in memory, its successor waits."""
    world = World(2, ranks_save(tmp_path, 2, 15, die=1), tmp_path)
    _, status = os.waitpid(world.pids[1], 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    os.kill(world.pids[0], signal.SIGKILL)
    os.waitpid(world.pids[0], 0)
    again = World(2, ranks_save(tmp_path, 2, 30), tmp_path)
    assert again.wait() == [0, 0]
    steps = {one.step for one in catalog.scan(str(tmp_path / "ckpt"))}
    assert 30 in steps
    alone = World(1, lambda rank: _taken_up_by_one(tmp_path), tmp_path)
    assert alone.wait() == [0]


def test_a_failure_that_is_heard_at_different_calls_costs_the_saves_that_raised_and_no_more(tmp_path):
    """One rank goes on, the other calls again: later saves are of one step on both, and durable."""

    def body(rank):
        ckpt = Checkpointer(tmp_path / "ckpt")
        state = {"n": 1}
        ckpt.save(1, state).wait(PATIENCE_S)
        if rank == 0:
            (tmp_path / "ckpt" / "step-2").mkdir()  # somebody else's
        dist.barrier()
        ckpt.save(2, state)
        while ckpt._last.fate is None:
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match="step 2 was not saved"):
            ckpt.save(3, state)
        if rank == 1:
            ckpt.save(3, state)
        for step in (4, 5):
            state["n"] = step
            assert ckpt.save(step, state).wait(PATIENCE_S).durable_step == step
            dist.barrier()
        ckpt.close(PATIENCE_S)

    assert World(2, body, tmp_path).wait() == [0, 0]
    assert {one.step for one in catalog.scan(str(tmp_path / "ckpt"))} == {4, 5}


def _taken_up_by_one(tmp_path):
    """What is equal on all ranks is taken up by another number of them; what differs is refused by name."""
    ckpt = Checkpointer(tmp_path / "ckpt")
    state = {"own": torch.zeros(3), "n": 0}
    with pytest.raises(StateMismatch, match="own"):
        ckpt.restore(state)
    assert state["n"] == 0
    restored = ckpt.restore(state, strict=False)
    assert (restored.step, state["n"]) == (30, 30)
    assert any("own" in text for text in restored.missing)
    ckpt.close(PATIENCE_S)


def test_ranks_must_agree_and_have_no_local_directory_on_several_hosts(tmp_path):
    """What differs is named on every rank, at once; so is what cannot serve several hosts, with what to use instead."""

    def differ(rank):
        with pytest.raises(ConfigurationError, match="rank 1 made its Checkpointer with other tiers than rank 0"):
            Checkpointer(tmp_path / "ckpt", interval=1 + rank)
        from everstep.checkpoint import joining

        joining._host = lambda: f"node{rank} boot{rank}"
        with pytest.raises(ConfigurationError, match=r"several hosts \(node0, node1\).*is lost with that host"):
            Checkpointer(tmp_path / "ckpt", tiers={"local": Local(tmp_path / "near", 1)})
        joining._host = lambda: "node0 boot"
        ckpt = Checkpointer(tmp_path / "ckpt")
        state = {"n": rank}
        if rank == 0:
            state["more"] = 1
        dist.barrier()
        assert ckpt.restore(state) is None
        handle = ckpt.save(5 + rank, state)
        with pytest.raises(CheckpointError, match="call save\\(\\) on every rank"):
            handle.wait(PATIENCE_S)
        ckpt.close(PATIENCE_S)

    assert World(2, differ, tmp_path).wait() == [0, 0]


def test_a_forked_child_uses_its_own_and_not_its_parents(make, tmp_path):
    """W51: in a child of a fork; the parent's is refused there by name."""
    ckpt = make("parents")

    def body(rank):
        with pytest.raises(UsageError, match="belongs to process"):
            ckpt.save(1, {"n": 1})
        with Checkpointer(tmp_path / "childs") as own:
            own.save(1, {"n": 1})

    assert World(1, body, tmp_path).wait() == [0]
    assert [one.step for one in catalog.scan(str(tmp_path / "childs"))] == [1]


def test_the_example_goes_on_where_it_was(tmp_path, root):
    """`examples/checkpoint_only.py`: started twice; the second run's loss is that of one that never stopped."""

    def run(where, steps):
        told = tmp_path / "told"

        def body(rank):
            sys.argv = ["example", "--dir", str(tmp_path / where), "--interval", "20", "--steps", str(steps)]
            with told.open("w") as file, contextlib.redirect_stdout(file):
                runpy.run_path(str(root / "examples/checkpoint_only.py"), run_name="__main__")

        assert World(1, body, tmp_path).wait() == [0]
        return told.read_text().splitlines()

    assert len(Path(root / "examples/checkpoint_only.py").read_text().splitlines()) < 60
    assert run("a", 40)[0] == "a fresh start"
    went_on = run("a", 60)
    assert went_on[0].startswith("restored step 40 from disk")
    assert went_on[-1] == run("b", 60)[-1]


def test_memory_and_processes_stay_as_many(make):
    """CS-03, W53: twenty saves take the buffers of the first; one keeper, its three helpers, no descriptor more."""
    ckpt = make(on_busy="block")
    model = nn.Linear(1000, 500)
    keeper, here = psutil.Process(ckpt._line.pid), psutil.Process()

    def taken():
        files = [os.readlink(f"/proc/{keeper.pid}/fd/{fd.name}") for fd in os.scandir(f"/proc/{keeper.pid}/fd")]
        buffers = len({name for name in files if "everstep-snapshot" in name})
        return buffers, len(keeper.children(recursive=True)), len(files), here.num_fds(), here.num_threads()

    for step in (1, 2):
        ckpt.save(step, {"model": model}).wait(PATIENCE_S)
    before, resident = taken(), here.memory_info().rss
    assert before[:2] == (4, 3)  # the writer, who has the directory, and who hashes when there is time
    for step in range(3, 23):
        ckpt.save(step, {"model": model})
    ckpt._last.wait(PATIENCE_S)
    assert taken() == before
    assert here.memory_info().rss - resident < 4 * 2_000_000  # less than two more of the state's 2 MB buffers, mapped
