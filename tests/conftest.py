"""What every test is held to: nothing is left behind, and children find the sources of this tree."""

import collections
import os
import threading
import time  # noqa: TID251 - when a process was started is told in the machine's time
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent
KERNEL_LISTS = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))  # noqa: TID251
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")  # noqa: TID251
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # noqa: TID251


settings.register_profile("untimed", deadline=None)  # an example may take longer on a busy machine: that is no failure
settings.load_profile("untimed")


def _children() -> set[int]:
    """This process's descendants, from the kernel's own lists: psutil reads all of /proc, 1 ms twice in each test."""
    if not KERNEL_LISTS:
        return {process.pid for process in psutil.Process().children(recursive=True)}
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        folder = f"/proc/{waiting.pop()}/task"
        for thread in _listed(folder):
            kids = [int(word) for word in _text(f"{folder}/{thread}/children").split()]
            found.update(kids)
            waiting += kids
    return found


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # it has ended
        return ""


def _left(before: set[int], began_s: float) -> list[int]:
    """Processes that were started since and live. The kernel's lists may lack one while another of them ends."""
    alive = []
    for pid in _children() - before:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and process.create_time() >= began_s - 1.0:
                alive.append(pid)
        except psutil.NoSuchProcess:
            continue
    return alive


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "everstep" in name}


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items):
    """`sample(n)`: n cases of a test, evenly spread, are of the default tier; the others are long."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        (kept,) = of_one[0].get_closest_marker("sample").args
        for number, item in enumerate(of_one):
            if number * kept // len(of_one) == (number - 1) * kept // len(of_one):
                item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves a thread, a child process or a shared-memory block of ours."""
    threads, children, blocks, began_s = set(threading.enumerate()), _children(), _shared_memory(), time.time()
    yield
    left = [t.name for t in set(threading.enumerate()) - threads if t.is_alive() and not t.daemon]
    left += [f"process {pid}" for pid in _left(children, began_s)]
    left += sorted(_shared_memory() - blocks)
    assert not left, f"left behind: {', '.join(left)}"


@pytest.fixture
def root() -> Path:
    """The top of this source tree."""
    return ROOT
