"""How a process becomes one that belongs to nobody: it outlives who started it, and no terminal reaches it."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from everstep import clock
from everstep.process import kernel

_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from {} import main; main(sys.argv[1:])"
_OURS = str(Path(clock.__file__).parent.parent)


def start(module: str, *arguments: str, fds: tuple[int, ...] = (), env: Mapping[str, str] | None = None) -> None:
    """Run a module of ours, whose `main` detaches, in a process that belongs to nobody; it inherits `fds`.

    A `queue.py` in the folder that the script was started from is not met (-P), we are found wherever we are, and the
    caller's own `__main__` is not run again. `env` left out: the caller's.
    """
    words = [sys.executable, "-P", "-c", _PROGRAM.format(module), _OURS, *map(str, fds), *arguments]
    with subprocess.Popen(words, pass_fds=fds, stdin=subprocess.DEVNULL, env=env) as process:
        process.wait()


def detach() -> None:
    """Go on in a grandchild with a session of its own; what was started ends at once, well.

    So the worker has no child of ours: its own waiting for children, and torch's handler of SIGCHLD, stay undisturbed.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in kernel.ASKING:
        signal.signal(number, signal.SIG_IGN)  # who we watch decides when we end
