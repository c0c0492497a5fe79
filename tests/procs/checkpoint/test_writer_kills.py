"""kill -9 of a writer at every instant, and of agent and writers at any: what a fresh reader finds is whole (CS-28)."""

import ctypes
import os
import random
import select
import signal

import psutil
import pytest

from everstep.checkpoint import catalog, writer
from everstep.checkpoint.dcp import metadata_bytes
from everstep.checkpoint.directory import Claim
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.scribe import Scribe
from everstep.clock import SYSTEM
from everstep.testing.disks import HostileFiles, UnsyncedFiles, Wound
from everstep.testing.forked_writers import ForkedBench, ForkedWriter
from everstep.testing.states import rank_state, world

pytestmark = [pytest.mark.procs, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
WORLD = 2
KILLED = -signal.SIGKILL


def check_state(path, step):
    for rank in range(WORLD):
        with open_checkpoint(path, rank, WORLD) as state:
            assert bytes(state.payload()) == rank_state(rank, WORLD, step).payload


def oracle(directory, last):
    """What a fresh reader finds: a whole verified checkpoint, none older than the last committed; or none."""
    found, wounds = catalog.newest_whole(directory)
    assert wounds == []
    if found is None:
        assert last is None, f"step {last} was committed and is gone"
        return None
    assert last is None or found.step >= last
    check_state(found.path, found.step)
    return found.step


def serve(directory, rank, files):
    return lambda link: Scribe(link, directory, rank, files, metadata_bytes, {}).serve()


def token(step):
    return f"step-{step}.0.0.0123abcd-1.tmp"


class Save:
    """One save driven by hand over the lines of two writers; `committed` is the last step that was reported."""

    def __init__(self, writers, last):
        self.writers, self.committed = writers, last

    def order(self, rank, message, fds=()):
        self.writers[rank].send(message, fds)

    def answer(self, rank):
        """What the writer says, or None when it is gone."""
        return self.writers[rank].receive(20)

    def run(self, step, prune):
        """Write, merge, prune; False where a writer was lost on the way."""
        fragments = self.written(step)
        if fragments is None:
            return False
        for rank, fd in enumerate(fragments):
            self.order(0, {"kind": "fragment", "save": token(step), "rank": rank}, [fd])
            os.close(fd)
        self.order(0, {"kind": "merge", "save": token(step), "folder": token(step)})
        answer = self.answer(0)
        if answer is None:
            return False
        assert answer[0]["kind"] == "published", answer[0]
        self.committed = step
        self.order(0, {"kind": "prune", "condemn": [f"step-{prune}"], "remove": [f"step-{prune}"]})
        return self.answer(0) is not None

    def written(self, step):
        snapshots = world(WORLD, step)
        for rank, fd in enumerate(snapshots):
            message = {"kind": "write", "save": token(step), "folder": token(step), "step": step, "epoch": 0}
            self.order(rank, message | {"generation": 0, "world_size": WORLD}, [fd])
            os.close(fd)
        answers = [self.answer(rank) for rank in range(WORLD)]
        fds = [fd for answer in answers if answer is not None for fd in answer[1]]
        if None not in answers:
            assert [answer[0]["kind"] for answer in answers] == ["written"] * WORLD
            return fds
        for fd in fds:
            os.close(fd)
        return None


@pytest.fixture
def healthy(tmp_path):
    """A writer of each rank that serves all cases of a test."""
    writers = [ForkedWriter(f"healthy-{r}", r, serve(str(tmp_path), r, UnsyncedFiles())) for r in range(WORLD)]
    yield writers
    for one in writers:
        one.close()


@pytest.mark.parametrize("when", ["before", "torn", "after"])
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_writer_killed_at_every_call_of_a_save_leaves_the_old_or_the_new(tmp_path, healthy, rank, when):
    directory, step, seen = str(tmp_path), 20, set()
    assert Save(healthy, None).run(10, prune=0)
    last, position, ended = 10, 0, False
    while not ended:
        position += 1
        files = HostileFiles({("write" if when == "torn" else "any", position): Wound(when=when)})
        victim = ForkedWriter(f"victim-{rank}", rank, serve(directory, rank, files))
        save = Save([victim if r == rank else healthy[r] for r in range(WORLD)], last)
        ended = save.run(step, prune=last)
        seen.add(oracle(directory, save.committed) - last)
        victim.close()
        assert victim.status == (0 if ended else KILLED)
        claim = Claim(directory, UnsyncedFiles())
        claim.take("the next start")  # it removes what the dead left
        claim.close()
        assert not [name for name in os.listdir(directory) if name.endswith(".tmp")]
        if oracle(directory, save.committed) == step:
            last, step = step, step + 10
    assert position > (4 if when == "torn" or rank else 30)
    if rank == 0:
        assert seen == {0, 10}


def _become_reaper(on):
    assert ctypes.CDLL(None).prctl(36, int(on), 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: orphans come to this process


def _train(directory, told):
    """An agent with real writers saves step after step, and tells each commit."""
    bench = ForkedBench(
        directory, lambda where, rank: lambda link: writer.main(link, directory=where, rank=rank), interval=1
    )
    bench.enter()
    os.write(told, b"begun\n")
    for step in range(bench.began + 1, 100_000):
        bench.steps(step, step)
        for done in bench.tiers("committed"):
            os.write(told, f"{done}\n".encode())
        bench.events.clear()


def _trial(directory, rng, last):
    before = psutil.Process().children()
    reading, told = os.pipe()
    agent = os.fork()
    if agent == 0:
        try:
            _train(directory, told)
        finally:
            os._exit(1)
    os.close(told)
    victims = rng.choice(["agent", "writers", "all"])
    text = b"" if rng.random() < 0.25 else os.read(reading, 6)  # most of them once it has begun
    until = SYSTEM.now() + rng.uniform(0.0, 0.6)
    while (left := until - SYSTEM.now()) > 0 and select.select([reading], [], [], left)[0]:
        text += os.read(reading, 65536)
    family = psutil.Process(agent).children(recursive=True)
    for process in family if victims != "agent" else []:
        process.kill()
    SYSTEM.sleep(0.05 if victims == "writers" else 0.0)
    os.kill(agent, signal.SIGKILL)
    while part := os.read(reading, 65536):  # ends when agent and writers are gone
        text += part
    os.close(reading)
    gone = SYSTEM.now()
    while left := [child for child in psutil.Process().children() if child not in before]:
        assert SYSTEM.now() - gone < 5.0, f"outlives its agent: {[(p.pid, p.status()) for p in left]}"
        if not [child for child in left if os.waitpid(child.pid, os.WNOHANG)[0]]:
            SYSTEM.sleep(0.01)
    lines = text.decode().splitlines()
    return oracle(directory, max([int(line) for line in lines if line.isdigit()], default=last))


def _trials(tmp_path, seeds):
    _become_reaper(True)
    try:
        last = None
        for seed in seeds:
            last = _trial(str(tmp_path), random.Random(seed), last)
        return last
    finally:
        _become_reaper(False)


def test_random_kills_of_agent_and_writers_each_begin_again_from_a_whole_checkpoint(tmp_path):
    assert _trials(tmp_path, range(8)) is not None


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_three_hundred_random_kills(tmp_path):
    assert _trials(tmp_path, range(1000, 1300)) is not None


def test_a_writer_ends_with_its_line_in_the_midst_of_a_write(tmp_path):
    """An agent that is gone is followed within two seconds, whatever its writers are doing."""

    class Stuck(UnsyncedFiles):
        def fsync(self, fd):
            SYSTEM.sleep(60)

    def stuck(link):
        import threading

        threading.Thread(target=writer._end_with, args=(link.fileno(),), daemon=True).start()
        Scribe(link, str(tmp_path), 0, Stuck(), metadata_bytes, {}).serve()

    victim = ForkedWriter("stuck", 0, stuck)
    (fd, other) = world(WORLD, 20)
    message = {"kind": "write", "save": token(20), "folder": token(20), "step": 20, "epoch": 0}
    victim.send(message | {"generation": 0, "world_size": WORLD}, [fd])
    for each in (fd, other):
        os.close(each)
    while not (tmp_path / token(20) / "__0_0.distcp").exists():
        SYSTEM.sleep(0.01)
    begun = SYSTEM.now()
    victim.close()
    assert SYSTEM.now() - begun < 2.0
