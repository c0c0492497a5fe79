"""Who comes to the hub, who is refused and with which words, and how nodes are numbered."""

import itertools
import re

import pytest

from everstep.launcher.nodes.core.register import TAKEN_S, Register, node_name

TERMS = {
    "version": "1.0", "wire": 1, "job": "j", "nnodes": "3", "spare_nodes": 0, "nproc": 2, "wrapped": True,
    "least": None, "restarts": None, "script": "train.py",
}  # fmt: skip


def told(rank=None, who="host, pid 1", **other):
    return {"terms": TERMS | other, "node_rank": rank, "address": "10.0.0.1", "who": who}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"nnodes": "2"}, r"--nnodes 2 here, --nnodes 3 on the node that came first"),
        ({"spare_nodes": 1}, r"--spare-nodes 1 here, --spare-nodes 0"),
        ({"nproc": 4}, r"--nproc-per-node 4 here, --nproc-per-node 2"),
        ({"version": "0.9"}, r"Everstep 0.9 here, Everstep 1.0 .* Install one version"),
        ({"job": "k"}, r"a job of --rdzv-id k here.*give each its own --rdzv-endpoint"),
        ({"script": "other.py"}, r"other.py is to run here, train.py is to run on the node.*its own --rdzv-endpoint"),
        ({"wrapped": False}, r"names everstep: False here"),
        ({"least": 2}, r"--min-world-size 2 here"),
        ({"restarts": 3}, r"--max-restarts 3 here"),
        ({"wire": 2}, r"version 2 of the words"),
    ],
)
def test_who_was_started_otherwise_is_refused_by_what_differs(other, said):
    register = Register(TERMS)
    refusal = register.join(0, told(0, **other), 0.0)
    assert re.search(said, refusal), refusal
    assert register.here == {}


def test_two_with_one_rank_and_a_rank_that_cannot_be():
    register = Register(TERMS)
    assert register.join(0, told(1, "first, pid 7"), 0.0) == ""
    assert register.join(1, told(1), 0.0) == "--node-rank 1 is taken by first, pid 7. Give each node its own."
    assert register.join(2, told(3), 0.0) == "--node-rank 3 of 3 nodes: give 0 to 2."
    assert register.join(2, told(-1), 0.0).startswith("--node-rank -1")
    assert register.lacking == "nodes 0,2 of 3"


def running(*, terms=TERMS, nodes=3):
    """A job that has begun."""
    register = Register(terms)
    for number in range(nodes):
        assert register.join(number, told(number, **terms), 0.0) == ""
    assert register.look(100.0)
    return register


def test_one_too_many_waits_in_line_and_is_turned_away_when_nobody_was_given_up_meanwhile():
    register = running()
    assert register.join(3, told(), 5.0) == ""
    assert register.let_in() == []
    assert register.turned_away(5.0 + TAKEN_S) == {}
    (text,) = register.turned_away(5.1 + TAKEN_S).values()
    assert text == "all 3 nodes of this job are here. --spare-nodes N has places for N nodes more."
    assert register.line == {}


def test_a_rank_that_is_another_s_is_had_when_that_is_gone_and_not_before():
    register = running()
    register.join(3, told(1, "new"), 5.0)
    assert register.let_in() == []
    register.leave(1)
    assert register.let_in() == [3]
    assert (register.here[3].name, register.here[3].ordinal) == ("node-1", 3)
    assert list(register.present) == ["node-0", "node-2"], "it does not hear yet what is told"
    register.here[3].here = True
    assert list(register.present) == ["node-0", "node-2", "node-1"], "behind those that were here before"
    register.join(4, told(1, "twin"), 6.0)
    (text,) = register.turned_away(7.0 + TAKEN_S).values()
    assert text == "--node-rank 1 is taken by new, which lives. Give each node its own."


def test_who_has_no_rank_takes_the_place_of_whoever_is_gone_or_never_came():
    register = running(terms=TERMS | {"nnodes": "2:4"}, nodes=2)
    register.join(7, told(nnodes="2:4"), 1.0)
    register.join(8, told(nnodes="2:4"), 1.0)
    register.join(9, told(nnodes="2:4"), 1.0)
    assert register.let_in() == [7, 8]
    assert [register.here[n].name for n in (7, 8)] == ["node-2", "node-3"]
    register.leave(0)
    assert register.let_in() == [9]
    assert (register.here[9].name, register.here[9].ordinal) == ("node-0", 4)


def test_who_leaves_the_line_is_nobody_s_loss():
    register = running()
    register.join(3, told(), 5.0)
    assert register.leave(3) is None
    assert register.turned_away(100.0) == {}


@pytest.mark.parametrize("given", [*itertools.permutations((0, None, 2)), (None, None, None), (2, 1, 0)])
def test_given_ranks_are_kept_and_the_others_filled_in_order(given):
    register = Register(TERMS)
    for number, rank in enumerate(given):
        assert register.join(number, told(rank), 0.0) == ""
    assert register.look(0.0)
    numbers = [register.here[number].given for number in range(3)]
    assert sorted(numbers) == [0, 1, 2]
    assert all(rank in (None, number) for rank, number in zip(given, numbers, strict=True))
    free = [number for rank, number in zip(given, numbers, strict=True) if rank is None]
    assert free == sorted(free)
    assert list(register.present) == ["node-0", "node-1", "node-2"]


def test_one_that_leaves_before_all_have_come_makes_room():
    register = Register(TERMS)
    register.join(0, told(0), 0.0)
    register.leave(0)
    assert register.join(1, told(0), 0.0) == ""
    assert register.lacking == "nodes 1-2 of 3"
    register.leave(1)
    register.join(2, told(None), 0.0)
    assert register.lacking == "2 of 3 nodes"


ELASTIC = TERMS | {"nnodes": "2:4"}


def comers(terms, *at):
    """A register to which nodes have come at these times, each looked at when it came."""
    register = Register(terms, 30.0)
    begun = [register.look(now) for n, now in enumerate(at) if not register.join(n, told(**terms), now)]
    assert not any(begun[:-1])
    return register


@pytest.mark.parametrize(
    ("terms", "at", "begins", "at_work"),
    [
        (ELASTIC, (0, 1, 2, 3), 3, 4),  # all are here
        (ELASTIC, (0, 5), 35, 2),  # the last call is over 30 s after as many were here as must be
        (ELASTIC, (0, 5, 20), 35, 3),
        (ELASTIC | {"spare_nodes": 1}, (0, 1, 2, 3), 31, 4),
        (ELASTIC | {"spare_nodes": 1}, (0, 1, 2, 3, 4), 4, 4),
        (TERMS | {"spare_nodes": 2}, (0, 1, 2), 32, 3),
        (TERMS | {"spare_nodes": 2}, (0, 1, 2, 3), 32, 3),
        (TERMS, (0, 1, 50), 50, 3),
    ],
)
def test_a_job_begins_with_all_or_when_the_last_call_is_over(terms, at, begins, at_work):
    register = comers(terms, *at)
    if begins > at[-1]:
        assert not register.look(begins - 0.1)
        assert register.look(begins)
    assert register.complete
    assert not register.look(begins + 1.0)
    assert list(register.at_work) == list(register.present)[:at_work]
    assert len(register.present) == len(at)


def test_the_last_call_begins_anew_where_one_of_too_few_goes():
    register = comers(ELASTIC, 0, 1)
    register.leave(1)
    assert not register.look(100.0)
    assert register.lacking == "1 of at least 2 nodes"
    register.join(7, told(**ELASTIC), 110.0)
    assert register.lacking == "2 more nodes, for 30 s at most"
    assert not register.look(139.9)
    assert register.look(140.0)


def test_ranks_of_spare_nodes_follow_those_at_work():
    register = Register(TERMS | {"nnodes": "1", "spare_nodes": 2})
    assert register.join(0, told(3, nnodes="1", spare_nodes=2), 0.0) == "--node-rank 3 of 3 nodes: give 0 to 2."
    for number, rank in enumerate((2, None, 0)):
        assert register.join(number, told(rank, nnodes="1", spare_nodes=2), 0.0) == ""
    assert register.look(0.0)
    assert register.at_work == ("node-0",)
    assert register.here[2].name == "node-0"


def test_names_stand_in_their_order():
    for nodes in (1, 2, 10, 11, 101):
        names = [node_name(number, nodes) for number in range(nodes)]
        assert names == sorted(names)
    assert node_name(0, 1) == "node-0"


def test_who_is_where():
    register = Register(TERMS)
    for number in range(3):
        register.join(number, told(2 - number), 0.0)
    assert register.look(0.0)
    assert register.connection_of("node-2") == 0
    assert register.connection_of("node-9") is None
