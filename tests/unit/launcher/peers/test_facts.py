"""What peers tell each other comes back as it was, and nonsense is refused."""

import json

import pytest

from everstep.launcher.peers.core import facts
from everstep.recovery.core import assignment, words
from everstep.recovery.core.assignment import Standby
from everstep.recovery.core.words import Facts, Fault, Incarnation

WHO = Incarnation("0c0f", 41, 7)
HERE = Facts("rank-0000001", 0, fresh=True, former_rank=1, dirt=("autocast", "thread x did not end"))
ROSTER = assignment.first(0, 1, {WHO: Standby(HERE, 0)})
EVENTS = [
    words.Announced(WHO, HERE),
    words.Arrived(3, WHO, HERE),
    words.Died(WHO, words.UNKNOWN_STATUS, "completed", 5, 2),
    words.Died(WHO, -9),
    words.Faulted(Fault(2, "exception", "worker", WHO, 1, 4, "ValueError: ünd")),
    words.Faulted(Fault(2, "stall", "page")),
    words.Completed(3, WHO),
    words.Published(ROSTER),
    words.Published(assignment.final(ROSTER, "")),
    words.Wedged(WHO, "stopped", 3),
    words.EndRequested(1, "rank 0: SystemExit: 3"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_fact_comes_back_as_it_was(event):
    assert facts.decode(json.loads(json.dumps(facts.encode(event)))) == event


def test_the_hub_may_say_where_the_store_is():
    body = facts.encode(words.Published(ROSTER)) | {"store": ["host", 1]}
    assert facts.decode(body) == words.Published(ROSTER)


@pytest.mark.parametrize("event", [words.Ticked(), words.Drained(1)])
def test_what_is_a_watchers_own_does_not_travel(event):
    with pytest.raises(ValueError, match="own"):
        facts.encode(event)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"is": "Ticked"},
        {"is": "Completed"},
        {"is": "Completed", "generation": 1, "incarnation": "no dots"},
        {"is": "Completed", "generation": 1, "incarnation": "a.1.2", "more": 1},
        {"is": "Announced", "incarnation": "a.1.2", "facts": {"node": "a"}},
        {"is": "Faulted", "fault": 3},
        {"is": "Published", "roster": {"members": [[1, 2]]}},
    ],
)
def test_nonsense_is_refused(body):
    with pytest.raises(ValueError, match="not a fact"):
        facts.decode(body)
