"""Files are synced as they go, a sync about a second of writing, and each call is a sign; the end waits for signs."""

from itertools import pairwise

import pytest

from everstep.checkpoint.pace import FIRST_BYTES, LEAST_BYTES, MOST_BYTES, Paced
from everstep.checkpoint.patience import SIGNS, Patience
from everstep.clock import SystemClock


class Slow:
    """Takes anything; an fsync takes so many seconds a MiB."""

    mkdir = fsync_dir = rename = exchange = unlink = rmdir = listdir = None

    def __init__(self, a_mib_s):
        self.a_mib_s, self.now_s, self.waiting, self.syncs = a_mib_s, 0.0, 0, []

    def create(self, path):
        return 3

    def write(self, fd, data):
        self.waiting += len(data)
        return len(data)

    def fsync(self, fd):
        self.syncs.append(self.waiting)
        self.now_s += self.waiting / (1 << 20) * self.a_mib_s
        self.waiting = 0

    def close(self, fd):
        pass


class Clock(SystemClock):
    def __init__(self, disk):
        self._disk = disk

    def now(self):
        return self._disk.now_s


def written(disk, mib, **words):
    signs = []
    paced = Paced(disk, lambda: signs.append(disk.now_s), Clock(disk), **words)
    fd = paced.create("x")
    for _ in range(mib):
        paced.write(fd, bytes(1 << 20))
    paced.fsync(fd)
    paced.close(fd)
    return signs


@pytest.mark.parametrize("a_mib_s", [0.001, 0.1, 1.0])
def test_no_silence_is_much_longer_than_a_second_however_slow_the_disk(a_mib_s):
    disk = Slow(a_mib_s)
    signs = written(disk, 300)
    silences = [after - before for before, after in pairwise(signs)]
    assert sum(disk.syncs) == 300 << 20
    assert disk.syncs[0] == FIRST_BYTES
    assert all(LEAST_BYTES <= size <= MOST_BYTES for size in disk.syncs[:-1])
    settled = silences[len(silences) // 2 :]
    assert max(settled) <= max(2.0, 4 * a_mib_s)


def test_a_fast_disk_is_synced_seldom():
    disk = Slow(0.0)
    written(disk, 600)
    assert len(disk.syncs) <= 6


def test_an_object_is_synced_once():
    disk = Slow(0.1)
    written(disk, 100, syncs=False)
    assert disk.syncs == [100 << 20]


def test_the_end_waits_as_long_as_something_moves_and_a_grace_time_beyond():
    patience = Patience(8.0)
    assert patience.sign_s * SIGNS == 8.0
    patience.moved(0.0)
    assert patience.left_s(100.0) == 8.0, "silence before the end counts from the end"
    patience.moved(106.0)
    assert patience.left_s(107.0) == 7.0
    assert not patience.gave_up
    assert patience.left_s(114.0) == 0.0
    assert patience.gave_up
    patience.begin_again()
    assert not patience.ending
    assert patience.left_s(200.0) == 8.0
