"""The one order of facts: first key wins, a roster waits for its store and for what every node keeps."""

import random

from everstep.launcher.nodes.core.minutes import Minutes


def roster(generation, members=(0,)):
    return {"is": "Published", "roster": {"generation": generation, "members": list(members)}}


def kept(node, generation):
    return {"is": "kept", "node": node, "generation": generation, "told": {}}


def begun(*nodes, renewed=False):
    minutes = Minutes(renewed)
    minutes.begin(nodes)
    return minutes


def test_of_facts_with_one_key_the_first_counts():
    minutes = begun("a")
    assert minutes.say({"is": "x", "n": 1}, "key") == [{"is": "x", "n": 1}]
    assert minutes.say({"is": "x", "n": 2}, "key") == []
    assert minutes.say({"is": "x", "n": 3}) == [{"is": "x", "n": 3}]


def test_a_roster_waits_for_a_store_and_for_all_nodes_and_nothing_else_waits():
    minutes = begun("a", "b")
    assert minutes.say(roster(0), "roster/0") == []
    assert minutes.say({"is": "Died"}) == [{"is": "Died"}]
    assert minutes.serves("a", ["h", 1]) == []
    assert minutes.say(kept("a", 0)) == [kept("a", 0)]
    told = minutes.say(kept("b", 0))
    assert [fact["is"] for fact in told] == ["kept", "Published"]
    assert told[1]["store"] == ["h", 1]


def test_the_end_waits_for_nothing():
    assert begun("a", "b").say(roster(3, ()), "roster/3") == [roster(3, ())]


def test_a_node_that_is_gone_is_not_waited_for_and_its_loss_comes_before_the_roster():
    minutes = begun("a", "b")
    minutes.serves("a", ["h", 1])
    minutes.say(kept("a", 0))
    minutes.say(roster(0), "roster/0")
    told = minutes.leave("b", "why", lost=True)
    assert [fact["is"] for fact in told] == ["gone", "Published"]
    assert minutes.leave("b", "why", lost=True) == []


def test_with_its_node_goes_the_store_and_another_serves_the_roster():
    minutes = begun("a", "b")
    minutes.serves("a", ["h", 1])
    minutes.say(kept("b", 0))
    minutes.say(roster(0), "roster/0")
    assert [fact["is"] for fact in minutes.leave("a", "why", lost=True)] == ["gone"]
    (told,) = minutes.serves("b", ["k", 2])
    assert told["store"] == ["k", 2]


def test_who_says_good_bye_is_not_lost():
    assert begun("a", "b").leave("b", "", lost=False) == []


def test_who_comes_is_waited_for_and_who_had_its_name_has_not_told_for_it():
    minutes = begun("a", "b")
    minutes.serves("a", ["h", 1])
    minutes.say(kept("a", 0))
    minutes.say(kept("b", 0))
    minutes.leave("b", "why", lost=True)
    minutes.come("b")
    assert minutes.say(roster(0), "roster/0") == []
    assert [fact["is"] for fact in minutes.say(kept("b", 0))] == ["kept", "Published"]


def test_a_store_serves_one_generation_of_a_script_that_makes_its_groups_itself():
    minutes = begun("a", renewed=True)
    minutes.serves("a", ["h", 1])
    minutes.say(kept("a", 0))
    assert minutes.say(roster(0), "roster/0")
    minutes.say(kept("a", 1))
    assert minutes.say(roster(1), "roster/1") == []
    (told,) = minutes.serves("a", ["h", 2])
    assert told["store"] == ["h", 2]


def test_what_another_node_says_of_a_store_that_is_not_its_own_changes_nothing():
    minutes = begun("a", "b")
    minutes.serves("a", ["h", 1])
    minutes.serves_no_more("b")
    assert minutes.store is not None
    minutes.serves_no_more("a")
    assert minutes.store is None


def words_of(rng, minutes, nodes, stays):
    """All that is said in two generations, each roster twice, and nodes that go; in any order."""
    words = [(minutes.say, kept(node, generation)) for node in nodes for generation in (0, 1)]
    words += [(minutes.say, roster(generation), f"roster/{generation}") for generation in (0, 0, 1, 1)]
    words += [(minutes.leave, node, "") for node in nodes if node != stays and rng.random() < 0.4]
    words += [(minutes.serves, stays, ["h", 1])]
    rng.shuffle(words)
    return words


def test_whatever_the_order_a_told_roster_has_a_store_and_all_that_are_here_have_told():
    """Thousands of orders of the same words: nothing is told too early, nothing is held for ever."""
    for seed in range(3000):
        rng = random.Random(seed)
        nodes = ["a", "b", "c"][: rng.randint(1, 3)]
        minutes, stays = begun(*nodes), rng.choice(nodes)
        told = []
        for say, *what in words_of(rng, minutes, nodes, stays):
            told += say(*what, **({"lost": True} if say == minutes.leave else {}))
        check(seed, nodes, told)


def check(seed, nodes, told):
    here, heard, published = set(nodes), {0: set(), 1: set()}, []
    for fact in told:
        if fact["is"] == "gone":
            here.discard(fact["node"])
        elif fact["is"] == "kept":
            heard[fact["generation"]].add(fact["node"])
        else:
            published.append(fact["roster"]["generation"])
            assert here <= heard[published[-1]], (seed, told)
            assert fact["store"] == ["h", 1]
    assert sorted(published) == [0, 1], (seed, told)
