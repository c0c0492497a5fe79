"""CL-13: a resume in the middle of an epoch neither repeats nor skips, though workers have prefetched ahead."""

import random

import pytest

torch = pytest.importorskip("torch")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

from everstep.data import GlobalSampler  # noqa: E402 - after the skips

pytestmark = pytest.mark.procs


class Ids(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index


def loader(rank: int, world: int, workers: int):
    """The documented recipe: our sampler in torchdata's loader."""
    sampler = GlobalSampler(1000, shuffle=True, seed=11, rank=rank, world_size=world)
    return stateful.StatefulDataLoader(
        Ids(), 5, sampler=sampler, num_workers=workers, prefetch_factor=4 if workers else None
    )


def restarted(loaders, states):
    for fresh, state in zip(loaders, states, strict=True):
        if state is not None:
            fresh.load_state_dict(state)
    return [iter(fresh) for fresh in loaders]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_id_once_an_epoch_through_five_restarts(workers):
    rng = random.Random(5)
    stops = sorted(rng.sample(range(1, 100), 5))  # steps of the first epoch; 2 ranks × 5 ids a step
    seen, states, step = [], [None, None], 0
    for stop in [*stops, 200]:
        loaders = [loader(rank, 2, workers) for rank in range(2)]
        streams = restarted(loaders, states)
        while step < stop:
            seen += [int(i) for stream in streams for i in next(stream)]
            step += 1
            states = [each.state_dict() for each in loaders]
        for stream in streams:  # killed with batches in flight: what is prefetched was never trained on
            getattr(stream, "_shutdown_workers", lambda: None)()
    assert sorted(seen[:1000]) == list(range(1000))
    assert sorted(seen[1000:]) == list(range(1000))
    assert seen[:1000] != seen[1000:]


def test_a_save_between_micro_batches_resumes_at_the_next_one():
    """Four micro-batches make a step; the state taken after the second resumes at the third."""
    first = loader(0, 1, 0)
    stream = iter(first)
    whole = [[int(i) for i in next(stream)] for _ in range(8)]
    again = loader(0, 1, 0)
    part = iter(again)
    for _ in range(2):
        next(part)
    resumed = loader(0, 1, 0)
    (rest,) = restarted([resumed], [again.state_dict()])
    assert [[int(i) for i in next(rest)] for _ in range(6)] == whole[2:]


def test_another_world_goes_on_from_the_same_position():
    """Two ranks stop after 300 of 1000 ids; three ranks read the other 700, and each id is read once."""
    loaders = [loader(rank, 2, 0) for rank in range(2)]
    streams = [iter(each) for each in loaders]
    seen = [int(i) for _ in range(30) for stream in streams for i in next(stream)]
    state = loaders[0].state_dict()
    sampler_state = GlobalSampler(1000, seed=11).state_dict() | {"consumed": 300}
    assert sampler_state["consumed"] == len(seen)
    wider = [GlobalSampler(1000, shuffle=True, seed=11, rank=rank, world_size=3) for rank in range(3)]
    for sampler in wider:
        sampler.load_state_dict(sampler_state)
    turns = zip(*(iter(sampler) for sampler in wider), strict=True)
    seen += [sample for _ in range(234) for sample in next(turns)]
    assert sorted(seen[:1000]) == list(range(1000))
    assert "300" in str(state), "the loader's own state holds the world's position"


@pytest.mark.parametrize(("workers", "batch", "drop_last"), [(0, 3, False), (2, 4, False), (2, 7, True)])
def test_loaders_of_changing_worlds_share_one_stream(workers, batch, drop_last):
    """Two, three and one rank take turns, with other batch sizes, by their loaders' own states; workers prefetch."""
    seen, sampler_state = [], GlobalSampler(1000, seed=5).state_dict()
    for world, size, steps in ((2, batch, 11), (3, batch + 1, 9), (1, batch, 13), (2, batch, 5)):
        loaders = []
        for rank in range(world):
            sampler = GlobalSampler(1000, seed=5, rank=rank, world_size=world)
            sampler.load_state_dict(sampler_state)
            loaders.append(stateful.StatefulDataLoader(
                Ids(), size, sampler=sampler, num_workers=workers, drop_last=drop_last,
                prefetch_factor=3 if workers else None))  # fmt: skip
        streams = [iter(each) for each in loaders]
        for _ in range(steps):
            batches = [[int(i) for i in next(stream)] for stream in streams]
            seen += [sample for turn in zip(*batches, strict=True) for sample in turn]
        states = [each.state_dict() for each in loaders]
        found = [found for state in states for found in positions(state)]
        assert {each["consumed"] for each in found} == {len(seen)}, "not what workers have drawn ahead"
        sampler_state = found[0]
        for stream in streams:
            getattr(stream, "_shutdown_workers", lambda: None)()
    assert len(set(seen)) == len(seen)
    assert seen == [GlobalSampler(1000, seed=5).at(place) for place in range(len(seen))]


def positions(state):
    if isinstance(state, dict):
        if "consumed" in state:
            yield state
        for value in state.values():
            yield from positions(value)


def test_torch_s_own_loader_takes_it_by_epochs_and_goes_on_by_a_count():
    def loaders(consumed=0):
        for rank in range(3):
            sampler = GlobalSampler(100, seed=2, rank=rank, world_size=3, endless=False)
            sampler.seek(consumed)
            yield torch.utils.data.DataLoader(Ids(), 4, sampler=sampler)

    one = list(loaders())
    assert [len(each) for each in one] == [9, 9, 9]  # 34 samples a rank: 8 batches of 4, and one of 2
    epochs = [[[int(i) for i in batch] for batch in each] for each in one for _ in range(1)]
    assert [len(batches) for batches in epochs] == [9, 9, 9]
    flat = [s for batches in zip(*epochs, strict=True) for turn in zip(*batches, strict=True) for s in turn]
    assert sorted(flat[:100]) == list(range(100))
    resumed = [[[int(i) for i in batch] for batch in each] for each in loaders(5 * 4 * 3)]
    assert [batches[5:] for batches in epochs] == resumed


LENGTH = 103


def torch_s_loader(sampler, size=4, *, batch_sampler=False, drop_last=False, **settings):
    batches = {"batch_size": size, "sampler": sampler, "drop_last": drop_last}
    if batch_sampler:
        batches = {"batch_sampler": torch.utils.data.BatchSampler(sampler, size, drop_last)}
    return torch.utils.data.DataLoader(torch.arange(LENGTH), **batches, **settings)


def world_of(size, consumed=0):
    samplers = [GlobalSampler(LENGTH, seed=4, rank=rank, world_size=size, endless=False) for rank in range(size)]
    for sampler in samplers:
        sampler.seek(consumed)
    return samplers


def handed_out(loaders):
    """One epoch of all ranks, step by step, and of each step turn by turn."""
    rows = zip(*([[int(i) for i in batch] for batch in each] for each in loaders), strict=True)
    return [[sample for turn in zip(*row, strict=True) for sample in turn] for row in rows]


@pytest.mark.parametrize(
    ("workers", "persistent", "batch_sampler", "drop_last"),
    [
        (0, False, True, True),
        (2, True, False, False),
        pytest.param(2, True, True, True, marks=pytest.mark.long),
        pytest.param(2, False, False, True, marks=pytest.mark.long),
    ],
)
def test_torch_s_own_loader_as_a_stranger_makes_it(workers, persistent, batch_sampler, drop_last):
    """Workers that persist, batch samplers, set_epoch: three epochs on 2 ranks; fresh ones go on, then 3 ranks do."""
    how = {"batch_sampler": batch_sampler, "drop_last": drop_last}
    how |= {"num_workers": workers, "persistent_workers": persistent}
    samplers, told = world_of(2), []
    loaders = [torch_s_loader(sampler, **how) for sampler in samplers]
    for epoch, samples, behind in ((0, 52, 104), (1, 51, 206), (2, 52, 310)):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        assert {len(each) for each in loaders} == {samples // 4 if drop_last else 13}
        told += handed_out(loaders)
        assert {sampler.consumed for sampler in samplers} == {behind}
    places = [GlobalSampler(LENGTH, seed=4).at(place) for place in range(400)]
    dropped = {204, 205} | {202, 203, 200, 201} if drop_last else set()  # 51 samples of a rank: 12 batches, and 3
    assert [s for row in told for s in row] == [places[n] for n in range(310) if n not in dropped]
    for steps in (5, 13, 20):
        fresh = world_of(2)
        for sampler in fresh:
            sampler.seek_steps(steps, 4, drop_last=drop_last)
        consumed = fresh[0].consumed
        rest = handed_out([torch_s_loader(sampler, **how) for sampler in fresh])
        assert rest == told[steps : steps + len(rest)]
        wider = [torch_s_loader(sampler, 2, **how) for sampler in world_of(3, consumed)]
        assert handed_out(wider)[0] == places[consumed : consumed + 6]
