"""The peer tier of two nodes over real porters: agents and ranks in this process, copies by real sockets."""

import select
import time

import pytest

from everstep.checkpoint import porter
from everstep.recovery.link import LinkClosed
from everstep.testing.forked_writers import ForkedWriter
from everstep.testing.peer_world import Job

pytestmark = pytest.mark.procs
LIMIT_S = 120.0


class RealJob(Job):
    """Its porters are processes; what they say is heard when they have said it."""

    def __init__(self, *arguments, **settings):
        self.forked = {}
        super().__init__(*arguments, **settings)

    def _spawn(self, node, name, arguments):
        child = ForkedWriter(f"{name} of {node.name}", len(self.forked), lambda link: porter.main(link, **arguments))
        self.forked[child] = node
        return child

    def hear(self):
        ready, _, _ = select.select([child.link for child in self.forked], [], [], 0.001)
        for child in [one for one in self.forked if one.link in ready]:
            node = self.forked[child]
            try:
                message, _ = child.link.receive()
            except LinkClosed:
                del self.forked[child]
                child.link.close()
                node.companions["peer"].on_child_exit(child, child.wait())
                continue
            node.companions["peer"].on_child_message(child, message, ())

    def porter_of(self, name):
        return next(child for child, node in self.forked.items() if node.name == name)

    def turn(self, *, steps=True):
        self.hear()
        super().turn(steps=steps)

    def until(self, step):
        deadline = time.monotonic() + LIMIT_S
        while self.counted() < step:
            assert time.monotonic() < deadline, f"step {step} does not count in {LIMIT_S} s; newest: {self.counted()}"
            self.turn()

    def close(self):
        super().close()
        for child in self.forked:
            child.kill()
            child.close()


@pytest.fixture
def job():
    made = []

    def make(*arguments, **settings):
        made.append(RealJob(*arguments, **settings, address="127.0.0.1"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_copies_are_kept_over_real_sockets_porters_are_replaced_and_a_lost_node_costs_what_did_not_count(job):
    j = job(1)
    j.begin()
    j.until(3)
    j.porter_of("n1").kill()
    j.until(j.counted() + 3)
    counted, gone = j.counted(), j.porter_of("n1")
    del j.forked[gone]
    gone.kill()
    gone.close()
    j.kill_node("n1")
    j.begin()
    assert j.begun[-1] == (counted, 0)


def test_what_was_left_on_another_node_is_fetched_over_real_sockets(job):
    j = job(2, interval=0)
    j.begin()
    j.run(100)
    newest = min(worker.step for worker in j.workers.values())
    j.kill_worker(2)
    j.homes[2] = "n0"
    j.begin()
    assert j.begun[-1][0] >= newest
