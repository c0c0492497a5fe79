"""E29 (M8): memory shared by a killed process is deleted behind its back; a memfd that the agent holds is not."""

import mmap
import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory

import pytest

from everstep.checkpoint.segments import Segment
from everstep.clock import SYSTEM

pytestmark = pytest.mark.procs

TRACKED = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=4096)
block.buf[:4] = b"kept"
print(block.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

OURS = """
import mmap, os, signal, sys
with mmap.mmap(int(sys.argv[1]), 4096) as mapped:
    mapped[:4] = b"kept"
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_the_standard_library_shares_is_gone_with_its_maker():
    child = subprocess.run([sys.executable, "-c", TRACKED], capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL
    name = child.stdout.strip()
    deadline = SYSTEM.now() + 20
    while os.path.exists(f"/dev/shm/{name}"):
        assert SYSTEM.now() < deadline, "the resource tracker has learned to keep it: look at M8 again"
        SYSTEM.sleep(0.02)
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name=name)


def test_what_the_agent_holds_stays_to_the_byte():
    segment = Segment("test", 4096)
    try:
        assert segment.allocate(4096) == 4096
        child = subprocess.run([sys.executable, "-c", OURS, str(segment.fd)], pass_fds=[segment.fd])
        assert child.returncode == -signal.SIGKILL
        with mmap.mmap(segment.fd, 4096) as mapped:
            assert mapped[:4] == b"kept"
    finally:
        segment.close()


READER = """
import mmap, os, signal, sys
with mmap.mmap(int(sys.argv[1]), 4096) as mapped:
    assert mapped[:4] == b"kept"
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["by itself", "killed"])
def test_a_reader_that_ends_in_any_way_takes_nothing_along(end):
    """CS-15: a fresh process reads and ends; the bytes stay, and nobody complains of leaked memory."""
    segment = Segment("test", 4096)
    try:
        segment.allocate(4096)
        with mmap.mmap(segment.fd, 4096) as mapped:
            mapped[:4] = b"kept"
            command = [sys.executable, "-c", READER, str(segment.fd), end]
            child = subprocess.run(command, pass_fds=[segment.fd], capture_output=True, text=True)
            assert (child.returncode, child.stderr) == (-signal.SIGKILL if end == "killed" else 0, "")
            assert mapped[:4] == b"kept"
        with mmap.mmap(segment.fd, 4096) as again:
            assert again[:4] == b"kept"
    finally:
        segment.close()
