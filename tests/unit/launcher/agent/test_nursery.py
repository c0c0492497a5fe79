"""Births that never come: what an order ends as when no zygote can be started any more."""

from everstep.launcher.agent.nursery import UNBORN, Nursery
from everstep.telemetry import Telemetry


class Turns:
    """A loop that runs what is due when it is told to."""

    def __init__(self) -> None:
        self.due = []

    def later(self, delay_s, what):
        self.due.append(what)

    def turn(self):
        due, self.due = self.due, []
        for what in due:
            what()


def test_each_order_ends_once_though_the_end_of_one_sets_off_the_others():
    """An agent died of a KeyError: the end of the first order had come back here and taken the rest."""
    loop, ends, reasons = Turns(), [], []
    nursery = Nursery(loop, Telemetry("agent"), "job")
    nursery.on_barren = reasons.append

    def order(name, then=lambda: None):
        def on_exit(process, status):
            ends.append((process.name, status))
            then()

        nursery.order(name, {}, lambda *_: None, on_exit)

    order("first", lambda: (order("another"), loop.turn()))
    order("second")
    order("third", lambda: order("last"))
    nursery.barren("the zygote dies")
    loop.turn()
    assert reasons == ["the zygote dies"]
    assert sorted(ends) == [(name, UNBORN) for name in ("another", "first", "last", "second", "third")]
    assert not loop.due
