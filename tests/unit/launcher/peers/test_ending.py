"""When a world without an agent is beyond mending, stepped through the machine itself."""

import pytest

from everstep.launcher.peers.core.ending import beyond_mending
from everstep.recovery.core import words, world
from everstep.recovery.core.words import Facts, Incarnation, Policy


def who(rank):
    return Incarnation("b", 100 + rank, 1)


def facts(rank, fresh=True):
    return Facts(f"rank-{rank}", 0, fresh)


class Peers:
    """The view of rank 0's watcher, which hears every fact in the hub's order."""

    def __init__(self, size, **policy):
        self.view = world.begin("rank-0", Policy(size, local_world_size=1, **policy))
        self.commands = []
        for rank in range(size):
            self.hear(words.Announced(who(rank), facts(rank)))

    def hear(self, event):
        self.view, commands = world.step(self.view, event, 0.0)
        for command in commands:
            self.commands.append(command)
            if isinstance(command, words.Publish):
                self.hear(words.Published(command.roster))
        return self

    def die(self, rank):
        return self.hear(self.view.death_of(who(rank), words.UNKNOWN_STATUS))

    def arrive(self, *ranks):
        for rank in ranks:
            self.hear(words.Arrived(self.view.generation, who(rank), facts(rank, fresh=False)))
        return self


def test_a_world_that_runs_is_well():
    assert beyond_mending(Peers(3).view) == ""
    assert Peers(3).view.phase is world.Phase.RUNNING


def test_exceptions_never_end_it():
    peers = Peers(3)
    peers.hear(words.Faulted(words.Fault(0, "exception", "worker", who(1), 1)))
    assert beyond_mending(peers.view) == ""
    assert beyond_mending(peers.arrive(0, 1, 2).view) == ""
    assert peers.view.phase is world.Phase.RUNNING


def test_a_death_ends_it_and_the_story_names_rank_and_mend():
    text = beyond_mending(Peers(3).die(2).view)
    assert text.startswith(
        "rank 2 is lost (death: its process has ended), and without an agent nobody can start another"
    )
    assert "everstep run" in text
    assert "allow the world to shrink" in text


def test_where_it_may_shrink_the_others_go_on_with_ranks_from_zero():
    peers = Peers(4, min_world_size=2, same_step_limit=9).die(1)
    assert beyond_mending(peers.view) == ""
    peers.arrive(0, 2, 3)
    assert peers.view.phase is world.Phase.RUNNING
    assert [(m.rank, m.node) for m in peers.view.members] == [(0, "rank-0"), (1, "rank-2"), (2, "rank-3")]
    peers.die(3)
    peers.arrive(0, 2)
    assert [m.node for m in peers.view.members] == ["rank-0", "rank-2"]
    assert "may shrink to 2 ranks, and 1 are left" in beyond_mending(peers.die(2).view)


def test_two_at_once_below_what_is_allowed():
    peers = Peers(4, min_world_size=3).die(1).die(3)
    assert "ranks 1,3 are lost" in beyond_mending(peers.view)


def test_a_rank_that_ends_before_all_have_met():
    view = world.begin("rank-0", Policy(2, local_world_size=1))
    view, _ = world.step(view, words.Announced(who(1), facts(1)), 0.0)
    view, _ = world.step(view, view.death_of(who(1), words.UNKNOWN_STATUS), 0.0)
    assert beyond_mending(view) == "1 of 2 ranks ended before the first generation began"


def test_a_world_that_shrinks_below_nothing_cannot_be_meant():
    with pytest.raises(ValueError, match="never shrinks"):
        Policy(2, min_world_size=3)
