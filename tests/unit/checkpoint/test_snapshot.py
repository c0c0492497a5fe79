"""Agent's shelf and workers' snapshotters together, in one process: what survives, what is handed on, what is void."""

import os
from pathlib import PurePosixPath

import pytest
import torch
from torch import nn

from everstep.checkpoint.core.segment import Header
from everstep.errors import DamagedCheckpoint, MemoryShortage, ProtocolError, StateMismatch
from everstep.events import TierEvent


class Box:
    def __init__(self, value=None) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def build(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def step(state: dict) -> float:
    loss = state["model"](torch.randn(4, 6)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return loss.item()


def restored(snapshotter, seed: int) -> dict:
    state = build(seed)
    snapshotter.bind(state)
    assert snapshotter.restore() is not None
    snapshotter.restore_generators()
    return state


def test_the_state_after_a_step_outlives_its_worker_and_goes_on_exactly(bench):
    b = bench()
    (worker,) = b.enter()
    state = build()
    worker.bind(state)
    assert worker.restore() is None
    for n in range(1, 6):
        step(state)
        taken = worker.take(n)
    assert taken.step == 5
    expected = [step(state) for _ in range(3)]
    (spare,) = b.enter(replace=(0,))
    assert spare is not worker
    state = restored(spare, 9)
    assert [step(state) for _ in range(3)] == expected
    again = spare.take(6)
    assert again.buffer != b.told[0]["restore"]["buffer"]


def test_a_survivor_keeps_its_mappings_and_a_spare_is_given_its_ranks(bench):
    b = bench(2)
    workers = b.enter()
    for worker in workers:
        worker.bind(build())
        worker.take(1)
    sent: list[tuple[int, int]] = []
    for rank, receive in list(b.host.receivers.items()):
        b.host.receivers[rank] = lambda m, f, rank=rank, receive=receive: (sent.append((rank, len(f))), receive(m, f))
    workers = b.enter()
    for worker in workers:
        restored(worker, 1)
    assert sent == [(0, 0), (1, 0)]
    workers = b.enter(replace=(1,))
    for worker in workers:
        restored(worker, 1)
    assert b.told[0]["reason"].startswith("step 1 from memory")


def test_what_is_pickled_needs_leave_on_both_sides(bench):
    """CS-20: refused by its key at the save; at the restore nothing is unpickled that nobody has leave for."""
    b = bench()
    (worker,) = b.enter()
    box = Box({"path": PurePosixPath("a/b"), "n": 1})
    for _ in range(2):
        with pytest.raises(TypeError, match=r"box/value/path is a pathlib\.PurePosixPath"):
            worker.bind({"box": box})
    worker.bind({"box": box}, allow_pickle=True)
    worker.take(1)
    box.value = None
    (worker,) = b.enter()
    worker.bind({"box": box})
    with pytest.raises(StateMismatch, match="if you trust whoever wrote it"):
        worker.restore()
    assert box.value is None
    (worker,) = b.enter()
    worker.rebind({"box": box}, allow_pickle=True)
    worker.restore()
    assert box.value == {"path": PurePosixPath("a/b"), "n": 1}


def test_what_changes_after_take_does_not_reach_the_snapshot(bench):
    """CS-01."""
    b = bench()
    (worker,) = b.enter()
    model = nn.Linear(4, 4)
    model.register_buffer("counter", torch.zeros(()))
    array, listed, mapping, raw = torch.ones(3).numpy(), [1], {"a": 1, "b": 2}, bytearray(b"12")
    box = Box([array, listed, mapping, raw])
    worker.bind({"model": model, "box": box})
    weight = model.weight.detach().clone()
    worker.take(1)
    with torch.no_grad():
        model.weight.add_(1)
        model.counter.add_(1)
    array += 1
    listed.append(2)
    del mapping["b"]
    raw[0] = 0
    (worker,) = b.enter()
    worker.bind({"model": model, "box": box})
    worker.restore()
    assert model.weight.equal(weight)
    assert float(model.counter) == 0.0
    assert box.value[0].tolist() == [1.0, 1.0, 1.0]
    assert box.value[1:] == [[1], {"a": 1, "b": 2}, bytearray(b"12")]


def test_a_step_that_not_all_ranks_have_is_void_before_the_new_generation_steps(bench):
    """M3."""
    b = bench(2)
    ahead, behind = b.enter()
    states = [build(), build()]
    for worker, state in zip((ahead, behind), states, strict=True):
        worker.bind(state)
    for n in (1, 2, 3):
        ahead.take(n)
        if n < 3:
            behind.take(n)
    ahead, behind = b.enter(replace=(1,))
    assert [told["restore"]["step"] for told in b.told.values()] == [2, 2]
    assert [told["lineage"] for told in b.told.values()] == [[0, 1, 2], [0, 1, 2]]
    assert sorted({s.step for s in b.shelf.sealed()}) == [1, 2]
    for worker in (ahead, behind):
        restored(worker, 4)
        worker.take(3)
    assert {s.generation for s in b.shelf.sealed() if s.step == 3} == {1}


def test_the_beginning_is_a_state_like_others(bench):
    b = bench()
    (worker,) = b.enter()
    fresh = build()
    worker.bind(fresh)
    worker.take(0)
    b.enter()
    stepped = build()
    worker.bind(stepped)
    step(stepped)
    worker.restore()
    assert b.told[0]["restore"]["step"] == 0
    assert len(stepped["optimizer"].state) == 0
    assert stepped["model"][0].weight.equal(fresh["model"][0].weight)


def test_a_held_buffer_stays_as_it_is_until_it_is_released(bench):
    b = bench()
    (worker,) = b.enter()
    worker.bind(build())
    held = worker.take(1, hold=True)
    assert held.held
    assert b.shelf.held(0) == {held.buffer}
    others = {worker.take(n).buffer for n in range(2, 9)}
    assert len(others) == 3
    assert held.buffer not in others
    assert not worker.take(9, hold=True).held  # three must be left to rotate
    header = b.shelf.header(0, held.buffer)
    assert isinstance(header, Header)
    assert header.step == 1
    b.shelf.release(0, held.buffer)
    assert b.shelf.held(0) == {held.buffer}  # it is kept for a tier that has not asked yet
    b.shelf.release(0, held.buffer, held.hold)
    b.shelf.release(0, held.buffer, held.hold)
    assert b.shelf.held(0) == frozenset()
    assert worker.take(10).buffer == held.buffer


def test_a_hold_outlives_its_worker(bench):
    b = bench()
    (worker,) = b.enter()
    worker.bind(build())
    taken = worker.take(1, hold=True)
    held = taken.buffer
    b.shelf.hold(0, held, taken.hold)  # the slower tier takes it
    worker.take(2)
    (spare,) = b.enter(replace=(0,))
    assert b.told[0]["held"] == [held]
    restored(spare, 1)
    assert held not in {spare.take(n).buffer for n in range(3, 9)}
    b.shelf.release(0, held)
    assert spare.take(9).buffer == held


def test_what_a_worker_kept_for_a_tier_that_never_came_is_free_again(bench):
    b = bench()
    (worker,) = b.enter()
    worker.bind(build())
    kept = worker.take(1, hold=True).buffer
    (spare,) = b.enter(replace=(0,))
    assert b.shelf.held(0) == frozenset()
    restored(spare, 1)
    assert kept in {spare.take(n).buffer for n in range(2, 6)}
    assert spare.take(6, hold=True).held


def test_a_slower_tier_s_copy_restores_alike(bench, keep):
    b = bench()
    (worker,) = b.enter()
    saved = build()
    step(saved)
    kept = keep(saved)
    expected = step(saved)
    state = build(3)
    worker.bind(state)
    recovered = worker.restore_from(1, "disk", kept.layout, kept.payload)
    worker.restore_generators()
    assert (recovered.step, recovered.tier) == (1, "disk")
    assert step(state) == expected


def test_a_state_that_grows_gets_larger_buffers_and_keeps_the_old_until_then(bench):
    b = bench()
    (worker,) = b.enter()
    box = Box()
    worker.bind({"box": box})
    worker.take(1)
    small = b.shelf.bytes
    box.value = torch.arange(1 << 17)
    worker.take(2)
    assert b.shelf.bytes > small
    grown = [e for e in b.host.events if isinstance(e, TierEvent)]
    assert [e.what for e in grown] == ["grown"]
    assert "outgrew its buffers" in grown[0].text
    assert {s.step for s in b.shelf.sealed()} == {1, 2}
    (spare,) = b.enter(replace=(0,))
    box.value = None
    spare.bind({"box": box})
    spare.restore()
    assert box.value.equal(torch.arange(1 << 17))
    for n in range(3, 7):
        spare.take(n)
    assert b.shelf.bytes > small
    assert {s.step for s in b.shelf.sealed()} == {3, 4, 5, 6}


def test_a_snapshot_of_the_old_set_restores_after_growth_was_interrupted(bench):
    b = bench(2)
    first, second = b.enter()
    boxes = [Box(1), Box(2)]
    for worker, box in zip((first, second), boxes, strict=True):
        worker.bind({"box": box})
        worker.take(1)
    boxes[0].value = torch.zeros(1 << 17)
    first.take(2)
    first, second = b.enter()
    for worker, box in zip((first, second), boxes, strict=True):
        worker.bind({"box": box})
        assert worker.restore().step == 1
    assert [box.value for box in boxes] == [1, 2]


def test_memory_that_does_not_suffice_is_refused_with_what_to_change(bench):
    """CS-13: an error before a byte is touched, never SIGBUS."""
    b = bench(2, cap_bytes=1 << 20)
    worker, _ = b.enter()
    with pytest.raises(MemoryShortage) as error:
        worker.bind({"box": Box(torch.zeros(1 << 20))})
    text = str(error.value)
    assert "4 buffers of 4.3 MiB for each of 2 ranks" in text
    assert "--snapshot-memory leaves 1.0 MiB" in text
    assert "Raise --snapshot-memory" in text
    assert b.shelf.bytes == 0
    assert any("still to be allocated" in notice for notice in b.host.notices())


def test_growth_that_does_not_fit_leaves_the_snapshots_there_are(bench):
    b = bench(1, cap_bytes=2 << 20)
    (worker,) = b.enter()
    box = Box(1)
    worker.bind({"box": box})
    worker.take(1)
    box.value = torch.zeros(1 << 19)
    with pytest.raises(MemoryShortage, match="--snapshot-memory"):
        worker.take(2)
    assert [s.step for s in b.shelf.sealed()] == [1]
    b.enter()
    worker.bind({"box": Box()})
    assert worker.restore().step == 1


def test_a_snapshot_that_cannot_be_read_is_struck_out(bench):
    """M11."""
    b = bench()
    (worker,) = b.enter()
    worker.bind({"box": Box("one")})
    worker.take(1)
    worker.take(2)
    b.enter()
    chosen = b.told[0]["restore"]
    assert chosen["step"] == 2
    worker.bind({"box": Box()})
    buffer = worker._current().buffers[chosen["buffer"]]
    found = buffer.header()
    buffer.bytes[found.meta_offset + 3] ^= 0xFF
    with pytest.raises(DamagedCheckpoint, match=r"buffer 1 should hold the snapshot of step 2 .*struck out"):
        worker.restore()
    assert [e.what for e in b.host.events if isinstance(e, TierEvent)] == ["damaged"]
    b.enter()
    assert b.told[0]["restore"]["step"] == 1
    worker.bind({"box": Box()})
    assert worker.restore().step == 1


def test_state_follows_the_rank_number(bench):
    """B6."""
    b = bench(2)
    first, second = b.enter()
    for n, worker in enumerate((first, second)):
        worker.bind({"box": Box(f"of rank {n}")})
        worker.take(1)
    first.settle()
    second.settle()
    told = b.host.enter()
    b.host.receivers = {0: second.on_message, 1: first.on_message}
    first._send, second._send = b.host.from_worker(1), b.host.from_worker(0)
    boxes = [Box(), Box()]
    for rank, worker in enumerate((second, first)):
        worker.begin(rank, 2, told[rank])
        worker.bind({"box": boxes[rank]})
        worker.restore()
    assert [box.value for box in boxes] == ["of rank 0", "of rank 1"]


def test_another_model_is_refused_by_name(bench):
    b = bench()
    (worker,) = b.enter()
    worker.bind(build())
    worker.take(1)
    b.enter()
    worker.bind({"model": nn.Linear(1, 1)})
    with pytest.raises(StateMismatch, match=r"optimizer/state was saved, but run\.steps was not given it"):
        worker.restore()


def test_an_interrupt_anywhere_in_take_costs_that_snapshot_alone(bench, monkeypatch):
    b = bench()
    (worker,) = b.enter()
    worker.bind(build())
    worker.take(1)
    worker.take(2)

    class Interrupted(BaseException):
        pass

    for place in ("stage", "write", "seal"):
        with monkeypatch.context() as patch:

            def interrupt(*_):
                raise Interrupted

            if place == "stage":
                patch.setattr(worker._stager, "stage", interrupt)
            else:
                patch.setattr(f"everstep.checkpoint.snapshot.{place}", interrupt)
            with pytest.raises(Interrupted):
                worker.take(3)
        b.enter()
        assert b.told[0]["restore"]["step"] == 2
        restored(worker, 5)


def test_use_out_of_order_is_told(bench):
    b = bench()
    (worker,) = b.enter()
    with pytest.raises(ProtocolError, match="call bind"):
        worker.take(1)
    with pytest.raises(ProtocolError, match="never was"):
        b.shelf.fd(0, 0)
    with pytest.raises(ProtocolError, match="different versions"):
        b.shelf.on_message(0, {"kind": "snapshot.later"}, ())


def test_an_agent_that_does_not_answer_is_named(bench):
    b = bench()
    (worker,) = b.enter()
    b.host.receivers.clear()
    worker._deadline_s = 0.01
    with pytest.raises(ProtocolError, match="has not answered"):
        worker.bind({"box": Box()})


def test_a_late_answer_of_an_interrupted_generation_is_dropped(bench):
    b = bench()
    (worker,) = b.enter()
    end, late = os.pipe()
    worker.on_message({"kind": "snapshot.buffers", "ask": 0, "sets": [], "held": []}, [late])
    worker.bind({"box": Box(1)})
    assert worker.take(1).buffer == 0
    assert os.read(end, 1) == b""  # nobody holds the other end any more
    os.close(end)


class SlowCopy:
    """A copy beside the step, as a device makes it."""

    def __init__(self, do) -> None:
        self._do, self.arrived = do, False

    def arrive(self) -> None:
        if not self.arrived:
            self._do()
            self.arrived = True

    def done(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        self.arrive()


class SlowStager:
    scratch = None

    def __init__(self) -> None:
        self.copies: list[SlowCopy] = []

    def stage(self, early, late):
        def do() -> None:
            for group in [*early, *late]:
                group.copy()

        self.copies.append(SlowCopy(do))
        return self.copies[-1]

    def close(self) -> None:
        pass


def test_a_copy_beside_the_step_is_sealed_when_it_has_arrived(bench):
    """M7: by whoever polls, or at the latest by the next snapshot; never before."""
    b = bench()
    (worker,) = b.enter()
    worker.bind({"box": Box(torch.ones(3))})
    stager = worker._stager = SlowStager()
    worker.take(1)
    assert not worker.poll()
    assert b.shelf.sealed() == []
    stager.copies[0].arrive()
    assert worker.poll()
    assert [s.step for s in b.shelf.sealed()] == [1]
    worker.take(2)
    worker.take(3)
    assert [s.step for s in b.shelf.sealed()] == [1, 2]
    worker.settle()
    assert [s.step for s in b.shelf.sealed()] == [1, 2, 3]
