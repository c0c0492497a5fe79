"""What scripts ask of their launcher: heard at a look, done when who asked has ended, at the latest in two seconds."""

import os
from types import SimpleNamespace

import pytest

from everstep.launcher.agent.monitors import CONTINUE, EXCLUDE, LEAVE_S, SHUTDOWN, Monitors
from everstep.launcher.agent.worker import Worker
from everstep.process.page import Page


class Agent:
    def __init__(self) -> None:
        self.timers, self.said, self.excluded, self.notices, self.workers = [], [], [], [], []
        for rank in range(2):
            fd = Page.create(str(rank))
            worker = Worker(SimpleNamespace(pid=os.getpid()), fd, Page(fd), rank, rank)
            self.workers.append(worker)
        self.crew = SimpleNamespace(ranks=dict(enumerate(self.workers)))
        self.loop = SimpleNamespace(later=lambda delay_s, call: self.timers.append((delay_s, call)))
        self.nodes = SimpleNamespace(say=self.said.append, exclude=self.excluded.append)
        self.monitors = Monitors(self)

    def notice(self, text, level="info"):
        self.notices.append(text)

    def ask(self, rank, action, text="why"):
        self.workers[rank].page.monitor.request(action, text)


@pytest.fixture
def agent():
    made = Agent()
    yield made
    for worker in made.workers:
        if worker.last is None:
            worker.close()


def test_the_end_of_the_job_comes_when_who_asked_has_ended(agent):
    agent.ask(1, SHUTDOWN, "loss is NaN")
    agent.monitors.look()
    agent.monitors.look()
    assert agent.said == []
    assert len(agent.notices) == len(agent.timers) == 1
    agent.workers[1].close()
    agent.monitors.gone(agent.workers[1])
    (end,) = agent.said
    assert (end.code, end.reason) == (93, "rank 1 has asked for the end of the job, without a restart: loss is NaN")
    agent.timers[0][1]()
    assert len(agent.said) == 1


def test_or_two_seconds_later_where_it_goes_on(agent):
    agent.ask(0, SHUTDOWN)
    agent.monitors.look()
    ((delay_s, call),) = agent.timers
    assert delay_s == LEAVE_S
    call()
    assert [end.code for end in agent.said] == [93]


def test_what_a_process_asks_with_its_last_breath_is_heard(agent):
    """No look has come between the request and the end."""
    agent.ask(0, EXCLUDE, "GPU 3 has fallen off the bus")
    agent.workers[0].close()
    agent.monitors.gone(agent.workers[0])
    assert agent.excluded == ["rank 0 has asked that this node be left out: GPU 3 has fallen off the bus"]


def test_to_go_on_is_told_and_nothing_else(agent):
    agent.ask(0, CONTINUE)
    agent.ask(1, 77, "nonsense")
    agent.monitors.look()
    assert agent.notices == ["rank 0 asks for nothing: why", "rank 1 asks for 77: nonsense"]
    assert agent.timers == agent.said == agent.excluded == []
