"""Who keeps copies of whom: laws over any number of nodes, ranks and failure domains, and over nodes that go."""

import random
from collections import Counter

import pytest

from everstep.checkpoint.core.placement import place


def worlds(seed):
    draw = random.Random(seed)
    nodes = [f"n{n}" for n in range(draw.randint(1, 9))]
    labels = draw.randint(1, len(nodes))
    domains = {node: f"d{draw.randrange(labels)}" if draw.random() < 0.5 else node for node in nodes}
    homes = {rank: draw.choice(nodes) for rank in range(draw.randint(1, 20))}
    if draw.random() < 0.7:
        per = draw.randint(1, 4)
        homes = {n * per + i: node for n, node in enumerate(nodes) for i in range(per)}
    return draw, nodes, domains, homes, draw.randint(1, 3)


def check(homes, domains, copies, placed):
    load = Counter(dict.fromkeys(domains, 0)) + Counter(node for nodes in placed.values() for node in nodes)
    assert placed.keys() == homes.keys()
    for rank, nodes in placed.items():
        home = homes[rank]
        others = [node for node in domains if node != home]
        assert len(nodes) == len(set(nodes)) == min(copies, len(others))
        assert home not in nodes
        abroad = {domains[node] for node in others} - {domains.get(home)}
        if abroad and nodes:  # never in its own domain where another exists; as many domains as can be
            inside = [node for node in nodes if domains[node] == domains.get(home)]
            assert len(inside) <= max(0, copies - sum(1 for node in others if domains[node] != domains.get(home)))
            assert len({domains[node] for node in nodes} - {domains.get(home)}) >= min(len(nodes), len(abroad))
        for node in nodes:  # nobody has two more than another who could have taken it
            rest = [other for other in nodes if other != node]
            could = [n for n in others if n not in rest and _as_good(n, node, rest, home, domains)]
            assert all(load[node] <= load[n] + 1 for n in could), (rank, node, load)


def _as_good(candidate, node, rest, home, domains):
    taken = {domains[n] for n in rest}

    def rank(n):
        return (domains[n] == domains.get(home), domains[n] in taken)

    return rank(candidate) <= rank(node)


@pytest.mark.sample(60)
@pytest.mark.parametrize("seed", range(120))
def test_laws_of_a_placement(seed):
    _, _, domains, homes, copies = worlds(seed)
    check(homes, domains, copies, place(homes, domains, copies))


@pytest.mark.sample(60)
@pytest.mark.parametrize("seed", range(120))
def test_a_node_that_goes_moves_what_it_kept_and_held_and_little_else(seed):
    draw, nodes, domains, homes, copies = worlds(seed)
    before = place(homes, domains, copies)
    gone = draw.choice(nodes)
    left = {node: label for node, label in domains.items() if node != gone}
    if not left:
        return
    moved = {rank: node if node != gone else draw.choice(sorted(left)) for rank, node in homes.items()}
    after = place(moved, left, copies, before)
    check(moved, left, copies, after)
    touched = {rank for rank in homes if homes[rank] == gone or gone in before[rank]}
    changed = {rank for rank in homes if set(after[rank]) != set(before[rank])}
    assert len(changed - touched) <= len(touched) * copies  # what is moved makes room, one for one at most
    assert place(moved, left, copies, after) == after  # and then nothing moves any more


def test_the_same_question_has_the_same_answer_in_any_order():
    homes = {rank: f"n{rank // 2}" for rank in range(12)}
    domains = {f"n{n}": f"rack{n % 3}" for n in range(6)}
    backwards = {rank: homes[rank] for rank in sorted(homes, reverse=True)}
    assert place(homes, domains) == place(backwards, dict(reversed(domains.items())))


def test_two_nodes_keep_each_other_s_and_one_alone_nobody_s():
    assert place({0: "a", 1: "a", 2: "b"}, {"a": "a", "b": "b"}) == {0: ("b",), 1: ("b",), 2: ("a",)}
    assert place({0: "a", 1: "a"}, {"a": "a"}) == {0: (), 1: ()}
    assert place({0: "a"}, {"a": "r1", "b": "r1"}) == {0: ("b",)}  # one rack is better than nothing


def test_another_rack_is_chosen_before_a_nearer_node():
    domains = {"a": "r1", "b": "r1", "c": "r2"}
    assert place({0: "a", 1: "b"}, domains) == {0: ("c",), 1: ("c",)}
    assert place({0: "c", 1: "c"}, domains) == {0: ("a",), 1: ("b",)}


def test_a_large_cluster_is_level():
    homes = {rank: f"n{rank // 8:03}" for rank in range(1024)}
    domains = {f"n{n:03}": f"r{n // 16}" for n in range(128)}
    load = Counter(node for nodes in place(homes, domains).values() for node in nodes)
    assert set(load.values()) == {8}
