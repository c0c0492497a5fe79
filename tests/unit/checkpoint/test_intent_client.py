"""A rank's side: one step, in time or not at all."""

import pytest

from everstep.checkpoint.intent_client import IntentClient


@pytest.fixture
def rank():
    sent = []
    client = IntentClient(lambda message: sent.append(dict(message)))
    client.sent = sent
    return client


def intent(save, step):
    return {"kind": "disk.intent", "save": save, "step": step}


def test_the_step_is_due_once_and_is_reported_with_its_buffer(rank):
    rank.on_message(intent("a", 3))
    assert [rank.due(step) for step in (1, 2)] == [False, False]
    assert rank.due(3)
    rank.staged(7, lambda: 2)
    assert rank.sent == [{"kind": "disk.staged", "save": "a", "buffer": 7, "hold": 2}]
    assert not rank.due(4)
    rank.staged(8, lambda: 3)
    assert len(rank.sent) == 1


@pytest.mark.parametrize("present", [3, 4, 100])
def test_an_intent_for_a_step_that_is_done_is_late(rank, present):
    rank.due(present)
    rank.on_message(intent("a", 3))
    assert rank.sent == [{"kind": "disk.late", "save": "a", "step": present}]
    assert not rank.due(present + 1)


def test_a_void_intent_is_not_taken_and_another_void_does_not_touch_it(rank):
    rank.on_message(intent("a", 3))
    rank.on_message({"kind": "disk.void", "save": "b"})
    rank.on_message({"kind": "disk.void", "save": "a"})
    assert not rank.due(3)
    rank.on_message(intent("c", 5))
    rank.on_message({"kind": "disk.void", "save": "a"})
    assert rank.due(5)


def test_a_loop_that_jumps_over_the_step_says_so(rank):
    rank.on_message(intent("a", 3))
    assert not rank.due(5)
    assert rank.sent == [{"kind": "disk.late", "save": "a", "step": 5}]


def test_a_snapshot_that_could_not_be_held_is_as_good_as_late(rank):
    rank.on_message(intent("a", 3))
    rank.due(3)
    rank.staged(1, lambda: 0)
    assert rank.sent == [{"kind": "disk.late", "save": "a", "step": 3}]


def test_a_new_generation_forgets_what_was_intended(rank):
    rank.on_message(intent("a", 9))
    rank.due(8)
    rank.rewound(5)
    assert not rank.due(9)
    rank.rewound(5)
    rank.on_message(intent("b", 7))
    assert rank.due(7)


def test_problems_are_told_once(rank):
    rank.on_message({"kind": "disk.problem", "text": "rank 3: no space"})
    assert rank.problems() == ["rank 3: no space"]
    assert rank.problems() == []
    rank.damaged(20, "torn")
    assert rank.sent == [{"kind": "disk.damaged", "step": 20, "text": "torn"}]


def test_what_was_measured_is_told_of_the_step_that_is_saved_alone(rank):
    rank.measured(2, {"loss": 1.0})
    rank.on_message(intent("a", 3))
    rank.measured(2, {"loss": 1.0})
    rank.measured(3, {"loss": 0.5})
    rank.due(3)
    rank.measured(3, {})
    rank.measured(4, {"loss": 0.1})
    assert rank.sent == [{"kind": "disk.measured", "step": 3, "metrics": {"loss": 0.5}}]
