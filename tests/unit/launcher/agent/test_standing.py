"""Ranks are asked where they stand; who does not answer is looked at from outside, and never asked twice at once."""

from types import SimpleNamespace

import pytest

from everstep.launcher.agent import standing
from everstep.launcher.agent.standing import Standing


class Loop:
    """Calls what is due when it is told to."""

    def __init__(self):
        self.due, self.clock = [], SimpleNamespace(now=lambda: 5.0)

    def later(self, delay_s, call):
        self.due.append(call)

    def pass_(self):
        due, self.due = self.due, []
        for call in due:
            call()


class Spy:
    path = ""

    def __init__(self, loop):
        self.asked = []

    def look(self, pid, then):
        self.asked.append(pid)
        then([{"name": "MainThread", "first": True, "frames": []}] if self.path else [])


class Ranks:
    def __init__(self, count, *, wrapped=True):
        self.sent = []
        self.workers = {n: self.worker(n) for n in range(count)}
        crew = SimpleNamespace(ranks=self.workers)
        nodes, config = SimpleNamespace(name="node-0"), SimpleNamespace(wrapped=wrapped)
        self.loop = Loop()
        self.standing = Standing(SimpleNamespace(crew=crew, nodes=nodes, config=config), self.loop)
        self.told = []

    def worker(self, number):
        process = SimpleNamespace(
            pid=100 + number, name=f"worker-{number}", send=lambda m: self.sent.append((number, m))
        )
        return SimpleNamespace(process=process, last=None, rank=number)

    def ask(self):
        self.standing.ask(self.told.append)

    def answer(self, rank, waiting=False):
        self.standing.answered(rank, {"waiting": waiting, "threads": []})

    def whys(self):
        return {rank["rank"]: (rank["by"], rank["why"], rank["waiting"]) for rank in self.told[-1]["ranks"]}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(standing, "Spy", Spy)
    monkeypatch.setattr(standing, "rank_view", lambda agent, worker, now: {"rank": worker.rank})
    monkeypatch.setattr(standing.kernel, "place", lambda pid: "state T")


def test_when_all_have_answered_it_is_told_once_to_all_who_asked():
    ranks = Ranks(2)
    ranks.ask()
    ranks.ask()
    ranks.answer(1, waiting=True)
    assert ranks.told == []
    ranks.answer(0)
    ranks.answer(0)
    assert len(ranks.told) == 2
    assert ranks.whys() == {0: ("itself", "", False), 1: ("itself", "", True)}
    assert [rank for rank, _ in ranks.sent] == [0, 1]
    ranks.loop.pass_()
    assert len(ranks.told) == 2


def test_who_does_not_answer_is_looked_at_from_outside(monkeypatch):
    ranks = Ranks(2)
    ranks.ask()
    ranks.answer(0)
    ranks.loop.pass_()
    assert ranks.whys()[1] == ("", "does not answer (state T), py-spy, which could, is not installed", None)
    monkeypatch.setattr(Spy, "path", "/py-spy")
    ranks.ask()
    ranks.answer(0)
    ranks.loop.pass_()
    assert ranks.whys()[1] == ("py-spy", "does not answer (state T)", None)


def test_a_rank_that_reads_nothing_is_sent_one_question_however_often_it_is_asked():
    ranks = Ranks(1)
    for _ in range(5000):
        ranks.ask()
        ranks.loop.pass_()
    assert len(ranks.sent) == 1
    assert len(ranks.told) == 5000
    ranks.answer(0)  # it has come back
    ranks.ask()
    assert len(ranks.sent) == 2


def test_a_script_without_the_wrapper_is_not_asked():
    ranks = Ranks(2, wrapped=False)
    ranks.ask()
    assert ranks.sent == []
    assert ranks.whys() == dict.fromkeys(range(2), ("", "py-spy, which could, is not installed", None))
    ranks.loop.pass_()
    assert len(ranks.told) == 1


def test_an_answer_of_who_holds_the_rank_now_is_not_that_of_the_one_that_was_asked():
    ranks = Ranks(2)
    ranks.ask()
    ranks.answer(0)
    ranks.workers[1] = ranks.worker(1)
    ranks.answer(1)
    assert ranks.told == []
    ranks.loop.pass_()
    assert ranks.whys().keys() == {0, 1}


def test_where_nobody_holds_a_rank_nothing_is_told_at_once():
    ranks = Ranks(0)
    ranks.ask()
    assert ranks.told == [{"node": "node-0", "ranks": []}]
