"""One Checkpointer to a directory: who is waited for, and for how long."""

import fcntl
import json
import os
import socket

import pytest

from everstep.checkpoint.directory import ELSEWHERE_S
from everstep.checkpoint.place_seen import unseen
from everstep.checkpoint.sole import NOTICES_S, SoleUse
from everstep.errors import ConfigurationError
from everstep.testing.nodes import StillClock


@pytest.fixture
def held(tmp_path):
    """Have the lock as another process would; call it with what its holder has written of itself."""
    fds = []

    def hold(**words):
        path = tmp_path / ".everstep.lock"
        path.write_text(
            json.dumps({"pid": 7, "host": socket.gethostname(), "who": "another", "ending": False, **words})
        )
        fds.append(os.open(path, os.O_RDONLY))
        fcntl.flock(fds[-1], fcntl.LOCK_EX)
        return fds[-1]

    yield hold
    for fd in fds:
        os.close(fd)


def refused_after(directory, wait_s):
    """Ask again and again; return the seconds until it is refused, and what was said."""
    clock, said = StillClock(), []
    use = SoleUse(str(directory), "we", clock)

    def ask():
        while not use.take(wait_s, said.append):
            clock.now_s += 1.0

    with pytest.raises(ConfigurationError, match="is in use: another"):
        ask()
    return clock.now_s, said


@pytest.mark.parametrize(
    ("words", "patience", "said"),
    [
        ({}, NOTICES_S, None),
        ({"ending": True}, 600.0, "is writing what its ranks have left"),
        ({"host": "elsewhere"}, ELSEWHERE_S, "has it, unless that host is gone"),  # a server keeps a dead host's lock
        ({"host": "elsewhere", "ending": True}, 600.0, "is writing what its ranks have left"),
    ],
)
def test_a_living_holder_is_refused_and_one_that_may_be_gone_is_waited_for(held, tmp_path, words, patience, said):
    held(**words)
    seconds, told = refused_after(tmp_path, 600.0)
    assert patience < seconds <= patience + 1.0
    assert [said in one for one in told] == [True] * (said is not None)


def test_a_lock_that_comes_free_while_it_is_waited_for_is_ours(held, tmp_path):
    fd = held(host="elsewhere")
    use = SoleUse(str(tmp_path), "we", StillClock())
    assert not use.take(600.0, lambda text: None)
    fcntl.flock(fd, fcntl.LOCK_UN)
    assert use.take(600.0, lambda text: None)
    use.close()


def test_a_directory_is_that_of_the_leading_host_where_its_owner_file_is_seen_in_time(tmp_path):
    """A network file system may show a file late; a disk of the host's own never does."""
    clock, looks = StillClock(), []
    path = tmp_path / ".everstep-0123abcd.job"

    def look(name):
        looks.append(clock.now())
        if clock.now() >= 20.0:
            path.touch()
        return os.open(name, os.O_RDONLY)

    assert unseen(str(tmp_path), "0123abcd", 30.0, clock, look) == ""
    assert 20.0 <= clock.now() < 21.0
    path.unlink()
    text = unseen(str(tmp_path), "0123abcd", 30.0, StillClock())
    assert f"{path}, which the leading host has written, is not seen after 30 s" in text
    assert "Give the Checkpointer a directory that all hosts share" in text


def test_an_owner_file_that_cannot_be_locked_is_told_at_once(tmp_path):
    def look(name):
        raise OSError(95, "Operation not supported", name)

    clock = StillClock()
    assert "cannot be read or locked: Operation not supported" in unseen(str(tmp_path), "0123abcd", 30.0, clock, look)
    assert clock.now() == 0.0
