"""Kill one process of a job, or all of them, at one system call of a save; look at what a fresh process loads.

usage: kill_points.py DIR list                           prints the points: process, call, count
       kill_points.py DIR run PROCESS[:CALL[:COUNT]] …   prints one JSON line a point
       kill_points.py DIR sample SEED N                  the same for N of all points but those of waiting
       kill_points.py DIR table                          all of them, as docs/results/commit-kill-points.md has it

An agent with the real shelf and disk tier, two trainers with real snapshots and two real writers, each a process of its
own. Steps 2, 4 and 6 are saved, one checkpoint is kept: step 2 is durable and reported, then strace is attached to the
victim, then 4 and 6 are saved under its eyes. `all@writer-0` is writer 0's point, and everybody else is killed with it.
"""

import collections
import contextlib
import ctypes
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from everstep.checkpoint import catalog, writer
from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.directory import Claim
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.fileops import PosixFiles
from everstep.checkpoint.intent_client import IntentClient
from everstep.checkpoint.load import open_checkpoint
from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.snapshot import Snapshotter
from everstep.clock import SYSTEM
from everstep.events import Notice, TierEvent
from everstep.recovery.core.words import Incarnation, Member, Roster
from everstep.recovery.link import LinkClosed
from everstep.testing.forked_writers import ForkedWriter

WORLD, INTERVAL, FIRST, LAST = 2, 2, 2, 6
LIMIT_S = 60.0
CALLS = (
    "openat,open,creat,read,pread64,preadv,write,pwrite64,writev,close,fsync,fdatasync,mkdir,mkdirat,rename,renameat,"
    "renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,stat,lstat,newfstatat,fstat,statx,getdents64,lseek,ftruncate,"
    "fallocate,fcntl,flock,dup,dup3,mmap,munmap,mprotect,memfd_create,sendmsg,recvmsg,sendto,recvfrom,poll,ppoll,select,"
    "pselect6,epoll_wait,futex,brk,madvise,ioctl,fork,clone,clone3,vfork,wait4,waitid,kill"
)
WAITS = frozenset(("poll", "ppoll", "select", "pselect6", "epoll_wait", "futex"))
"""Calls that are made as often as there is to wait: thousands of times in one life, few in the next."""
VICTIMS = ("writer-0", "writer-1", "trainer-0", "trainer-1", "agent")


class Counting:
    """State that is a pure function of rank and step."""

    def __init__(self, rank):
        self.rank, self.step = rank, 0
        self.tensors = [torch.zeros(4096, dtype=torch.int64) for _ in range(3)]

    def advance(self):
        self.step += 1
        for n, tensor in enumerate(self.tensors):
            tensor.fill_(self.step * 1000 + self.rank * 100 + n)

    def state_dict(self):
        return {"step": self.step, "tensors": self.tensors}

    def load_state_dict(self, state):
        raise NotImplementedError


def train(link, rank, told):
    """A trainer: one step at each word of the agent's."""
    random.seed(rank)  # a fork reseeds it, and its state is saved too
    snapshots, intents = Snapshotter(link.send, deadline_s=30.0), IntentClient(link.send)
    words = collections.deque()
    said = threading.Semaphore(0)

    def wait():
        with contextlib.suppress(LinkClosed, OSError):
            while True:
                message, fds = link.receive()
                if message["kind"].startswith("snapshot."):
                    snapshots.on_message(message, fds)
                elif message["kind"].startswith("disk."):
                    intents.on_message(message)
                else:
                    words.append(message)
                    said.release()
        os._exit(0)  # the agent is gone

    threading.Thread(target=wait, daemon=True).start()
    snapshots.begin(rank, WORLD, told["snapshot"])
    state = Counting(rank)
    snapshots.bind({"counting": state})
    snapshots.take(0)
    while True:
        said.acquire()
        state.advance()
        due = intents.due(state.step)
        taken = snapshots.take(state.step, hold=due)
        if due:
            intents.staged(taken.buffer, snapshots.holds(taken))
        link.send({"kind": "done", "step": state.step})


class Agent:
    """The agent, in small: `recovery.api.Host`. Its own process; `tell` writes to whoever watches."""

    clock, run_dir, world_size = SYSTEM, "kill-points", WORLD

    def __init__(self, directory, keep, tell):
        self.tell = tell
        self.shelf = Shelf(readers=1, look=lambda: Memory(1 << 30))
        self.disk = Disk(directory, INTERVAL, self.shelf, keep)
        self.shelf.older = self.disk.committed
        self.writers, self.trainers = [], {}
        self.done = collections.Counter()
        self.due = False
        self.generation = 0
        self.shelf.start(self)
        self.disk.start(self)

    def send(self, rank, message, fds=()):
        trainer = self.trainers.get(rank)
        if trainer is not None:
            trainer.send(message, fds)

    def spawn(self, name, entry, arguments):
        assert entry == "everstep.checkpoint.writer:main"
        made = ForkedWriter(name, arguments["rank"], lambda link: writer.main(link, **arguments))
        self.writers.append(made)
        return made

    def emit(self, event):
        if isinstance(event, TierEvent) and event.what in ("committed", "failed"):
            self.tell({event.what: event.step})
        if isinstance(event, Notice):
            self.tell({"notice": event.text})

    def later(self, delay_s):
        self.due = True

    def recheck(self):
        pass

    def begin(self):
        members = tuple(Member(r, Incarnation("small", 1 + r, 0), "n", r, True, "started") for r in range(WORLD))
        roster = Roster(0, self.generation, members)
        told = {r: {"snapshot": m} for r, m in self.shelf.on_roster(roster).items()}
        for rank in range(WORLD):
            self.trainers[rank] = ForkedWriter(
                f"trainer-{rank}", rank, lambda link, rank=rank: train(link, rank, told[rank])
            )
        self.disk.on_roster(roster)

    def pids(self):
        family = {one.name: one.pid for one in (*self.writers, *self.trainers.values())}
        return family | {"agent": os.getpid()}

    def step(self, number):
        """All ranks do a step; False when a trainer was lost."""
        for rank in range(WORLD):
            self.send(rank, {"kind": "go"})
        self.until(lambda: len(self.trainers) < WORLD or min(self.done[r] for r in range(WORLD)) >= number)
        return len(self.trainers) == WORLD

    def until(self, ready):
        deadline = SYSTEM.now() + LIMIT_S
        while not ready():
            assert SYSTEM.now() < deadline, "it does not come to that"
            self.hear()

    def hear(self):
        family = [*self.writers, *self.trainers.values()]
        ready, _, _ = select.select([one.link for one in family], [], [], 0.0 if self.due else 0.05)
        for one in [each for each in family if each.link in ready]:
            try:
                message, fds = one.link.receive()
            except LinkClosed:
                self.lost(one)
                continue
            if one in self.writers:
                self.disk.on_child_message(one, message, fds)
            elif message["kind"].startswith("snapshot."):
                self.shelf.on_message(one.rank, message, fds)
            elif message["kind"].startswith("disk."):
                self.disk.on_message(one.rank, message, fds)
            else:
                self.done[one.rank] = message["step"]
        if self.due:
            self.due = False
            self.shelf.on_tick(SYSTEM.now())
            self.disk.on_tick(SYSTEM.now())

    def lost(self, one):
        one.link.close()
        if one in self.writers:
            self.writers.remove(one)
            self.disk.on_child_exit(one, one.wait())
            return
        del self.trainers[one.rank]
        one.wait()
        self.shelf.on_stopped(self.generation)
        self.disk.on_stopped(self.generation)

    def live(self, armed):
        """Save step 2, let the watcher arm itself, save the others, end as a job ends."""
        self.begin()
        for step in range(1, FIRST + 1):
            assert self.step(step)
        self.until(lambda: not self.disk.outstanding)
        self.tell({"pids": self.pids()})
        armed()
        completed = all(self.step(step) and self.settled() for step in range(FIRST + 1, LAST + 1))
        self.until(lambda: self.disk.drained(completed))
        self.tell({"end": completed})

    def settled(self):
        """Each save is done before the next step, so that counts are the same in every run."""
        self.until(lambda: not self.disk.outstanding)
        return True


class Trial:
    """One life of the job, from the watcher's side."""

    def __init__(self, directory, keep=1):
        self.directory = directory
        reading, told = os.pipe()
        waiting, go = os.pipe()
        self.agent = os.fork()
        if self.agent == 0:
            try:
                os.close(reading)
                os.close(go)
                live(directory, keep, told, waiting)
                os._exit(0)
            except BaseException:
                os.write(told, json.dumps({"error": traceback.format_exc()[-1500:]}).encode() + b"\n")
                os._exit(1)
        os.close(told)
        os.close(waiting)
        self.reading, self.go = reading, go
        self.text, self.ended = b"", False
        self.pids = {}
        self.said = []

    def hear(self, wanted, limit_s=LIMIT_S):
        """Read what the agent tells until it says something of that name, or is gone."""
        deadline = time.monotonic() + limit_s
        while not self.ended and not [one for one in self.said if wanted in one]:
            assert time.monotonic() < deadline, f"no {wanted}: {self.said}"
            if select.select([self.reading], [], [], 0.5)[0]:
                part = os.read(self.reading, 65536)
                self.ended = not part
                self.text += part
                *lines, self.text = self.text.split(b"\n")
                self.said += [json.loads(line) for line in lines]
        return next((one[wanted] for one in self.said if wanted in one), None)

    def arm(self):
        self.pids = self.hear("pids") or {}
        assert self.pids, self.said

    def begin(self):
        os.write(self.go, b"!")
        os.close(self.go)

    def bury(self):
        """End what is left, and see all of it gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.agent, signal.SIGKILL)
        self.hear("nothing of that name", 30)  # until the agent's end of the pipe, and every heir's, is closed
        os.close(self.reading)
        deadline = time.monotonic() + 30
        while True:  # orphans come to us: a subreaper
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                assert time.monotonic() < deadline, "something outlives its agent"
                time.sleep(0.002)

    def reported(self):
        return max((one["committed"] for one in self.said if "committed" in one), default=None)


def live(directory, keep, told, waiting):
    Agent(directory, keep, lambda body: os.write(told, json.dumps(body).encode() + b"\n")).live(
        lambda: os.read(waiting, 1)
    )


def traced(pid, strace):
    """True when every thread of a process is held by that strace."""
    try:
        texts = [Path(f"/proc/{pid}/task/{task}/status").read_text() for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return False
    return all(f"TracerPid:\t{strace}\n" in text for text in texts)


def attach(pid, words):
    strace = subprocess.Popen(["strace", "-f", "-qq", "-p", str(pid), *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not traced(pid, strace.pid):
        assert strace.poll() is None, strace.stderr.read()
        assert time.monotonic() < deadline, "strace does not come to hold it"
        time.sleep(0.002)
    return strace


def payloads(directory, step):
    """What a fresh process loads for every rank."""
    made = {}
    for rank in range(WORLD):
        with open_checkpoint(os.path.join(directory, f"step-{step}"), rank, WORLD) as state:
            made[rank] = bytes(state.payload())
    return made


def watched_life(directory, keep, logs):
    """One life of the job under strace, with nobody killed; what it calls goes to `logs`, by process."""
    trial = Trial(directory, keep)
    trial.arm()
    traces = [attach(trial.pids[name], ["-o", log, "-e", f"trace={CALLS}"]) for name, log in logs.items()]
    trial.begin()
    assert trial.hear("end") is True, trial.said
    trial.bury()
    for one in traces:
        one.wait(30)
        one.stderr.close()


def most_calls(log):
    """How often each call was made, by the thread that made it most often: strace counts by thread."""
    lines = Path(log).read_text().splitlines()
    by_thread = collections.Counter((m[1], m[2]) for line in lines if (m := re.match(r"(\d+) +(\w+)\(", line)))
    most = collections.Counter()
    for (_, call), count in by_thread.items():
        most[call] = max(most[call], count)
    return most


def counted(directory):
    """The states of all saves, and how often each process makes each call in the saves of steps 4 and 6."""
    where = os.path.join(directory, "calm")
    logs = {name: os.path.join(directory, f"{name}.strace") for name in VICTIMS}
    shutil.rmtree(where, ignore_errors=True)
    watched_life(where, 100, logs)
    states = {step: payloads(where, step) for step in (2, 4, 6)}
    shutil.rmtree(where)
    watched_life(where, 1, logs)  # its retention makes calls too
    shutil.rmtree(where)
    return states, {name: most_calls(log) for name, log in logs.items()}


def points(found):
    """Every call of every process, and writer 0's and the agent's once more with all killed at it."""
    for name in VICTIMS:
        for call, count in sorted(found[name].items()):
            for n in range(1, count + 1):
                yield f"{name}:{call}:{n}"
                if name in ("writer-0", "agent"):
                    yield f"all@{name}:{call}:{n}"


def kill_at(directory, point, states):
    """One point; return what came of it. AssertionError where the law does not hold."""
    process, call, count = point.split(":")
    name = process.removeprefix("all@")
    where, log = os.path.join(directory, "victim"), os.path.join(directory, "victim.strace")
    shutil.rmtree(where, ignore_errors=True)
    trial = Trial(where)
    trial.arm()
    words = ["-o", log, "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={count}"]
    strace = attach(trial.pids[name], words)
    trial.begin()
    if process.startswith("all@"):
        while strace.poll() is None and not trial.ended and not [one for one in trial.said if "end" in one]:
            with contextlib.suppress(AssertionError):
                trial.hear("end", 0.0)
        for pid in trial.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    trial.hear("end")
    trial.bury()
    strace.wait(30)
    strace.stderr.close()
    assert not [one for one in trial.said if "error" in one], trial.said
    return {"point": point, "fired": most_calls(log)[call] >= int(count)} | judge(where, trial, states)


def judge(directory, trial, states):
    """The law: exactly one of the states ever saved, never older than the last reported durable."""
    reading, told = os.pipe()
    reader = os.fork()
    if reader == 0:
        os.write(told, json.dumps(_fresh(directory, states)).encode())
        os._exit(0)
    os.close(told)
    os.waitpid(reader, 0)
    body = json.loads(os.read(reading, 1 << 20) or b"{}")
    os.close(reading)
    reported = trial.reported()
    assert body.get("exact"), (body, trial.said)
    assert body["loaded"] >= reported, f"loads {body['loaded']} where {reported} was reported durable"
    assert not body["left"], body
    failed = [one["failed"] for one in trial.said if "failed" in one]
    return {"reported": reported, "loaded": body["loaded"], "failed": failed}


def _fresh(directory, states):
    """In a fresh process: what the next job finds."""
    try:
        claim = Claim(directory, PosixFiles())
        claim.take("the next job")
        claim.close()
        newest, wounds = catalog.newest_whole(directory)
        left = [name for name in os.listdir(directory) if not re.fullmatch(r"step-\d+", name)]
        if newest is None or wounds:
            return {"wounds": [str(w) for w in wounds]}
        return {"loaded": newest.step, "left": left, "exact": payloads(directory, newest.step) == states[newest.step]}
    except BaseException:
        return {"error": traceback.format_exc()[-1500:]}


def chosen(found, verb, wanted):
    """The points that were asked for."""
    known = list(points(found))
    if verb == "sample":
        seed, count = map(int, wanted)
        return random.Random(seed).sample([point for point in known if point.split(":")[1] not in WAITS], count)
    if verb == "run":
        return [point for point in known if any(point == one or point.startswith(f"{one}:") for one in wanted)]
    return known


HEAD = """# A kill at every system call of a save

`strace -f -p PID -e inject=CALL:signal=SIGKILL:when=N` at each call that each process makes from the word that step 2
is durable to the end of the job: the saves of steps 4 and 6, and the removal of 2 and 4. `all@P`: everybody is killed
when P is. After each, a fresh process claims the directory and loads: every byte of every rank must be that of one of
the states ever saved, never older than the last that was reported durable, and nothing of the dead is left. Made by

    PYTHONPATH=src python tests/procs/checkpoint/kill_points.py DIR table

which ends at the first point where that is not so. {points} points, {fired} kills (at the others the process did not
come to the call so often this time), none wrong. `tests/procs/checkpoint/test_kill_points.py` runs a sample of them,
and all in the long tier.

| process | call | points | kills | loaded: as reported | loaded: a newer one | step 2, 4, 6 | saves failed by name |
|---|---|---|---|---|---|---|---|"""


def table(rows):
    """Print the page."""
    fired = [row for row in rows if row["fired"]]
    print(HEAD.format(points=len(rows), fired=len(fired)))
    for process, call in dict.fromkeys(tuple(row["point"].split(":")[:2]) for row in rows):
        mine = [row for row in rows if row["point"].startswith(f"{process}:{call}:")]
        hit = [row for row in mine if row["fired"]]
        same = sum(row["loaded"] == row["reported"] for row in hit)
        steps = ", ".join(str(sum(row["loaded"] == step for row in hit)) for step in (2, 4, 6))
        failed = sum(len(row["failed"]) for row in hit)
        print(f"| {process} | {call} | {len(mine)} | {len(hit)} | {same} | {len(hit) - same} | {steps} | {failed} |")


def main(directory, verb, *wanted):
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: orphans come to this process
    os.makedirs(directory, exist_ok=True)
    states, found = counted(directory)
    if verb == "list":
        print("\n".join(points(found)))
        return
    rows = []
    for point in chosen(found, verb, wanted):
        rows.append(kill_at(directory, point, states))
        if verb != "table":
            print(json.dumps(rows[-1]), flush=True)
    if verb == "table":
        table(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
