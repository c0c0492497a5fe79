"""Generation after generation on one living store, by the environment's words and by ours."""

import socket
import time

import pytest

from everstep.errors import StoreError
from everstep.inprocess.communication import Communication
from everstep.inprocess.rendezvous import Meeting

pytestmark = pytest.mark.procs


LONG = (pytest.mark.long, pytest.mark.timeout(300))


def many_generations(rank, port, world, rounds):
    """A group, a sub-group, an all-reduce; then abort and clean, as after a fault. Milliseconds for each part."""
    import torch
    import torch.distributed as dist
    from small import At, Small

    small, spent = Small(), {"meet": [], "abort": [], "clean": []}

    def attempt():
        began = time.monotonic()
        dist.init_process_group("gloo")
        spent["meet"].append(time.monotonic() - began)
        group = dist.new_group(list(range(world)))
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        dist.barrier()
        return one.item()

    sums = set()
    for generation in range(rounds):
        sums.add(small.run(At(generation, rank, world, ("127.0.0.1", port)), attempt))
        began = time.monotonic()
        small.cleaning.abort()
        spent["abort"].append(time.monotonic() - began)
        small.clean()
        spent["clean"].append(small.cleaned_s)
        assert small.dirt == (), small.dirt
    return {"sums": sorted(sums)} | {part: 1000 * sorted(times)[len(times) // 2] for part, times in spent.items()}


@pytest.mark.parametrize(
    ("ranks", "rounds"),
    [(2, 20), (4, 20), pytest.param(2, 200, marks=LONG), pytest.param(4, 200, marks=LONG)],
)
def test_generations_in_a_row(forks, ranks, rounds, record_property):
    told = forks.run(many_generations, ranks=ranks, limit_s=50.0, world=ranks, rounds=rounds)
    for each in told:
        assert each["sums"] == [float(ranks)]
    for part in ("meet", "abort", "clean"):
        record_property(f"{part}_ms", round(max(each[part] for each in told), 1))
    print({part: round(max(each[part] for each in told), 1) for part in ("meet", "abort", "clean")})


def two_groups_in_one_generation(rank, port):
    import torch
    import torch.distributed as dist
    from small import At, Small

    small = Small()

    def attempt():
        sums = []
        for _ in range(3):
            dist.init_process_group("gloo")
            one = torch.ones(1)
            dist.all_reduce(one)
            sums.append(one.item())
            dist.destroy_process_group()
        small.cleaning.meeting.init_process_group("gloo")
        dist.all_reduce(one)
        return [*sums, one.item(), dist.get_world_size()]

    told = small.run(At(3, rank, 2, ("127.0.0.1", port), epoch=2), attempt)
    small.cleaning.close()
    return told


def test_a_second_default_group_has_a_prefix_of_its_own(forks):
    assert forks.run(two_groups_in_one_generation) == [[2.0, 2.0, 2.0, 4.0, 2]] * 2


def what_becomes_of_the_connection(rank, port, phase):
    """Two generations; the store's connection of the first, by inode, and that of the second."""
    import torch
    import torch.distributed as dist
    from small import At, Small

    from everstep.inprocess import sockets

    small, seen = Small(), []

    def note():
        opened = small.cleaning.meeting._opened[-1].fileno()
        seen.append(sockets.sockets()[opened].inode)

    def attempt(stand):
        if stand and phase == "init_process_group" and rank:
            small.ready.set()
            time.sleep(60)
        small.ready.set()
        dist.init_process_group("gloo")
        note()
        if stand and rank:
            time.sleep(60)
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    small.stop(At(0, rank, 2, ("127.0.0.1", port)), lambda: attempt(True), after_s=0.5)
    told = small.run(At(1, rank, 2, ("127.0.0.1", port)), lambda: attempt(False))
    small.cleaning.close()
    return [told, seen[0] == seen[-1] and len(seen) > 1]


@pytest.mark.parametrize(("phase", "kept"), [("all_reduce", True), ("init_process_group", False)])
def test_a_connection_that_nobody_waited_in_is_taken_up_again(forks, phase, kept):
    first, second = forks.run(what_becomes_of_the_connection, phase=phase)
    assert first == [2.0, kept]
    assert second[0] == 2.0


def outside_and_inside(rank, port):
    """Before and after the call, `env://` is torch's own."""
    from torch.distributed import distributed_c10d as c10d

    from everstep.inprocess import rendezvous

    table = rendezvous._handlers()
    before, meeting = table["env"], Meeting(Communication())
    from small import At

    with meeting.entered(At(0, 0, 1, ("127.0.0.1", port))):
        inside = table["env"]
        c10d.init_process_group("gloo")
        c10d.destroy_process_group()
    meeting.close()
    return [inside != before, table["env"] is before]


def test_the_scheme_is_given_back(forks):
    assert forks.run(outside_and_inside, ranks=1) == [[True, True]]


def test_a_group_outside_a_generation_is_refused_with_the_mend():
    with pytest.raises(RuntimeError, match="inside the wrapped function"):
        Meeting(Communication()).open()


class _At:
    generation, epoch, rank, world_size = 0, 0, 0, 1

    def __init__(self, port):
        self.store = ("127.0.0.1", port)


def test_a_frozen_store_is_an_error_within_its_time():
    """It accepts and never answers, as the kernel does for a frozen host (E1)."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meeting = Meeting(Communication(), open_s=0.3)
        began = time.monotonic()
        with meeting.entered(_At(silent.getsockname()[1])), pytest.raises(StoreError):
            meeting.open()
        assert time.monotonic() - began < 2


def test_a_rank_that_opens_a_frozen_store_is_interrupted(rig):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meeting = Meeting(Communication(), open_s=30)
        with meeting.entered(_At(silent.getsockname()[1])):
            chased = rig.run(meeting.open)
    assert chased.raised
    assert chased.seconds < 0.3
