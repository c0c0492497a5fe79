"""What an agent says to the others when it is asked to end before it has begun."""

import signal
from types import SimpleNamespace

import pytest

from everstep.launcher.early import Asked
from everstep.launcher.nodes.joining import Joined
from everstep.launcher.nodes.membership import Membership
from everstep.launcher.run import _asked_together


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (Asked(signal.SIGTERM), 143),
        (Asked(signal.SIGUSR1), 143),
        (Asked(signal.SIGHUP), 129),
        (KeyboardInterrupt(), 130),
    ],
)
def test_all_end_by_a_signal_to_one_that_has_met_them_but_not_by_one_to_who_waits_to_come_in(asked, code, late):
    said = []
    loop = SimpleNamespace(clock=SimpleNamespace(now=lambda: 0.0), later=lambda delay_s, call: None)
    stream = SimpleNamespace(send=said.append, close=lambda: None)
    pipe = SimpleNamespace(stream=stream, said=[], ended=False)
    line = Membership(loop, Joined("node-0", {"node-0": "a", "node-1": "b"}, pipe, late=late))
    with pytest.raises(type(asked)), _asked_together(line):
        raise asked
    facts = [message["fact"] for message in said if message["kind"] == "fact"]
    assert [(fact["is"], fact["code"]) for fact in facts] == ([] if late else [("EndRequested", code)])
    assert line.over is not late
    with pytest.raises(type(asked)), _asked_together(None):
        raise asked
