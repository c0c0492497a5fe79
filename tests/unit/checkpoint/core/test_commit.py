"""The commit table: published exactly when whole, whatever the order, the repeats and the losses."""

import random

import pytest

from everstep.checkpoint.core import commit
from everstep.checkpoint.core.commit import (
    Discard,
    Late,
    Merge,
    Phase,
    Published,
    Refused,
    Release,
    Save,
    Staged,
    Stopped,
    Withdraw,
    Write,
    WriterLost,
    Written,
)  # fmt: skip


def hear_all(save, *events):
    told = []
    for event in events:
        save, commands = commit.hear(save, event)
        told += commands
    return save, told


def test_the_way_of_a_save():
    save = Save("t", 20, 2)
    save, told = hear_all(save, Staged(0))
    assert (save.phase, told) == (Phase.ASKED, [])
    save, told = hear_all(save, Staged(1))
    assert (save.phase, told) == (Phase.WRITING, [Write(0), Write(1)])
    save, told = hear_all(save, Written(1, 5), Written(0, 5))
    assert (save.phase, told) == (Phase.MERGING, [Release(1), Release(0), Merge(0)])
    save, told = hear_all(save, Published())
    assert (save.phase, told, save.ended) == (Phase.COMMITTED, [], True)


def test_a_rank_that_is_too_late_voids_the_intent_for_all():
    save, told = hear_all(Save("t", 20, 3), Staged(0), Late(2, 21))
    assert save.phase is Phase.VOID
    assert told == [Withdraw(), Release(0)]
    assert "rank 2 was already at step 21" in save.text


def test_a_generation_that_ends_voids_what_is_not_staged_and_nothing_else():
    assert hear_all(Save("t", 20, 2), Staged(0), Stopped("x"))[0].phase is Phase.VOID
    writing, _ = hear_all(Save("t", 20, 2), Staged(0), Staged(1))
    assert hear_all(writing, Stopped("x")) == (writing, [])


def test_a_writer_that_fails_ends_the_save_frees_the_buffers_and_removes_the_rest():
    save, told = hear_all(Save("t", 20, 2), Staged(0), Staged(1), Written(1, 5), Refused(0, "No space left"))
    assert save.phase is Phase.FAILED
    assert save.text == "rank 0: No space left"
    assert told[-2:] == [Release(0), Discard()]


def test_a_writer_lost_after_it_has_reported_is_needed_no_more():
    writing, _ = hear_all(Save("t", 20, 2), Staged(0), Staged(1), Written(1, 5))
    assert hear_all(writing, WriterLost(1, "x")) == (writing, [])


def test_a_lost_merger_is_followed_by_another_and_not_without_end():
    save, _ = hear_all(Save("t", 20, 2), Staged(0), Staged(1), Written(1, 5), Written(0, 5))
    assert hear_all(save, WriterLost(1, "x")) == (save, [])
    save, told = hear_all(save, WriterLost(0, "x"))
    assert (save.phase, told) == (Phase.MERGING, [Merge(1)])
    save, told = hear_all(save, WriterLost(1, "x"), WriterLost(0, "x"))
    assert (save.phase, told) == (Phase.FAILED, [Merge(0), Discard()])


def answers(command, rng):
    if isinstance(command, Write):
        return rng.choices([Written(command.rank, 1), Refused(command.rank, "EIO")], [97, 3])
    if isinstance(command, Merge):
        ends = [Published(), WriterLost(command.rank, "killed"), Refused(command.rank, "EIO")]
        return rng.choices(ends, [90, 6, 4])
    return []


def world(seed):
    """Run one save with events late, repeated, reordered, and writers lost; return it and all that was ordered."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 8])
    save, pool, told, heard = Save("t", 20, size), [Staged(r) for r in range(size)], [], []
    if rng.random() < 0.2:
        pool.append(rng.choice([Late(rng.randrange(size), 30), Stopped("a fault")]))
    for _ in range(400):
        if not pool:
            break
        event = pool.pop(rng.randrange(len(pool)))
        pool += [event] * (rng.random() < 0.3)  # it comes again
        pool += [WriterLost(rng.randrange(size), "killed")] * (rng.random() < 0.02)
        if isinstance(event, WriterLost):  # what it had not said yet is never said
            pool = [e for e in pool if not (isinstance(e, Written) and e.rank == event.rank)]
        save, commands = commit.hear(save, event)
        heard.append(event)
        told += commands
        pool += [answer for command in commands for answer in answers(command, rng)]
    return save, told, heard


def examine(seed):
    save, told, heard = world(seed)
    assert save.ended, f"seed {seed}: it never ends: {save}"
    staged = {e.rank for e in heard if isinstance(e, Staged)}
    released = [c.rank for c in told if isinstance(c, Release)]
    assert len(released) == len(set(released)), f"seed {seed}: a buffer is freed twice"
    if save.phase is Phase.COMMITTED:
        assert staged == set(range(save.world_size)) == set(released)
        assert [c for c in told if isinstance(c, Write)] == [Write(r) for r in range(save.world_size)]
        assert any(isinstance(c, Merge) for c in told)
        assert not any(isinstance(c, Discard | Withdraw) for c in told)
        assert set(save.written) == staged
    else:
        assert save.text, "an end without a sentence"
        assert set(released) == set(save.staged), f"seed {seed}: a buffer stays held"
    if save.phase is Phase.VOID:
        assert not any(isinstance(c, Write | Discard) for c in told)
        assert told[0] == Withdraw()
    if save.phase is Phase.FAILED:
        assert told[-1] == Discard()
    merges = [told.index(c) for c in told if isinstance(c, Merge)]
    assert not merges or len([c for c in told[: merges[0]] if isinstance(c, Release)]) == save.world_size


@pytest.mark.parametrize("block", range(20))
def test_a_world_of_writers_commits_when_all_is_written_and_ends_in_any_case(block):
    for seed in range(block * 100, block * 100 + 100):
        examine(seed)


def test_every_kind_of_end_occurs_in_those_worlds():
    assert {world(seed)[0].phase for seed in range(300)} == commit.ENDS


def _scenarios():
    """What the mutants are tried on: the worlds above, and the ways that luck seldom takes."""
    for seed in range(300):
        examine(seed)
    test_the_way_of_a_save()
    test_a_rank_that_is_too_late_voids_the_intent_for_all()
    test_a_generation_that_ends_voids_what_is_not_staged_and_nothing_else()
    test_a_writer_that_fails_ends_the_save_frees_the_buffers_and_removes_the_rest()
    test_a_writer_lost_after_it_has_reported_is_needed_no_more()
    test_a_lost_merger_is_followed_by_another_and_not_without_end()


@pytest.mark.parametrize("cell", list(commit.TABLE), ids=lambda c: f"{c[0].name}-{c[1].__name__}")
def test_a_table_without_any_one_of_its_cells_is_found_out(cell, monkeypatch):
    monkeypatch.setattr(commit, "TABLE", {key: value for key, value in commit.TABLE.items() if key != cell})
    with pytest.raises((AssertionError, IndexError)):
        _scenarios()


@pytest.mark.parametrize("phase", sorted(commit.ENDS, key=lambda p: p.name))
def test_an_ended_save_hears_nothing(phase):
    save = Save("t", 20, 1, phase=phase)
    for event in (Staged(0), Late(0, 1), Written(0, 1), Published(), Refused(0, "x"), WriterLost(0, "x"), Stopped("x")):
        assert commit.hear(save, event) == (save, ())
