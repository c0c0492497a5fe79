"""E8, P11: a thread of ours that waits when the interpreter ends never turns success into exit status 134."""

import random
import subprocess
import sys
import time

import pytest

from everstep.recovery.link import Link

pytestmark = pytest.mark.procs
LONG = (pytest.mark.long, pytest.mark.timeout(300))

SCRIPT = """
import sys, threading
from everstep.recovery.link import Link, LinkClosed
{imports}
link = Link.from_fd(int(sys.argv[1]))
def wait():
    try:
        while True:
            link.receive()
    except LinkClosed:
        pass
threading.Thread(target=wait, name="everstep-waiter", daemon=True).start()
link.send({{"kind": "ending"}})
"""


def _end(imports, wake):
    """Run a process to its end; wake its waiting thread by `wake(link)` somewhere in its finalization."""
    ours, theirs = Link.pair()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(imports=imports), str(theirs.fileno())], pass_fds=(theirs.fileno(),)
    )
    theirs.close()
    try:
        assert ours.receive()[0] == {"kind": "ending"}
        wake(ours)
        return child.wait(20)
    finally:
        ours.close()
        child.kill()
        child.wait()


def _never(link):
    pass


def _message(link):
    try:
        for _ in range(50):
            link.send({"kind": "world.probe"})
            time.sleep(random.random() * 0.002)
    except ConnectionError:
        return


def _close(link):
    time.sleep(random.random() * 0.01)
    link.shutdown()


@pytest.mark.parametrize("tries", [4, pytest.param(100, marks=LONG)])
@pytest.mark.parametrize("wake", [_never, _message, _close], ids=lambda f: f.__name__.strip("_"))
def test_a_waiting_thread_does_not_spoil_the_exit(wake, tries):
    assert [_end("", wake) for _ in range(tries)] == [0] * tries


@pytest.mark.parametrize("tries", [1, pytest.param(6, marks=LONG)])
def test_nor_with_torch_and_its_groups(tries):
    imports = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n"
    )
    assert [_end(imports, _message) for _ in range(tries)] == [0] * tries
