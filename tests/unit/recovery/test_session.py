"""A worker's line to its agent: a listener that fails costs the process, not the job's patience."""

import os
import threading

import pytest

from everstep.process.page import Page
from everstep.recovery.core.words import Incarnation
from everstep.recovery.link import Link
from everstep.recovery.session import Session


@pytest.fixture
def line(tmp_path):
    ours, theirs = Link.pair()
    page_fd = Page.create("test")
    session = Session(Link(theirs), Page(page_fd), "job", tmp_path, 0, Incarnation("boot", os.getpid(), 0))
    os.close(page_fd)
    session.lost = lambda: None
    session.start()
    yield ours, session
    session.stop()
    session.page.close()
    ours.close()
    theirs.close()


def test_a_listener_that_fails_has_its_process_replaced_and_the_line_is_still_read(line, capsys):
    agent, session = line
    heard = threading.Event()

    def listen(message, fds):
        if message["kind"] == "world.assigned":
            raise ValueError("no such generation")
        heard.set()

    session.on("world", listen)
    agent.send({"kind": "world.assigned"})
    said, _ = agent.receive()
    assert said == {"kind": "world.replace", "text": "it failed over world.assigned: ValueError('no such generation')"}
    agent.send({"kind": "world.stop"})
    assert heard.wait(10)
    assert "ValueError: no such generation" in capsys.readouterr().err
