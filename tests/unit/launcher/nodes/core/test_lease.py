"""Leases: whoever is cut off has ended its workers before its ranks are given away, on whichever way words are lost."""

import random

import pytest

from everstep.launcher.nodes.core.lease import GIVEN_AWAY_S, HOLD_S, JUMP_S, LEASE_S, Lease, Silence, Standing

LOOK_S = 0.2


def test_a_lease_runs_from_the_sending_of_what_was_acknowledged():
    lease = Lease(0.0, 0.0)
    for tick in range(50):  # answers come, and each is as old as can be
        lease.acknowledged(0.0)
        assert lease.look(tick * LOOK_S) is (Standing.GOOD if tick * LOOK_S <= LEASE_S else Standing.CUT_OFF)


def test_an_old_answer_takes_nothing_back():
    lease = Lease(0.0, 0.0)
    lease.acknowledged(5.0)
    lease.acknowledged(1.0)
    lease.looked_s = 10.0
    assert lease.look(10.5) is Standing.GOOD


def test_who_did_not_run_waits_for_an_answer_with_its_workers_standing_still():
    lease = Lease(0.0, 0.0)
    assert lease.look(60.0) is Standing.ON_HOLD
    assert lease.look(60.0 + HOLD_S) is Standing.ON_HOLD
    lease.acknowledged(60.0)
    assert lease.look(60.2 + LEASE_S - 1) is Standing.GOOD


def test_who_waits_for_an_answer_in_vain_is_cut_off():
    lease = Lease(0.0, 0.0)
    now, standing = 60.0, lease.look(60.0)
    while standing is Standing.ON_HOLD:
        now += LOOK_S
        standing = lease.look(now)
    assert standing is Standing.CUT_OFF
    assert now == pytest.approx(60 + HOLD_S, abs=2 * LOOK_S)


class Link:
    """An agent and the hub on a link that fails at some moment, with words under way for up to half a second."""

    def __init__(self, lost, seed):
        self.rng, self.lost = random.Random(f"{lost} {seed}"), lost
        self.fails_s = self.rng.uniform(1.0, 5.0)
        self.skew_s = self.rng.uniform(-1e6, 1e6)  # the hub's clock shows something else
        self.lease, self.silence = Lease(0.0, 0.0), Silence.of_nobody()
        self.silence.heard(1, self.skew_s)
        self.now = self.beat_s = 0.0
        self.up, self.down = [], []
        self.ended_s = self.given_s = None

    def takes(self, way):
        """Does the link take a word in this direction now?"""
        if self.now <= self.fails_s:
            return True
        return self.rng.random() < 0.3 if self.lost == "by and by" else self.lost not in (way, "both")

    def send(self, way, queue, word):
        if self.takes(way):
            queue.append((self.now + self.rng.uniform(0.0, 0.5), word))

    def arrived(self, queue):
        found = [one for one in queue if one[0] <= self.now]
        queue[:] = [one for one in queue if one[0] > self.now]
        return [word for _, word in found]

    def step(self):
        self.now += self.rng.uniform(0.05, 0.3)
        if self.now - self.beat_s > 1.0 and self.ended_s is None:
            self.beat_s = self.now
            self.send("to the hub", self.up, self.now)
        for sent_s in self.arrived(self.up):
            self.silence.heard(1, self.now + self.skew_s)
            self.send("from the hub", self.down, sent_s)
        for sent_s in self.arrived(self.down):
            self.lease.acknowledged(sent_s)
        if self.ended_s is None and self.lease.look(self.now) is Standing.CUT_OFF:
            self.ended_s = self.now
        _, gone = self.silence.look(self.now + self.skew_s)
        if gone:
            self.given_s = self.now


@pytest.mark.parametrize("lost", ["to the hub", "from the hub", "both", "by and by"])
def test_workers_are_ended_before_their_ranks_are_given_away(lost):
    for seed in range(300):
        link = Link(lost, seed)
        while link.given_s is None and link.now < 200:
            link.step()
        if link.given_s is not None:
            assert link.ended_s is not None, seed
            assert link.ended_s < link.given_s, seed
        else:
            assert lost == "by and by"


def test_silence_is_told_once_and_forgiven_where_the_hub_did_not_run():
    silence = Silence.of_nobody()
    silence.heard(1, 0.0)
    silence.heard(2, 0.0)
    told = []
    for tick in range(1, 30):
        silence.heard(2, tick * 0.5)
        suspected, gone = silence.look(tick * 0.5)
        told += [(tick * 0.5, who, "suspected") for who in suspected] + [(tick * 0.5, who, "gone") for who in gone]
    assert told[0] == (4.0, 1, "suspected")  # counted from the first look
    assert told[1] == (GIVEN_AWAY_S + 1.0, 1, "gone")
    assert silence.heard(1, 15.0)
    assert not silence.heard(1, 15.1)
    assert silence.look(15.2 + JUMP_S + 100.0) == ([], [])


def test_who_is_gone_is_forgotten():
    silence = Silence.of_nobody()
    silence.heard(1, 0.0)
    silence.look(0.5)
    silence.forget(1)
    for tick in range(2, 40):
        assert silence.look(tick * 0.5) == ([], [])
