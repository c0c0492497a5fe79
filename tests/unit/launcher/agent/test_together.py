"""What an agent of several nodes does where it is cut off, or did not run for a while."""

import signal
from types import SimpleNamespace

import pytest

from everstep.launcher.agent.together import Together
from everstep.launcher.config import LaunchConfig
from everstep.launcher.nodes.joining import Joined
from everstep.launcher.nodes.membership import Membership
from everstep.recovery.core import words
from everstep.recovery.core.words import Incarnation, Member, Policy, Roster
from everstep.recovery.core.world import Phase


class Process:
    def __init__(self, name):
        self.name, self.signals = name, []

    def signal(self, number):
        self.signals.append(number)


class Agent:
    def __init__(self, phase):
        members = (
            Member(0, Incarnation("node-0", 1, 1), "node-0", 0, True, "started"),
            Member(1, Incarnation("node-1", 2, 1), "node-1", 0, True, "started"),
        )
        self.world = SimpleNamespace(phase=phase, members=members, roster=Roster(0, 0, members))
        self.processes = [Process(name) for name in ("worker-0", "writer-0", "spare-3", "store")]
        self.config = LaunchConfig(script="s")
        self.nursery = SimpleNamespace(processes=dict(enumerate(self.processes)))
        self.loop = SimpleNamespace(clock=SimpleNamespace(now=lambda: 0.0), later=lambda delay_s, call: None)
        self.ending, self.ends, self.told = None, [], []
        stream = SimpleNamespace(send=lambda message: None, close=lambda: None)
        self.pipe = SimpleNamespace(stream=stream, said=[], ended=False)
        self.line = Membership(self.loop, Joined("node-0", {"node-0": "a", "node-1": "b"}, self.pipe))
        self.nodes = Together(self, self.line)
        self.line.begin(self.nodes)

    def end(self, command):
        self.ends.append(command)

    def tell(self, event):
        self.told.append(event)

    def notice(self, text, level="info"):
        pass


def wished(agent):
    heard = []
    said = []
    agent.pipe.stream.send = said.append
    agent.nodes.leave("an operator asked", heard.append)
    leaves = [message["fact"] for message in said if message["kind"] == "fact" and message["fact"]["is"] == "leaves"]
    return heard, leaves


def test_a_node_that_is_to_leave_says_so_to_all_and_answers_before_it_goes():
    agent = Agent(Phase.RUNNING)
    agent.world.policy = Policy(world_size=2, min_world_size=1, local_world_size=1)
    heard, leaves = wished(agent)
    assert (heard, leaves) == ([], [{"is": "leaves", "node": "node-0"}])
    assert wished(agent)[0] == ["node-0 is being left out already, or is cut off"]
    ends = agent.ends
    agent.nodes._wish = (agent.nodes._wish[0], lambda why: heard.append((why, list(ends))))
    agent.nodes.node_leaves("node-0")
    assert heard == [("", [])], "the answer goes out while there is a line"
    (end,) = agent.ends
    assert end.code == 75
    assert end.reason.startswith("node-0 is left out: an operator asked")


def test_a_node_stays_where_too_few_would_be_left_and_may_be_asked_again():
    agent = Agent(Phase.RUNNING)
    agent.world.policy = Policy(world_size=2, local_world_size=1)
    for _ in range(2):
        heard, _ = wished(agent)
        agent.nodes.node_leaves("node-0")
        (why,) = heard
        assert "too few would be left without node-0" in why
    assert agent.ends == []


@pytest.mark.parametrize("phase", [Phase.GATHERING, Phase.PUBLISHING, Phase.RUNNING, Phase.DRAINING])
def test_who_is_cut_off_ends_at_once_and_waits_for_no_writer(phase):
    agent = Agent(phase)
    agent.pipe.on_end()
    (end,) = agent.ends
    assert end.code == 75
    assert "the connection to the hub has ended" in end.reason
    assert agent.nodes.cut_off


def test_once_the_end_is_published_only_the_ends_of_our_own_ranks_count():
    agent = Agent(Phase.FINISHING)
    agent.pipe.on_end()
    assert agent.ends == []
    assert agent.told == [words.Died(Incarnation("node-1", 2, 1), 0)]
    assert not agent.nodes.cut_off  # what is still outstanding was meant by all
    agent.nodes.say(words.Died(Incarnation("node-0", 1, 1), 0))
    assert agent.told[-1] == words.Died(Incarnation("node-0", 1, 1), 0)  # there is no other way to be heard


def test_on_hold_nobody_writes_and_the_store_serves_on():
    agent = Agent(Phase.RUNNING)
    agent.nodes.hold(on=True)
    agent.nodes.hold(on=False)
    assert [process.signals for process in agent.processes] == [[signal.SIGSTOP, signal.SIGCONT]] * 3 + [[]]


def test_a_node_that_leaves_itself_out_says_nothing_more_and_no_good_bye():
    """Its agent ends what runs here first; that its connection ends then is what the others hear."""
    agent = Agent(Phase.RUNNING)
    said = []
    agent.pipe.stream.send = said.append
    agent.nodes.exclude("rank 1 has asked for it")
    (end,) = agent.ends
    assert end.code == 75
    assert end.reason == "rank 1 has asked for it; the others go on without node-0"
    agent.nodes.ending(end)
    agent.nodes.say(words.Died(Incarnation("node-0", 1, 1), -9))
    agent.line.leave()
    assert said == []
    assert agent.nodes.cut_off
