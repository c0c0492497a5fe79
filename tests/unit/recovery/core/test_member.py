"""One worker's own table: its rows, its paths, and what it refuses."""

import pytest

from everstep.errors import ProtocolError
from everstep.recovery.core import member
from everstep.recovery.core.member import Action, Own, Phase, begin, step

P, A = Phase, Action


def run(own, *events):
    """Step through `events`; return where it ends and all that was ordered on the way."""
    done = []
    for event in events:
        own, actions = step(own, event)
        done += actions
    return own, done


def test_every_phase_and_event_stands_in_the_table():
    assert set(member.TRANSITIONS) == set(P)
    listed = {event for row in member.TRANSITIONS.values() for event in row}
    assert listed == set(member.Event.__args__)


def test_happy_path():
    own, done = run(begin(), member.Entered(0), member.Called(), member.Returned(), member.Finished(0))
    assert own == Own(P.DONE, 0)
    assert done == [A.BEGIN, A.RUN, A.REPORT_COMPLETED, A.RETURN]


def test_the_one_that_raised_is_told_afterwards_and_goes_on():
    running, _ = run(begin(), member.Entered(0), member.Called())
    own, done = run(running, member.Raised(), member.Told(0), member.Healthy(), member.Told(0), member.Entered(1))
    assert own == Own(P.RUNNING, 1)
    assert done == [A.REPORT_FAULT, A.ABORT, A.CLEAN, A.ARRIVE, A.RUN]


@pytest.mark.parametrize("end", [member.Unwound(), member.Returned(), member.Raised()])
def test_a_peer_is_interrupted_however_its_function_ends(end):
    running, _ = run(begin(), member.Entered(3), member.Called())
    own, done = run(running, member.Told(3), member.Told(3), end, member.Healthy())
    assert own == Own(P.WAITING, 3)
    assert done == [A.ABORT, A.INTERRUPT, A.CLEAN, A.ARRIVE]


def test_a_completed_member_is_sent_back():
    running, _ = run(begin(), member.Entered(0), member.Called())
    own, done = run(running, member.Returned(), member.Told(0), member.Healthy(), member.Entered(1))
    assert own == Own(P.RUNNING, 1)
    assert done == [A.REPORT_COMPLETED, A.ABORT, A.CLEAN, A.ARRIVE, A.RUN]


def test_recalled_from_its_script_it_arrives_at_once():
    own, done = run(begin(), member.Entered(0), member.Told(0))
    assert (own, done) == (Own(P.RECALLED, 0), [A.BEGIN, A.ARRIVE])
    assert run(own, member.Entered(1), member.Called()) == (Own(P.RUNNING, 1), [A.RUN])
    assert run(own, member.Called(), member.Entered(1)) == (Own(P.RUNNING, 1), [A.RUN])


def test_news_that_crossed_an_end_already_declared():
    completing, _ = run(begin(), member.Entered(0), member.Called(), member.Returned())
    cleaned, _ = run(completing, member.Told(0), member.Healthy())
    assert run(cleaned, member.Finished(0)) == (Own(P.DONE, 0), [A.RETURN])
    cleaning, _ = run(completing, member.Told(0))
    for verdict in (member.Healthy(), member.Unhealthy()):
        assert run(cleaning, member.Finished(0), verdict) == (Own(P.DONE, 0), [A.RETURN])


@pytest.mark.parametrize("phase", [p for p in P if p is not P.LEFT])
def test_a_lost_agent_ends_every_phase(phase):
    assert step(Own(phase, 0), member.LinkLost()) == (Own(P.LEFT, 0), (A.LEAVE,))


@pytest.mark.parametrize("event", [member.Told(1), member.Finished(1), member.Entered(1), member.Entered(2)])
def test_old_notices_are_void(event):
    for phase in P:
        own = Own(phase, 2)
        assert step(own, event) == (own, ())


@pytest.mark.parametrize(
    ("own", "event"),
    [
        (Own(P.RUNNING, 0), member.Finished(0)),
        (Own(P.RUNNING, 0), member.Entered(1)),
        (Own(P.RUNNING, 0), member.Unwound()),
        (Own(P.RUNNING, 0), member.Told(1)),
        (Own(P.WAITING, 0), member.Told(1)),
        (Own(P.WAITING, 0), member.Finished(1)),
        (Own(P.RUNNING, 0), member.Excluded()),
        (Own(P.FRESH), member.Returned()),
    ],
)
def test_what_cannot_follow_is_refused_and_changes_nothing(own, event):
    before = Own(own.phase, own.generation)
    with pytest.raises(ProtocolError, match=r"Expected: .*see docs/recovery\.md") as caught:
        step(own, event)
    assert type(event).__name__ in str(caught.value)
    assert own.phase.value in str(caught.value)
    assert own == before
