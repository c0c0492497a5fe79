"""One save of the peer tier as a table: it counts when all wanted copies are kept, and ends with a sentence."""

import itertools

import pytest

from everstep.checkpoint.core.peer_save import Kept, Late, Phase, Refused, Save, Staged, Stopped, hear

WANTED = frozenset({(0, "b"), (1, "b"), (2, "a")})


def begun():
    return Save("0.0.1", 8, frozenset({0, 1, 2}), WANTED)


def after(*events):
    save = begun()
    for event in events:
        save = hear(save, event)
    return save


STAGED = [Staged(0), Staged(1), Staged(2)]
KEPT = [Kept(0, "b", 10), Kept(1, "b", 11), Kept(2, "a", 12)]


def test_nothing_is_sent_before_all_have_staged_and_it_counts_when_all_is_kept():
    assert after(*STAGED[:2]).phase is Phase.ASKED
    assert after(*STAGED).phase is Phase.SENDING
    assert after(*STAGED, *KEPT[:2]).phase is Phase.SENDING
    done = after(*STAGED, *KEPT)
    assert (done.phase, done.bytes) == (Phase.COMMITTED, 33)


def test_what_comes_early_twice_or_from_a_node_that_was_not_asked_does_not_count():
    assert after(*KEPT, *STAGED).phase is Phase.SENDING
    assert after(*STAGED, KEPT[0], KEPT[0], KEPT[0]).phase is Phase.SENDING
    assert after(*STAGED, *KEPT[:2], Kept(2, "c", 12)).phase is Phase.SENDING
    assert after(Staged(0), Staged(0), Staged(7)).staged == {0}


@pytest.mark.parametrize("order", list(itertools.permutations([*STAGED[:2], Late(2, 9)])))
def test_a_rank_that_is_past_the_step_voids_it_for_all(order):
    save = after(*order)
    assert save.phase is Phase.VOID
    assert save.text == "rank 2 was at step 9 when the intent for step 8 came"


def test_a_failure_before_the_first_byte_is_void_and_later_it_is_a_failure():
    assert after(Staged(0), Stopped("gone")).phase is Phase.VOID
    assert after(*STAGED, Stopped("node b is gone")).phase is Phase.FAILED
    failed = after(*STAGED, KEPT[0], Refused(1, "the sender has gone"))
    assert (failed.phase, failed.text) == (Phase.FAILED, "the copy of rank 1: the sender has gone")
    assert after(*STAGED, Late(0, 9)).phase is Phase.SENDING


def test_an_end_is_an_end():
    for end in (after(*STAGED, *KEPT), after(Late(0, 9)), after(*STAGED, Stopped("x"))):
        for event in (*STAGED, *KEPT, Late(0, 1), Refused(0, "y"), Stopped("z")):
            assert hear(end, event) == end
