"""A store of a given bandwidth, outside of whatever is measured: `bindfs --write-rate` over FUSE.

Rule 1: the throttle is a file system of its own. It cannot tell one implementation from another, and takes nothing of
        the interpreter that is measured. A throttle inside that process would: so where this one is not to be had, the
        benchmark is refused, by the name of what is missing.
Rule 2: it is measured before it is used. One that does not hold what was asked is refused too.
Rule 3: what was mounted is unmounted, and what was written is removed, however the benchmark ends; only SIGKILL leaves
        the mount (`fusermount -u PATH`).
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from everstep.clock import SYSTEM, Clock
from everstep.errors import ConfigurationError, UsageError

BINDFS = "bindfs"
MEMORY = Path("/dev/shm")
COPIES = 5  # of the state lie there at most: two that stay, one that is written, and what is not removed yet
MOUNT_S = 10.0
LOOK_S = 0.02
BURST_S = 0.4
PROBE_S = 0.8
PIECE = 1 << 20
REGION = 16 << 20
AS_IT_IS = 64 << 20
TRIES = 4
FAR_OFF = 8.0
OFF = 1.35  # a throttle that lets through so many times as much as was asked, or so much less, is none


@dataclass(frozen=True, slots=True)
class Disk:
    """Where the checkpoints go, and how fast it took bytes before anything was measured (bytes a second)."""

    path: Path
    rate: float
    how: str


@contextlib.contextmanager
def disk(bandwidth: int | None, store: Path | None, state: int, clock: Clock = SYSTEM) -> Generator[Disk]:
    """Give a folder that takes `bandwidth` bytes a second; None: as it is.

    Raises ConfigurationError where it cannot be had, UsageError for a `store` that is not there or too small.
    """
    with tempfile.TemporaryDirectory(prefix="throttled-disk-", dir=_home(store, state)) as home:
        backing = Path(home) / "backing"
        backing.mkdir()
        if bandwidth is None:
            yield Disk(backing, _probe(backing, AS_IT_IS, clock), f"{home}, as it is")
            return
        mount = Path(home) / "throttled"
        mount.mkdir()
        with _mounted(backing, mount, bandwidth, clock):
            found = _settled(mount, bandwidth, clock)
            if not bandwidth / OFF <= found <= bandwidth * OFF:
                raise ConfigurationError(
                    f"bindfs --write-rate={bandwidth} takes {found:.0f} bytes a second, not what was asked. "
                    "Ask for less than the storage below takes, or name another with --store."
                )
            yield Disk(mount, found, f"bindfs --write-rate={bandwidth} over {Path(home).parent}")


def check(bandwidth: int | None) -> None:
    """Raise ConfigurationError naming what the throttle lacks here."""
    if bandwidth is None:
        return
    missing = [
        *([] if shutil.which(BINDFS) else ["bindfs (the package bindfs)"]),
        *([] if Path("/dev/fuse").exists() else ["/dev/fuse (in a container: --device /dev/fuse --cap-add SYS_ADMIN)"]),
    ]
    if missing:
        raise ConfigurationError(
            f"--bandwidth needs {' and '.join(missing)}, not found here: the throttle is a file system, so that it is "
            "the same for all that is measured. Install it, or give --bandwidth unlimited and a slow --store."
        )


def _home(store: Path | None, state: int) -> str | None:
    need = COPIES * state
    if store is None:
        roomy = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= 2 * need
        store = MEMORY if roomy else Path(tempfile.gettempdir())
    if not store.is_dir():
        raise UsageError(f"--store {store}: there is no such folder.")
    free = shutil.disk_usage(store).free
    if free < need:
        raise UsageError(f"--store {store} has {free} bytes free; {COPIES} times the state, {need}, are needed.")
    return str(store)


@contextlib.contextmanager
def _mounted(backing: Path, mount: Path, rate: int, clock: Clock) -> Generator[None]:
    words = [BINDFS, "-f", "--multithreaded", f"--write-rate={rate}", str(backing), str(mount)]
    child = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = clock.now() + MOUNT_S
        while not mount.is_mount():
            if child.poll() is not None or clock.now() > deadline:
                child.kill()
                said = (child.communicate()[1] or b"").decode(errors="replace").strip() or "it says nothing"
                raise ConfigurationError(
                    f"bindfs cannot mount {mount}: {said}. Mounting needs root, or fusermount and /dev/fuse."
                )
            clock.sleep(LOOK_S)
        yield
    finally:
        _unmount(mount, child)


def _unmount(mount: Path, child: "subprocess.Popen[bytes]") -> None:
    for words in (["fusermount", "-u"], ["fusermount3", "-u"], ["umount"], ["fusermount", "-uz"], ["umount", "-l"]):
        if not os.path.ismount(mount):
            break
        with contextlib.suppress(OSError):
            subprocess.run([*words, str(mount)], capture_output=True, check=False)
    try:
        child.wait(MOUNT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stderr is not None:
        child.stderr.close()


def _settled(folder: Path, rate: int, clock: Clock) -> float:
    """Probe until the throttle holds; a few times where it is near: what else the machine did may have slowed one."""
    found = 0.0
    for _ in range(TRIES):
        found = _probe(folder, rate, clock)
        if rate / OFF <= found <= rate * OFF or not rate / FAR_OFF <= found <= rate * FAR_OFF:
            break
    return found


def _probe(folder: Path, rate: int, clock: Clock) -> float:
    """Return how many bytes a second are taken here; `rate` is what is expected.

    The throttle lets a fifth of a second's worth through at once when it has idled: that is not counted.
    """
    path, piece = folder / "probe", bytes(max(4096, min(PIECE, int(rate * LOOK_S))))
    with path.open("wb", buffering=0) as out:
        _pour(out, piece, rate * BURST_S, clock)
        written, took = _pour(out, piece, rate * PROBE_S, clock)
    path.unlink()
    return written / took


def _pour(out: BinaryIO, piece: bytes, size: float, clock: Clock) -> tuple[int, float]:
    """Write so many bytes over one another and sync them, for a limited time; return how many, and how long."""
    begun, written = clock.now(), 0
    while written < size and clock.now() - begun < 2 * PROBE_S:
        out.seek(written % REGION)
        out.write(piece)
        written += len(piece)
    os.fsync(out.fileno())
    return written, clock.now() - begun
