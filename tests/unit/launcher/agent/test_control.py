"""One agent answers for all nodes: whom it asks, whom it waits for, and what a flood of questions costs."""

import json
import signal
from collections import Counter
from types import SimpleNamespace

import pytest

from everstep.launcher.agent import control
from everstep.launcher.agent.control import AT_ONCE, FRESH_S, Control
from everstep.launcher.control.core.http import Request


class Loop:
    def __init__(self):
        self.now, self.due = 0.0, []
        self.clock = SimpleNamespace(now=lambda: self.now)

    def later(self, delay_s, call):
        self.due.append((self.now + delay_s, call))

    def pass_(self, seconds):
        self.now += seconds
        due, self.due = [c for at, c in self.due if at <= self.now], [(at, c) for at, c in self.due if at > self.now]
        for call in due:
            call()


class Agents:
    """All agents of one job; what they tell each other waits in `post`."""

    def __init__(self, count):
        self.loop, self.post, self.deaf = Loop(), [], set()
        self.killed, self.notices, self.said = [], [], []
        names = [f"node-{n}" for n in range(count)]
        self.members = [SimpleNamespace(rank=n, node=names[n // 2]) for n in range(2 * count)]
        self.present = dict.fromkeys(names, "a")
        self.controls = {name: self.control(name) for name in names}
        self.looked = Counter()

    def control(self, name):
        nodes = SimpleNamespace(name=name, present=self.present)
        telemetry = SimpleNamespace(sinks=[])
        agent = SimpleNamespace(loop=self.loop, nodes=nodes, telemetry=telemetry, nursery=SimpleNamespace(job="j"))
        agent.config = SimpleNamespace(control=None, grace_s=15.0)
        agent.draining, agent.ending = SimpleNamespace(begun=False), None
        agent.drain = lambda *, why: (self.said.append(why), setattr(agent.draining, "begun", True))
        agent.roster = SimpleNamespace(world_size=2 * len(self.present), members=self.members)
        agent.crew = SimpleNamespace(ranks={m.rank: self.worker(m.rank) for m in self.members if m.node == name})
        agent.notice = lambda text, level="info": self.notices.append(text)
        nodes.say = self.said.append
        made = Control(agent)
        made.start(SimpleNamespace(tell=lambda to, message: self.post.append((name, to, message))))
        return made

    def worker(self, rank):
        process = SimpleNamespace(pid=100 + rank, signal=lambda number: self.killed.append((rank, number)))
        return SimpleNamespace(process=process, last=None)

    def kill(self, **wish):
        return self.post_to("/v1/kill", wish)

    def post_to(self, path, wish):
        got = []
        one = self.controls["node-0"]
        headers = {"authorization": f"Bearer {one._token}"}
        one._serve(Request("POST", path, headers, json.dumps(wish).encode()), got.append)
        self.deliver()
        self.loop.pass_(control.LOOK_S)
        (response,) = got
        return response.status, json.loads(response.body)

    def deliver(self):
        while self.post:
            sender, to, message = self.post.pop(0)
            if to not in self.deaf and to in self.present:
                self.controls[to].on_node_message(sender, json.loads(json.dumps(message)))

    def ask(self, node="node-0", path="/v1/ps"):
        got = []
        one = self.controls[node]
        one._serve(Request("GET", path, {"authorization": f"Bearer {one._token}"}), got.append)
        return got


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    looks = Counter()

    def view(agent, recent, now):
        looks[agent.nodes.name] += 1
        return {"node": agent.nodes.name, "look": looks[agent.nodes.name]}

    monkeypatch.setattr(control, "node_view", view)
    return looks


def read(got):
    (response,) = got
    body = json.loads(response.body)
    return [node["node"] for node in body["nodes"]], body["silent"]


@pytest.mark.parametrize("asked", ["node-0", "node-2"])
def test_any_agent_answers_for_all_nodes(asked):
    agents = Agents(3)
    got = agents.ask(asked)
    agents.deliver()
    assert read(got) == (["node-0", "node-1", "node-2"], [])


def test_a_node_that_does_not_answer_is_named_in_time_and_one_that_is_lost_is_not_waited_for():
    agents = Agents(3)
    agents.deaf = {"node-1"}
    got = agents.ask()
    agents.deliver()
    assert got == []
    agents.loop.pass_(control.LOOK_S)
    assert read(got) == (["node-0", "node-2"], ["node-1"])
    agents.loop.pass_(FRESH_S)
    got = agents.ask()
    agents.deliver()
    del agents.present["node-1"]
    agents.controls["node-0"].on_nodes(agents.present)
    assert read(got) == (["node-0", "node-2"], [])


def test_of_many_nodes_some_are_asked_at_a_time_and_silent_ones_keep_no_other_from_being_asked():
    agents = Agents(200)
    got = agents.ask()
    assert len(agents.post) == AT_ONCE
    agents.deaf = {f"node-{n}" for n in range(1, AT_ONCE + 1)}
    agents.deliver()
    assert got == []
    agents.loop.pass_(control.NEXT_S)
    agents.deliver()
    agents.loop.pass_(control.LOOK_S)
    nodes, silent = read(got)
    assert set(silent) == agents.deaf
    assert len(nodes) == 200 - AT_ONCE


def test_a_flood_of_questions_is_one_look(plain):
    agents = Agents(2)
    got = [agents.ask() for _ in range(1000)]
    assert plain == {"node-0": 1}
    assert len(agents.post) == 1
    agents.deliver()
    assert all(read(each)[1] == [] for each in got)
    assert plain == {"node-0": 1, "node-1": 1}
    assert read(agents.ask()) == read(got[0])
    assert plain == {"node-0": 1, "node-1": 1}
    agents.loop.pass_(FRESH_S)
    agents.ask()
    agents.deliver()
    assert plain == {"node-0": 2, "node-1": 2}


def test_an_answer_that_comes_late_or_twice_or_unasked_is_nothing():
    agents = Agents(2)
    agents.deaf = {"node-1"}
    got = agents.ask()
    agents.deliver()
    agents.loop.pass_(control.LOOK_S)
    for number in (0, 0, 77):
        agents.controls["node-0"].on_node_message("node-1", {"kind": "control.answer", "number": number, "found": {}})
    assert len(got) == 1


def test_without_the_token_nobody_is_asked():
    agents = Agents(2)
    got = []
    agents.controls["node-0"]._serve(Request("GET", "/v1/ps", {}), got.append)
    assert got[0].status == 401
    assert agents.post == []


@pytest.mark.parametrize("rank", [1, 4])
def test_a_rank_is_killed_by_the_agent_of_its_node_and_the_ledger_says_who_wanted_it(rank):
    agents = Agents(3)
    assert agents.kill(rank=rank) == (200, {"rank": rank, "node": f"node-{rank // 2}", "pid": 100 + rank})
    assert agents.killed == [(rank, signal.SIGKILL)]
    assert agents.notices == [f"rank {rank} (pid {100 + rank}) is killed: an operator asked for it"]


def test_what_cannot_be_killed_is_told_and_nothing_else_is():
    agents = Agents(3)
    status, told = agents.kill(rank=6)
    assert (status, "its ranks are 0 to 5" in told["error"]) == (409, True)
    agents.controls["node-2"]._agent.crew.ranks[5].last = "it has ended"
    del agents.controls["node-2"]._agent.crew.ranks[4]
    for rank in (4, 5):
        status, told = agents.kill(rank=rank)
        assert (status, "no process now" in told["error"]) == (409, True)
    agents.deaf = {"node-1"}
    status, told = agents.kill(rank=2)
    assert (status, "node-1 did not answer" in told["error"]) == (409, True)
    agents.controls["node-0"]._agent.roster = None
    assert agents.kill(rank=0)[0] == 409
    assert agents.kill(rank="0")[0] == 400
    assert agents.killed == []


def test_the_end_of_the_job_is_said_to_all_and_asks_for_no_other_try():
    agents = Agents(2)
    assert agents.kill(job=True) == (200, {"ending": True})
    (said,) = agents.said
    assert said.code == 93
    assert "operator" in said.reason


def test_a_node_is_left_out_by_its_own_agent_where_the_others_can_do_without_it():
    agents = Agents(3)
    status, told = agents.post_to("/v1/exclude", {"node": "node-9"})
    assert (status, "node-0, node-1, node-2" in told["error"]) == (409, True)
    assert agents.post_to("/v1/exclude", {"node": 1})[0] == 400
    asked = []
    agents.controls["node-1"]._agent.nodes.leave = lambda why, then: (asked.append(why), then("too few"))
    assert agents.post_to("/v1/exclude", {"node": "node-1"}) == (409, {"error": "too few"})
    agents.controls["node-1"]._agent.nodes.leave = lambda why, then: (asked.append(why), then(""))
    status, told = agents.post_to("/v1/exclude", {"node": "node-1"})
    assert (status, told["node"]) == (200, "node-1")
    assert asked == ["an operator asked, with everstep exclude"] * 2


def test_a_job_is_drained_once_and_not_where_it_ends():
    agents = Agents(2)
    assert agents.post_to("/v1/drain", {"now": True})[0] == 400
    assert agents.said == []
    assert agents.post_to("/v1/drain", {}) == (200, {"draining": True, "grace_s": 15.0})
    assert agents.said == ["an operator, with everstep drain"]
    assert agents.post_to("/v1/drain", {})[0] == 409
    agents.controls["node-0"]._agent.draining.begun = False
    agents.controls["node-0"]._agent.ending = "it ends"
    assert agents.post_to("/v1/drain", {})[0] == 409
    assert len(agents.said) == 1


def test_when_it_is_over_who_still_waits_hears_nothing_and_nothing_fails():
    agents = Agents(2)
    got = agents.ask()
    agents.controls["node-0"].close()
    agents.deliver()
    agents.loop.pass_(10.0)
    assert got == []
