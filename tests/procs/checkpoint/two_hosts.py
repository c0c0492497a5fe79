"""Hosts for tests: network namespaces on a bridge, each with a name of its own, and processes that live in one.

Processes are forked from the test's, where torch is loaded. What lives on a host is found, and ended, by its namespace.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS = 0x40000000, 0x04000000, 0x00020000
PATIENCE_S = 120.0


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _call(result):
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def cover(directory):
    """For the calling process, and what it starts, another directory lies at that place."""
    if os.getuid() != 0:
        pytest.skip("mounts need root")
    _call(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(directory)], check=True)


class Host:
    """One namespace."""

    def __init__(self, mark, number):
        self.name, self.bridge, self.number = f"ev{mark}{number}", f"evb{mark}", number
        self.address = f"10.78.{os.getpid() % 250}.{10 + number}"
        self.children = []

    def open(self):
        ip("netns", "add", self.name)
        ip("link", "add", f"v{self.name}", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", f"v{self.name}", "master", self.bridge, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.name, "link", "set", "eth0", "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def enter(self):
        """Make the calling process one of this host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}", "rb") as space:
            _call(libc.setns(space.fileno(), CLONE_NEWNET))
        _call(libc.unshare(CLONE_NEWUTS))
        name = self.name.encode()
        _call(libc.sethostname(name, len(name)))

    def start(self, call, *arguments, out=None):
        """Fork a process of this host that calls it; return its id."""
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.setsid()
                if out is not None:
                    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(fd, 1), os.dup2(fd, 2)
                    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
                self.enter()
                call(*arguments)
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(bool(error.code))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
        self.children.append(pid)
        return pid

    def pids(self):
        return [int(word) for word in ip("netns", "pids", self.name).split()]

    def named(self, start):
        """Processes of this host whose names begin so."""
        found = []
        for pid in self.pids():
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as name:
                if name.read().startswith(start):
                    found.append(pid)
        return found

    def power_off(self):
        """SIGKILL all that lives here."""
        for _ in range(5):
            pids = self.pids()
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.reap()
            if not pids:
                return

    def reap(self):
        """Return the statuses of those of our children that have ended."""
        ended = {}
        for pid in list(self.children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.children.remove(pid)
                ended[pid] = True
        return ended

    def wait(self, pid):
        """Return the exit code of a process that was started here."""
        self.children.remove(pid)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, f"process {pid} of {self.name} does not end"
            time.sleep(0.01)

    def quiet(self):
        """Wait until nothing lives here."""
        deadline = time.monotonic() + PATIENCE_S
        while pids := self.pids():
            assert time.monotonic() < deadline, f"processes {pids} of {self.name} are left"
            time.sleep(0.02)

    def close(self):
        self.power_off()
        for pid in self.children:
            os.waitpid(pid, 0)
        subprocess.run(["ip", "link", "del", f"v{self.name}"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)


def hosts(count, mark):
    """Yield so many hosts; nothing of them is left."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made = [Host(mark, number) for number in range(count)]
    try:
        ip("link", "add", made[0].bridge, "type", "bridge")
        ip("link", "set", made[0].bridge, "up")
        for one in made:
            one.open()
        yield made
    finally:
        for one in made:
            one.close()
        subprocess.run(["ip", "link", "del", made[0].bridge], check=False, capture_output=True)


class Frozen:
    """Processes that do not run, and are not seen to be stopped: what is slow, not what was signalled. A context."""

    def __init__(self, name, pids):
        old = Path("/sys/fs/cgroup/freezer")
        self._old = old.is_dir()
        self.where = (old if self._old else Path("/sys/fs/cgroup")) / name
        self.pids = pids

    def _state(self, *, frozen):
        if self._old:
            (self.where / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
        else:
            (self.where / "cgroup.freeze").write_text("1" if frozen else "0")

    def __enter__(self):
        try:
            self.where.mkdir()
            for pid in self.pids:
                (self.where / "cgroup.procs").write_text(str(pid))
            self._state(frozen=True)
        except OSError as error:
            pytest.skip(f"needs leave to freeze a control group: {error}")
        return self

    def __exit__(self, *_):
        self._state(frozen=False)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.where.rmdir()
                return
            except OSError:  # what was killed is ending
                assert time.monotonic() < deadline, f"{self.where} stays"
                time.sleep(0.01)
