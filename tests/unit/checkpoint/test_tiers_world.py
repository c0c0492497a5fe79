"""All tiers of several nodes together: nodes, keepers, writers and whole jobs die at any instant."""

import gc
import os
import random

import pytest

from everstep.testing.tiers_world import TierJob


def memfds():
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "everstep-snapshot" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


class Storm:
    """Jobs on one directory, one after the other, and what becomes of them. The laws are the world's."""

    def __init__(self, seed, directory):
        self.draw = random.Random(seed)
        self.directory = str(directory)
        self.shape = self.draw.choice([2, 2, 3, 4]), self.draw.choice([1, 1, 2])
        self.settings = {
            "every": self.draw.choice([2, 3, 7]), "keep": self.draw.choice([1, 2, 3]),
            "interval": self.draw.choice([0, 1, 1, 2, 5]), "copies": self.draw.choice([1, 1, 2]),
            "all_hear": self.draw.random() < 0.8,
        }  # fmt: skip
        self.job = None
        self.jobs = []

    def next_run(self):
        if self.job is not None:
            self.job.end()
            self.job.close()
        self.job = TierJob(self.draw.random(), self.directory, *self.shape, before=self.job, **self.settings)
        self.job.begin()

    def run(self):
        try:
            self.next_run()
            for _ in range(self.draw.randint(3, 9)):
                self.job.run(self.draw.choice([3, 30, 100, 300, 600]))
                getattr(
                    self, self.draw.choice(["worker", "worker", "porter", "writer", "node", "node", "end", "flip"])
                )()
            self.job.begin()
        finally:
            self.job.close()

    def anyone(self):
        return self.draw.choice([node.name for node in self.job.alive])

    def worker(self):
        self.job.kill_worker(self.draw.randrange(self.job.ranks))

    def porter(self):
        self.job.kill_porter(self.anyone())

    def writer(self):
        self.job.kill_writer()

    def node(self):
        if len(self.job.alive) > 1:
            self.job.kill_node(self.anyone())
        else:
            self.next_run()

    def end(self):
        self.next_run()

    def flip(self):
        if self.draw.random() < 0.3:
            self.job.sound = not self.job.flip(self.anyone()) and self.job.sound


@pytest.mark.parametrize("all_hear", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_to_be_saved_lies_ahead_of_where_a_generation_begins_whenever_that_is_known(tmp_path, all_hear, seed):
    job = TierJob(seed, str(tmp_path), 2, 1, every=3, interval=0, all_hear=all_hear)
    try:
        job.begin()
        job.run(300)
        before = {node.name: len(node.events) for node in job.alive}
        job.kill_worker(1)
        job.begin()
        (began, _) = job.begun[-1]
        planned = []
        for _ in range(2000):
            new = [event for node in job.alive for event in node.events[before[node.name] :]]
            planned = [e.step for e in new if getattr(e, "tier", "") == "disk" and e.what == "planned"]
            if planned:
                break
            job.turn()
        assert min(planned) > began > 3
    finally:
        job.close()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_dies_the_newest_that_is_whole_is_taken_by_all(seed, tmp_path):
    gc.collect()
    before = memfds()
    Storm(seed, tmp_path).run()
    gc.collect()
    assert memfds() == before, "memory is left behind"


@pytest.mark.long
@pytest.mark.parametrize("block", range(60))
def test_whatever_dies_at_length(block, tmp_path):
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        (tmp_path / str(seed)).mkdir()
        Storm(seed, tmp_path / str(seed)).run()
