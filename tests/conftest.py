"""What every test is held to: nothing is left behind, and children find the sources of this tree."""

import os
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))  # noqa: TID251
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")  # noqa: TID251
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # noqa: TID251


settings.register_profile("untimed", deadline=None)  # an example may take longer on a busy machine: that is no failure
settings.load_profile("untimed")


def _children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "everstep" in name}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves a thread, a child process or a shared-memory block of ours."""
    threads, children, blocks = set(threading.enumerate()), _children(), _shared_memory()
    yield
    left = [t.name for t in set(threading.enumerate()) - threads if t.is_alive() and not t.daemon]
    left += [f"process {pid}" for pid in _children() - children]
    left += sorted(_shared_memory() - blocks)
    assert not left, f"left behind: {', '.join(left)}"


@pytest.fixture
def root() -> Path:
    """The top of this source tree."""
    return ROOT
