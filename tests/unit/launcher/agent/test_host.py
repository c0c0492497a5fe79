"""What companions are offered by their agent on one node, where others are nodes apart."""

from types import SimpleNamespace

from everstep.clock import SYSTEM
from everstep.events import Notice
from everstep.launcher.agent.host import AgentHost, OwnHost
from everstep.launcher.agent.single import Single
from everstep.launcher.config import LaunchConfig
from everstep.process.loop import Loop


class Rider:
    """A companion that works with those of its prefix on other nodes."""

    prefix = "rider"

    def __init__(self):
        self.nodes, self.heard = [], []

    def start(self, host):
        self.host = host

    def on_nodes(self, nodes):
        self.nodes.append(dict(nodes))

    def on_node_message(self, node, message):
        self.heard.append((node, message["text"]))

    def close(self):
        pass


class Plain:
    """One that knows nothing of nodes."""

    prefix = "plain"

    def start(self, host):
        self.host = host

    def close(self):
        pass


class Agent:
    def __init__(self, *companions):
        self.loop = Loop(SYSTEM)
        self.config, self.run_dir = LaunchConfig(script="s", nproc=2), "r"
        self.crew, self.nursery = SimpleNamespace(ranks={}), None
        self.events = []
        self.telemetry = SimpleNamespace(emit=self.events.append)
        self.nodes = Single(self)
        self.host = AgentHost(self, companions)
        self.host.start()
        self.host.nodes(self.nodes.present)

    def tell(self, event):
        raise AssertionError(event)

    def turn(self):
        self.loop.later(0.0, lambda: None)
        self.loop.turn()

    def recheck(self):
        pass


def test_a_job_of_one_node_has_itself_for_its_nodes_and_hears_what_it_tells_itself_later():
    rider, plain = Rider(), Plain()
    agent = Agent(rider, plain)
    try:
        assert isinstance(rider.host, OwnHost)
        assert rider.host.node == "node-0"
        assert rider.nodes == [{"node-0": "127.0.0.1"}]
        rider.host.tell("node-0", {"kind": "rider.word", "text": "one"})
        rider.host.tell("node-7", {"kind": "rider.word", "text": "nobody"})
        plain.host.tell("node-0", {"kind": "plain.word", "text": "unheard"})
        assert rider.heard == []
        agent.turn()
        assert rider.heard == [("node-0", "one")]
    finally:
        agent.loop.close()


def test_nonsense_from_another_node_is_told_of_and_ends_nothing():
    rider = Rider()
    agent = Agent(rider)
    try:
        agent.host.node_message("node-1", "rider", {"kind": "rider.word"})
        agent.host.node_message("node-1", "other", {"kind": "other.word"})
        (told,) = agent.events
        assert isinstance(told, Notice)
        assert "node-1" in told.text
        assert "rider.word" in told.text
    finally:
        agent.loop.close()
