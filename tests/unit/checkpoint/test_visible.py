"""What another node has published is waited for; what is wrong with it otherwise is not (CL-05)."""

import errno
import os

import pytest

from everstep.checkpoint import visible
from everstep.clock import SystemClock


class Sleeping(SystemClock):
    """Sleeps without waiting."""

    def __init__(self):
        self.passed = 0.0

    def now(self):
        return self.passed

    def sleep(self, seconds):
        self.passed += seconds


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_a_stale_view_is_waited_out(code):
    clock = Sleeping()

    def look(path):
        assert path == "/nfs/step-10/manifest.json"
        if clock.passed < 40:
            raise OSError(code, os.strerror(code), path)

    assert visible.wait("/nfs/step-10", clock=clock, look=look)
    assert clock.passed >= 40


def test_what_never_comes_ends_the_wait():
    clock = Sleeping()

    def look(path):
        raise FileNotFoundError(errno.ENOENT, "no", path)

    assert not visible.wait("/nfs/step-10", clock=clock, look=look)
    assert visible.LIMIT_S <= clock.passed < visible.LIMIT_S + 1


def test_another_error_is_for_the_reader_to_tell():
    def look(path):
        raise PermissionError(errno.EACCES, "no", path)

    assert visible.wait("/nfs/step-10", look=look)
    assert visible.wait("s3://bucket/step-10", look=look)


class There:
    """A `Reading` of a checkpoint that is not seen at first."""

    def __init__(self, clock):
        self.clock, self.closed = clock, 0

    def size(self, name):
        assert name == "manifest.json"
        return None if self.clock.passed < 40 else 17

    def close(self):
        self.closed += 1


def test_another_process_can_look_since_a_look_may_never_return():
    clock = Sleeping()
    there, asked = There(clock), []

    def through(path):
        asked.append(path)
        return there

    assert visible.wait("/nfs/step-10", clock=clock, look=visible.seen_through(through))
    assert clock.passed >= 40
    assert set(asked) == {"/nfs/step-10"}
    assert there.closed == len(asked)
