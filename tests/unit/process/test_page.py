"""The progress page: what one side stores the other loads."""

import os

from everstep.process.page import Page, Phase


def test_a_reader_sees_what_the_worker_stored():
    fd = Page.create("test")
    worker, agent = Page(fd), Page(fd)
    os.close(fd)
    assert agent.read().phase == Phase.NONE
    worker.enter(3, 10.0)
    assert (agent.read().generation, agent.read().phase, agent.read().started_s) == (3, Phase.FIRST, 10.0)
    worker.step_done(2, 11.0)
    worker.enter(3, 11.0)
    assert agent.read().from_step == 2
    worker.resumed(5, 11.0)
    worker.step_done(7, 11.5)
    assert agent.read().from_step == 5
    assert (agent.read().step, agent.read().mark_s, agent.read().phase) == (7, 11.5, Phase.STEP)
    worker.phase(Phase.DECLARED, 12.0, limit_s=6.0, name="évaluation")
    worker.tick(12.5)
    reading = agent.read()
    assert (reading.limit_s, reading.auto_s, reading.mark_s) == (6.0, 12.5, 12.0)
    assert agent.read().name == "évaluation"
    worker.phase(Phase.DECLARED, 12.0, name="x" * 500)
    assert agent.read().name == "x" * 48
    worker.phase(Phase.STEP, 12.0)
    assert agent.read().name == ""
    assert agent.generation == 3
    worker.mark(13.0)
    assert agent.read().mark_s == 13.0
    assert (agent.read().moved_s, agent.read().pinged) == (0.0, False)
    worker.moved(13.2)
    worker.ping(13.5)
    assert (agent.read().moved_s, agent.read().pinged, agent.read().mark_s) == (13.2, True, 13.5)
    worker.enter(4, 14.0)
    assert not agent.read().pinged, "a new generation has to arm it again"
    worker.close()
    agent.close()


def test_a_function_that_declares_no_steps_has_turns():
    fd = Page.create("test")
    page = Page(fd)
    os.close(fd)
    page.enter(3, 13.0)
    before = page.progress
    page.undeclared(13.6)
    page.turned(3, 13.7)
    page.seen(5)
    reading = page.read()
    assert (reading.undeclared, reading.turns, reading.turned_s, reading.places) == (True, 3, 13.7, 5)
    assert (reading.phase, reading.mark_s) == (Phase.STEP, 13.6)
    assert page.progress != before
    page.enter(4, 14.0)
    reading = page.read()
    assert (reading.undeclared, reading.turns, reading.places) == (False, 0, 0)
    page.close()
