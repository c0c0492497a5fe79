"""Ranks that are asked to end, at any moment, in any order of words: all end with the same step, and nobody waits."""

import random

import pytest

from everstep.recovery.core.draining import Agreement, Answer, Gate


class Rank:
    """Steps with a collective in each: nobody ends a step that another does not begin."""

    def __init__(self, done):
        self.gate, self.done, self.inside, self.left = Gate(), done, False, False

    def move(self, ranks):
        step = self.done + 1
        if self.left:
            return
        if not self.inside:
            answer = self.gate.before(step)
            self.inside, self.left = answer is Answer.BEGIN, answer is Answer.LEAVE
        elif all(other.done >= step or (other.done == self.done and other.inside) for other in ranks):
            self.done, self.inside = step, False


def drained(seed):
    """Two nodes of two ranks; words to and from ranks and between nodes take any time. Return what each had done."""
    rng = random.Random(seed)
    homes = {rank: f"node-{rank // 2}" for rank in range(4)}
    ranks = [Rank(10) for _ in homes]
    nodes = {node: Agreement(set(homes.values()), [r for r, home in homes.items() if home == node])
             for node in set(homes.values())}  # fmt: skip
    words = [("stand", rank, 0) for rank in homes]
    told = set()
    begin, turns = rng.randrange(40), 0
    while not all(rank.left for rank in ranks):
        turns += 1
        assert turns < 2000, "somebody waits for ever"
        rng.choice(ranks).move(ranks)
        if turns < begin or not words or rng.random() < 0.5:
            continue
        kind, to, begun = words.pop(rng.randrange(len(words)))
        if kind == "stand":
            words.append(("stands", to, ranks[to].gate.stand()))
        elif kind == "stands":
            newest = nodes[homes[to]].rank_stands(to, begun)
            words += [(homes[to], node, newest) for node in nodes if newest is not None]
        elif kind == "until":
            ranks[to].gate.until(begun)
        else:
            nodes[to].node_stands(kind, begun)
            if nodes[to].step is not None and to not in told:
                told.add(to)
                words += [("until", rank, nodes[to].step) for rank, home in homes.items() if home == to]
    return [rank.done for rank in ranks], {node.step for node in nodes.values()}


@pytest.mark.parametrize("seed", range(300))
def test_all_ranks_end_with_the_newest_step_that_any_had_begun(seed):
    done, agreed = drained(seed)
    assert len(agreed) == 1
    assert set(done) == agreed


class Raced(Gate):
    """A rank that is asked between saying that it begins a step and looking whether it was asked."""

    def __init__(self):
        super().__init__()
        self.answered = None

    @property
    def _stands(self):
        if self._armed and self.answered is None:
            self.answered = self.stand()
        return self._asked

    @_stands.setter
    def _stands(self, value):
        self._asked = value
        self._armed = not value


def test_a_rank_that_is_asked_while_it_begins_a_step_does_that_step():
    gate = Raced()
    assert gate.before(7) is Answer.WAIT
    assert gate.answered == 7
    gate.until(7)
    assert gate.before(7) is Answer.BEGIN
    assert gate.before(8) is Answer.LEAVE


def test_a_rank_that_has_not_begun_waits_for_the_others_and_does_what_they_do():
    gate = Gate()
    assert gate.stand() == 0
    assert gate.before(5) is Answer.WAIT
    gate.until(5)
    assert [gate.before(step) for step in (5, 6)] == [Answer.BEGIN, Answer.LEAVE]


def test_words_that_come_twice_or_from_nobody_change_nothing():
    agreed = Agreement(["node-0"], [0, 1])
    assert agreed.rank_stands(0, 4) is None
    assert agreed.missing == [1]
    assert agreed.rank_stands(0, 9) is None
    assert agreed.rank_stands(5, 9) is None
    assert agreed.rank_stands(1, 5) == 5
    assert agreed.rank_stands(1, 6) is None
    agreed.node_stands("node-7", 100)
    assert agreed.step is None
    agreed.node_stands("node-0", 5)
    agreed.node_stands("node-0", 6)
    assert agreed.step == 5
