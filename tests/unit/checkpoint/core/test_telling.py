"""What nodes tell before a generation, and what follows from all of it."""

import json

import pytest

from everstep.checkpoint.core.copies import Copy, Place
from everstep.checkpoint.core.plan import Branch, Committed, Sealed
from everstep.checkpoint.core.telling import checked, conclude, facts

HOMES = {0: "a", 1: "b"}


def told(*copies, older=(), struck=(), struck_older=(), branches=(), counted=None, room=1 << 40):
    return json.loads(json.dumps(facts(copies, branches, counted, struck, struck_older, older, room)))


def disk(step, path="/ckpt"):
    return Committed(step, "disk", {"path": f"{path}/step-{step}"}, 2)


def copy(node, rank, step, replica=False):
    return Copy(node, replica, Sealed(rank, 0, step, 0, 0, -1, 2))


def begun(words, **more):
    return conclude(words, HOMES, "a", 0, more.get("number", 1)).decision.plan


def test_a_checkpoint_counts_that_only_one_node_has_heard_of():
    plan = begun({"a": told(older=[disk(5)]), "b": told(older=[disk(5), disk(10)])})
    assert (plan.step, plan.tier, plan.committed.where) == (10, "disk", {"path": "/ckpt/step-10"})


def test_where_several_know_it_the_word_of_rank_0_s_node_stands():
    plan = begun({"a": told(older=[disk(5, "/a")]), "b": told(older=[disk(5, "/b")])})
    assert plan.committed.where["path"] == "/a/step-5"


def test_what_any_node_has_struck_out_counts_for_none():
    words = {"a": told(older=[disk(5), disk(10)]), "b": told(older=[disk(10)], struck_older=[("disk", 10)])}
    assert begun(words).step == 5
    copies = {"a": told(copy("a", 0, 7)), "b": told(copy("b", 1, 7), struck=[Place("a", False, 0, 0, 7, 0, 0)])}
    line = [Branch(0, 0, -1)]
    assert begun({**copies, "c": told(branches=line)}).step is None
    copies["b"] = told(copy("b", 1, 7), branches=line)
    assert begun(copies).step == 7


def test_all_generations_count_of_which_any_node_knows_and_the_newest_save_on_their_line():
    line = [Branch(0, 0, -1)]
    words = {"a": told(copy("a", 0, 7), branches=line, counted=[6, 0, 0]),
             "b": told(copy("b", 1, 7), copy("b", 0, 7, replica=True), counted=[9, 0, 0])}  # fmt: skip
    found = conclude(words, HOMES, "a", 0, 1)
    assert found.branches == line
    assert found.counted == (6, 0, 0), "step 9 is beyond what the generation begins from"
    assert found.keepers == {0: ("b",)}


@pytest.mark.parametrize("key", ["copies", "struck", "struck_older", "older", "branches", "counted", "room"])
def test_what_cannot_be_read_is_an_error_where_it_comes(key):
    good = told(copy("a", 0, 7), older=[disk(5)], branches=[Branch(0, 0, -1)])
    assert checked("a", good) is good
    for nonsense in ("x", [7], [[None]], [["x", "y"]]):
        with pytest.raises((LookupError, TypeError, ValueError)):
            checked("a", {**good, key: nonsense})
    with pytest.raises(LookupError):
        checked("a", {name: value for name, value in good.items() if name != key})
