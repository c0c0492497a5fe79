import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data import GlobalSampler, permuted, position_of
from everstep.errors import StateMismatch, UsageError


def drawn(sampler: GlobalSampler, count: int) -> list[int]:
    return list(itertools.islice(sampler, count))


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 1000])
def test_a_permutation_hits_every_place_once(length):
    for key in (0, 1, 2**63 + 7):
        assert sorted(permuted(p, length, key) for p in range(length)) == list(range(length))


def test_a_place_far_out_in_a_huge_data_set_is_found_at_once():
    sampler = GlobalSampler(10**12, seed=3, rank=0, world_size=1)
    sampler.load_state_dict(sampler.state_dict() | {"consumed": 10**15 + 17})
    assert sampler.epoch == 1000
    assert all(0 <= sample < 10**12 for sample in drawn(sampler, 50))


def test_shuffles_look_random():
    """Every sample stands at every place about equally often, and neighbours do not stay neighbours."""
    length, trials = 10, 4000
    at_first = Counter(permuted(0, length, key * 0x9E3779B97F4A7C15) for key in range(trials))
    assert min(at_first.values()) > trials / length * 0.8
    assert max(at_first.values()) < trials / length * 1.2
    order = [permuted(p, 1000, 99) for p in range(1000)]
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 12
    assert len([p for p in range(1000) if order[p] == p]) < 8


def test_epochs_and_seeds_differ_and_repeat():
    sampler = GlobalSampler(100, seed=1, rank=0, world_size=1)
    first, second = drawn(sampler, 100), drawn(sampler, 100)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert drawn(GlobalSampler(100, seed=1, rank=0, world_size=1), 100) == first
    assert drawn(GlobalSampler(100, seed=2, rank=0, world_size=1), 100) != first


def test_without_shuffle_the_order_is_the_data_sets():
    samplers = [GlobalSampler(5, shuffle=False, rank=r, world_size=2) for r in range(2)]
    assert [drawn(s, 5) for s in samplers] == [[0, 2, 4, 1, 3], [1, 3, 0, 2, 4]]


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_once_an_epoch_whatever_the_world_and_its_changes(seed):
    """Worlds of random sizes take turns over the stream, each from the last one's state; lengths need not divide."""
    rng = random.Random(seed)
    length, shuffle = rng.randint(1, 300), rng.random() < 0.8
    state, seen = GlobalSampler(length, shuffle, seed).state_dict(), []
    while len(seen) < 3 * length:
        world, count = rng.randint(1, 8), rng.randint(1, 40)
        samplers = [GlobalSampler(length, shuffle, seed, rank=r, world_size=world) for r in range(world)]
        for sampler in samplers:
            sampler.load_state_dict(state)
        shares = [drawn(sampler, count) for sampler in samplers]
        assert len({s.consumed for s in samplers}) == 1, "the position is a fact of the world"
        seen += [sample for turn in zip(*shares, strict=True) for sample in turn]
        state = samplers[-1].state_dict()
    assert state["consumed"] == len(seen)
    for epoch in range(3):
        assert sorted(seen[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_a_second_iteration_goes_on():
    sampler = GlobalSampler(7, shuffle=False, rank=0, world_size=1)
    assert drawn(sampler, 3) + drawn(sampler, 3) == [0, 1, 2, 3, 4, 5]


def test_the_launchers_world_is_read_when_iteration_begins(monkeypatch):
    sampler = GlobalSampler(10, shuffle=False)
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert drawn(sampler, 3) == [2, 5, 8]


def test_a_position_in_another_stream_is_refused_by_name():
    state = GlobalSampler(10, seed=1).state_dict()
    with pytest.raises(StateMismatch, match="length 10 there and 11 here, seed 1 there and 2 here"):
        GlobalSampler(11, seed=2).load_state_dict(state)
    with pytest.raises(StateMismatch, match="shuffle True there and False here"):
        GlobalSampler(10, shuffle=False, seed=1).load_state_dict(state)
    with pytest.raises(StateMismatch, match="lacks consumed, shuffle"):
        GlobalSampler(10).load_state_dict({"seed": 0, "length": 10})


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        ({"length": 0}, "at least one item"),
        ({"length": 5, "rank": 1}, "give both, or neither"),
        ({"length": 5, "rank": 2, "world_size": 2}, "0 to world_size - 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, mend):
    with pytest.raises(UsageError, match=mend):
        GlobalSampler(**arguments)


# Iterations that end with an epoch.


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 25)), min_size=1, max_size=8),
    st.integers(0, 99),
)
def test_by_epochs_too_each_sample_comes_once_an_epoch_through_any_changes_of_the_world(length, worlds, seed):
    """Each world iterates by epochs, is stopped in the midst or at an end, and hands its position to the next."""
    state, seen = GlobalSampler(length, seed=seed).state_dict(), []
    for world, steps in worlds:
        samplers = [GlobalSampler(length, seed=seed, rank=r, world_size=world, endless=False) for r in range(world)]
        for sampler in samplers:
            sampler.load_state_dict(state)
        streams = [iter(sampler) for sampler in samplers]
        for _ in range(steps):
            turn = [next(stream, None) for stream in streams]
            if None in turn:
                assert set(turn) == {None}, "all ranks end at the same step"
                assert samplers[0].consumed // length > (samplers[0].consumed - world) // length
                streams = [iter(sampler) for sampler in samplers]
                turn = [next(stream) for stream in streams]
            seen += turn
        state = samplers[-1].state_dict()
        assert state["consumed"] == len(seen)
    for epoch in range(len(seen) // length):
        assert sorted(seen[epoch * length : (epoch + 1) * length]) == list(range(length))
    rest = seen[len(seen) // length * length :]
    assert len(set(rest)) == len(rest)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 200))
def test_its_length_is_what_an_iteration_yields(length, world, consumed):
    samplers = [GlobalSampler(length, rank=r, world_size=world, endless=False) for r in range(world)]
    for sampler in samplers:
        sampler.seek(consumed)
    told = {len(sampler) for sampler in samplers}
    assert told == {len(list(sampler)) for sampler in samplers}
    assert bool(samplers[0])


def test_an_endless_one_has_no_length():
    with pytest.raises(TypeError, match="endless=False"):
        len(GlobalSampler(10, rank=0, world_size=1))


def test_a_position_is_a_count_of_samples():
    sampler = GlobalSampler(10, rank=0, world_size=1)
    with pytest.raises(UsageError, match="0 or more"):
        sampler.seek(-1)
    for wrong in (-1, 2.0, "7", True, None):
        with pytest.raises(StateMismatch, match="no count of samples"):
            sampler.load_state_dict(sampler.state_dict() | {"consumed": wrong})
    assert sampler.consumed == 0


# A stranger's loader: batches, epochs, short and dropped ends. The truth is a list that is written down in full.


class Truth:
    """The endless stream of a data set, and what a world's loader hands out of it by epochs."""

    def __init__(self, length, seed, world, batch, *, drop_last):
        sampler = GlobalSampler(length, seed=seed)
        self.length, self.world, self.batch, self.drop_last = length, world, batch, drop_last
        self.stream = [sampler.at(place) for place in range(40 * max(length, world * batch))]

    def batches(self, position):
        """Each rank's batches of one epoch from `position` on, and the position behind it."""
        end = position + 1
        while end % self.length:
            end += 1
        places = list(range(position, end))
        while len(places) % self.world:
            places.append(places[-1] + 1)
        rows = [places[n : n + self.world] for n in range(0, len(places), self.world)]
        cut = [rows[n : n + self.batch] for n in range(0, len(rows), self.batch)]
        if self.drop_last and len(cut[-1]) < self.batch:
            cut.pop()
        told = [[[self.stream[row[rank]] for row in part] for rank in range(self.world)] for part in cut]
        return told, places[-1] + 1


def batched(sampler, size, *, drop_last):
    """As torch's BatchSampler puts them together."""
    drawn = iter(sampler)
    while batch := list(itertools.islice(drawn, size)):
        if len(batch) == size or not drop_last:
            yield batch


def handed_out(samplers, size, *, drop_last):
    """One epoch: of each step the batches of all ranks."""
    return [list(each) for each in zip(*(batched(s, size, drop_last=drop_last) for s in samplers), strict=True)]


def world_of(length, seed, world, consumed=0):
    samplers = [GlobalSampler(length, seed=seed, rank=r, world_size=world, endless=False) for r in range(world)]
    for sampler in samplers:
        sampler.seek(consumed)
    return samplers


@settings(deadline=None)
@given(
    st.integers(1, 40), st.integers(0, 9), st.tuples(st.integers(1, 5), st.integers(1, 6)), st.booleans(),
    st.integers(0, 30), st.tuples(st.integers(1, 5), st.integers(1, 6)),
)  # fmt: skip
def test_any_loader_by_epochs_is_the_plain_list_and_goes_on_by_its_steps(length, seed, first, drop_last, stop, then):
    """Any length, world, batch size and end; then it is resumed after any step, in this world and in another."""
    world, batch = first
    truth, samplers = Truth(length, seed, world, batch, drop_last=drop_last), world_of(length, seed, world)
    position, behind = 0, [0]
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)  # as a loop for DistributedSampler does: it is there already
        begun = position
        expected, position = truth.batches(begun)
        assert handed_out(samplers, batch, drop_last=drop_last) == expected
        assert {sampler.consumed for sampler in samplers} == {position}
        behind += [begun + n * batch * world for n in range(1, len(expected))] + [position] * bool(expected)
    steps, fresh = min(stop, len(behind) - 1), world_of(length, seed, world)
    if drop_last and length <= (batch - 1) * world:
        assert behind == [0]
        with pytest.raises(UsageError, match="without drop_last"):
            fresh[0].seek_steps(1, batch, drop_last=True)
    for sampler in fresh:
        sampler.seek_steps(steps, batch, drop_last=drop_last)
    assert {sampler.consumed for sampler in fresh} == {behind[steps]}
    assert handed_out(fresh, batch, drop_last=drop_last) == truth.batches(behind[steps])[0]
    other = Truth(length, seed, *then, drop_last=drop_last)
    found = handed_out(world_of(length, seed, then[0], behind[steps]), then[1], drop_last=drop_last)
    assert found == other.batches(behind[steps])[0]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_an_endless_one_goes_on_by_its_steps(length, world, batch, steps):
    live = GlobalSampler(length, rank=0, world_size=world)
    drawn(live, steps * batch)
    fresh = GlobalSampler(length, rank=0, world_size=world)
    fresh.seek_steps(steps, batch)
    assert fresh.consumed == live.consumed


def test_an_epoch_that_lies_ahead_is_gone_to_and_none_behind():
    sampler = GlobalSampler(10, rank=0, world_size=1, endless=False)
    sampler.set_epoch(3)
    assert sampler.consumed == 30
    drawn(sampler, 4)
    for epoch in (0, 2, 3):
        sampler.set_epoch(epoch)
        assert sampler.consumed == 34, "a position that was restored stays"
    sampler.set_epoch(4)
    assert sorted(sampler) == list(range(10))


@pytest.mark.parametrize("length", [[1, 2], 5.0, None, "7"])
def test_a_data_set_is_not_its_length(length):
    with pytest.raises(UsageError, match=r"give len\(dataset\)"):
        GlobalSampler(length)
    with pytest.raises(UsageError, match="give a whole number"):
        GlobalSampler(5, seed=0.5)


@pytest.mark.parametrize(("steps", "batch"), [(-1, 2), (1, 0)])
def test_steps_and_batches_that_cannot_be_are_refused(steps, batch):
    with pytest.raises(UsageError, match="0 or more"):
        GlobalSampler(5, rank=0, world_size=1).seek_steps(steps, batch)


# Whose position a loader holds.


class Holder:
    def __init__(self, **held):
        vars(self).update(held)


class Mine:
    def __iter__(self):
        yield 0


class Wide(Mine):
    counts_whole_world = True


@pytest.mark.parametrize(
    ("thing", "wide", "who"),
    [
        (GlobalSampler(5), True, ""),
        (Holder(sampler=GlobalSampler(5)), True, ""),
        (Holder(batch_sampler=Holder(sampler=GlobalSampler(5)), sampler=Mine()), True, ""),
        (Holder(batch_sampler=Mine(), sampler=GlobalSampler(5)), False, "Mine"),
        (Holder(batch_sampler=None, sampler=Mine()), False, "Mine"),
        (Mine(), False, "Mine"),
        (Wide(), True, ""),
        (Holder(sampler=Wide()), True, ""),
        (Holder(), False, ""),
    ],
)
def test_a_position_is_that_of_the_innermost_sampler(thing, wide, who):
    found = position_of(thing)
    assert (found.counts_whole_world, found.who) == (wide, who)


def test_a_sampler_that_holds_itself_is_looked_at_once():
    loop = Holder()
    loop.sampler = loop
    assert position_of(loop) == position_of(Holder())
