"""The agents' words when a job is asked to end: who is asked, who is told, and what becomes of it when it cannot be."""

import signal
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from everstep.launcher.agent.draining import Draining
from everstep.recovery.core import words
from everstep.recovery.core.world import Phase

GRACE_S = 20.0


@dataclass
class Rank:
    step: int
    attached: bool = True
    drains: bool = True
    last: object = None

    def look(self):
        return SimpleNamespace(step=self.step)


class Ranks(dict):
    @property
    def ranks(self):
        return self

    def step(self):
        return min((worker.step for worker in self.values()), default=None) or None


@dataclass
class Node:
    """As much of an agent as is used; what it says to ranks and nodes lies in the job's own lists."""

    job: "Job"
    name: str
    crew: Ranks
    ending: object = None
    phase: Phase = Phase.RUNNING
    passed: list = field(default_factory=list)
    durable: int | None = 0
    causes: tuple = ()
    members: tuple = (1,)

    def __post_init__(self):
        self.config = SimpleNamespace(grace_s=GRACE_S)
        self.loop = SimpleNamespace(
            clock=self.job, later=lambda delay_s, call: self.job.timers.append((self.job.time + delay_s, call))
        )
        members = [SimpleNamespace(node=name) for name in self.job.at_work]
        self.roster = SimpleNamespace(generation=4, members=members)
        self.nodes = SimpleNamespace(name=self.name, present=self.job.names, say=self.job.said.append)
        self.host = SimpleNamespace(durable=lambda: self.durable)
        self.draining = Draining(self)
        self.draining.start(self)

    @property
    def world(self):
        return SimpleNamespace(
            phase=self.phase, ranks=self.members, has_completed=lambda who: False, causes=self.causes
        )

    def signalled(self, number):
        self.passed.append(number)

    def end(self, command):
        self.ending = SimpleNamespace(command=command, hurry=self.passed.append)

    def notice(self, text, level="info"):
        self.job.notices.append(text)

    def send(self, rank, message, fds=()):
        self.job.to_ranks.append((rank, dict(message)))

    def tell(self, node, message):
        self.job.waiting.append((self.name, node, dict(message)))


class Job:
    def __init__(self, *crews):
        self.time, self.timers, self.said, self.notices, self.to_ranks, self.waiting = 100.0, [], [], [], [], []
        self.names = {f"node-{number}": "" for number in range(len(crews))}
        self.at_work = [name for name, crew in zip(self.names, crews, strict=True) if crew]
        self.nodes = [Node(self, name, Ranks(crew)) for name, crew in zip(self.names, crews, strict=True)]

    def now(self):
        return self.time

    def deliver(self):
        while self.waiting:
            sender, to, message = self.waiting.pop(0)
            self.nodes[list(self.names).index(to)].draining.on_node_message(sender, message)

    def stands(self, node, rank, begun, generation=4):
        told = {"kind": "drain.stands", "generation": generation, "begun": begun}
        self.nodes[node].draining.on_message(rank, told, [])
        self.deliver()

    def pass_time(self, seconds):
        self.time += seconds
        for when, call in sorted(self.timers, key=lambda timer: timer[0]):
            if when <= self.time:
                self.timers.remove((when, call))
                call()

    def told(self, verb):
        return [(rank, m.get("step")) for rank, m in self.to_ranks if m["kind"] == f"drain.{verb}"]


def test_all_nodes_ask_their_ranks_and_tell_them_the_newest_step_of_any():
    job = Job({0: Rank(7), 1: Rank(7)}, {2: Rank(8)}, {})  # the last waits without ranks
    job.nodes[1].draining.begin(signal.SIGTERM, "SIGTERM from outside")
    job.deliver()
    assert [rank for rank, _ in job.told("stand")] == [2, 0, 1]
    for node, rank, begun in ((0, 0, 8), (0, 1, 8), (1, 2, 9)):
        assert job.told("until") == []
        job.stands(node, rank, begun)
    assert sorted(job.told("until")) == [(0, 9), (1, 9), (2, 9)]
    assert job.said == []


def test_a_node_without_ranks_that_says_nothing_keeps_nobody_waiting():
    job = Job({0: Rank(7)}, {1: Rank(7)}, {})
    job.nodes[2].draining.on_node_message = lambda *_: None  # frozen, or lost: no rank of the world was there
    job.nodes[0].draining.begin(signal.SIGTERM, "x")
    job.deliver()
    job.stands(0, 0, 8)
    job.stands(1, 1, 8)
    assert sorted(job.told("until")) == [(0, 8), (1, 8)]
    assert job.said == []


def test_words_of_another_generation_are_void():
    job = Job({0: Rank(7)})
    job.nodes[0].draining.begin(signal.SIGTERM, "x")
    job.stands(0, 0, 8, generation=3)
    assert job.told("until") == []


@pytest.mark.parametrize(
    "change", [{"attached": False}, {"drains": False}, {"last": object()}, {"phase": Phase.GATHERING}]
)
def test_where_not_all_can_be_asked_the_end_comes_at_once(change):
    job = Job({0: Rank(7), 1: Rank(7)})
    for name, value in change.items():
        setattr(job.nodes[0] if name == "phase" else job.nodes[0].crew[1], name, value)
    job.nodes[0].draining.begin(signal.SIGHUP, "x")
    assert job.to_ranks == []
    assert job.nodes[0].passed == [signal.SIGHUP]
    assert [event.code for event in job.said] == [129]


def test_a_job_that_has_not_begun_ends_at_once():
    job = Job({})
    job.nodes[0].phase, job.nodes[0].members = Phase.GATHERING, ()
    job.nodes[0].draining.begin(signal.SIGTERM, "x")
    assert [event.code for event in job.said] == [143]


def test_half_of_the_grace_is_for_the_step_and_all_of_it_for_all():
    job = Job({0: Rank(7)})
    job.nodes[0].draining.begin(signal.SIGUSR1, "x")
    job.stands(0, 0, 8)
    job.pass_time(GRACE_S / 2 - 1)
    assert job.said == []
    job.pass_time(2)
    assert [event.code for event in job.said] == [143], "as SIGTERM: the job is asked to end"
    assert job.nodes[0].draining.left_s == GRACE_S / 2 - 1


def test_a_write_that_is_slow_has_all_that_is_left_of_the_grace():
    job = Job({0: Rank(7)})
    job.nodes[0].draining.begin(signal.SIGTERM, "x")
    job.stands(0, 0, 8)
    job.nodes[0].phase = Phase.DRAINING
    job.pass_time(GRACE_S - 1)
    assert job.said == []
    job.pass_time(2)
    assert len(job.said) == 1


def test_a_fault_meanwhile_ends_it_and_one_before_does_not():
    job = Job({0: Rank(7)})
    job.nodes[0].draining.follow()
    job.nodes[0].draining.begin(signal.SIGTERM, "x")
    job.nodes[0].draining.follow()
    assert job.said == []
    job.nodes[0].phase = Phase.GATHERING
    job.nodes[0].draining.follow()
    assert len(job.said) == 1


def test_another_signal_counts_when_it_is_another():
    job = Job({0: Rank(7)})
    node = job.nodes[0]
    node.draining.begin(signal.SIGTERM, "x")
    node.draining.again("SIGTERM")
    assert node.ending is None
    job.pass_time(2)
    node.draining.again("SIGTERM")
    assert node.ending.command.code == 143
    assert node.passed == ["SIGTERM"]


@pytest.mark.parametrize(
    ("steps", "durable", "code", "words_"),
    [
        (9, 9, 143, "The checkpoint of step 9 is durable: the next start goes on from there"),
        (9, 6, 1, "Step 9 was done, and the newest durable checkpoint is of step 6"),
        (9, 0, 1, "Step 9 was done, and no checkpoint is durable"),
        (9, None, 143, "nothing was written: --checkpoint-dir is not given"),
        (0, 6, 143, "No step was done"),
        (None, 6, 143, "ended by x"),
    ],
)
def test_the_last_words_and_the_code_say_what_is_lost(steps, durable, code, words_):
    job = Job({} if steps is None else {0: Rank(steps)})
    job.nodes[0].durable = durable
    found, text = job.nodes[0].draining.verdict(143, "ended by x")
    assert (found, words_ in text) == (code, True)
    assert job.nodes[0].draining.verdict(75, "y") == (75, "y")


def test_the_step_that_counts_is_the_one_that_all_nodes_have_done():
    job = Job({0: Rank(30)}, {1: Rank(29)})
    for node in job.nodes:
        node.draining.begin(signal.SIGTERM, "x")
    for node in job.nodes:
        node.draining.ends(words.End(143, ""))
    job.deliver()
    job.nodes[0].durable = job.nodes[1].durable = 29
    assert [node.draining.verdict(143, "")[0] for node in job.nodes] == [143, 143]


def test_a_node_without_ranks_ends_with_the_code_of_those_whose_ranks_have_left():
    job = Job({0: Rank(7)}, {})
    job.nodes[0].draining.begin(signal.SIGTERM, "x")
    job.deliver()
    job.stands(0, 0, 7)
    assert job.nodes[1].draining.ends(words.End(0, "")).code == 0, "all steps are done: the job is"
    job.nodes[0].draining.on_message(0, {"kind": "drain.left", "generation": 4, "step": 7}, [])
    job.deliver()
    assert [node.draining.ends(words.End(0, "")).code for node in job.nodes] == [143, 143]
    assert "after step 7" in job.nodes[1].draining.ends(words.End(0, "")).reason


def test_ranks_that_have_left_make_the_end_a_signal_s_and_a_job_that_is_done_is_done():
    job = Job({0: Rank(7)})
    draining = job.nodes[0].draining
    draining.begin(signal.SIGTERM, "x")
    assert draining.ends(words.End(0, "")).code == 0
    draining.on_message(0, {"kind": "drain.left", "generation": 4, "step": 7}, [])
    assert draining.ends(words.End(0, "")).code == 143
    assert draining.ends(words.End(75, "")).code == 75
