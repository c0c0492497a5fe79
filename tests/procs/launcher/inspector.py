# ruff: noqa: E402 - its first look is before its own imports
"""A script that knows nothing of its launcher: writes what a process finds around itself to INSPECTED/RANK.json.

With `--fail` it ends by an exception, whose traceback is looked at too.
"""

import sys

EARLY = {
    "argv": sys.argv[:],
    "path": sys.path[:],
    "flags": str(sys.flags),
    "warnoptions": sys.warnoptions[:],
    "xoptions": str(sys._xoptions),
    "orig_argv": sys.orig_argv,
    "names": sorted(globals()),
    "executable": sys.executable,
}

import ctypes
import faulthandler
import gc
import hashlib
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import tempfile
import threading
import time
import tracemalloc
import warnings
from pathlib import Path


def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}"), os.get_inheritable(int(name))
        except OSError:  # the folder itself
            continue
    return found


def handlers():
    found = {}
    for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        found[int(number)] = getattr(handler, "__name__", None) or str(handler)
    return found


def kernel_says(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(field + ":"))


def process():
    return {
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": os.sched_getscheduler(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "cwd": os.getcwd(),
        "umask": kernel_says("Umask"),
        "blocked": kernel_says("SigBlk"),
        "ignored": kernel_says("SigIgn"),
        "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "tty": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[4],
        "threads": len(os.listdir("/proc/self/task")),
        "coredump": Path("/proc/self/coredump_filter").read_text(),
        "groups": os.getgroups(),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    }


def loggers():
    every = sorted(logging.root.manager.loggerDict.items())
    kept = [(name, one) for name, one in every if isinstance(one, logging.Logger)]
    return {n: [one.level, [str(h) for h in one.handlers], one.propagate, one.disabled] for n, one in kept}


def log_state():
    root = logging.root
    return {
        "root": [str(h) for h in root.handlers],
        "level": root.level,
        "disable": root.manager.disable,
        "class": logging.getLoggerClass().__name__,
        "raise": logging.raiseExceptions,
    }


def streams():
    found = {}
    for name in ("stdin", "stdout", "stderr"):
        one = getattr(sys, name)
        found[name] = [
            type(one).__name__,
            one.fileno(),
            one.encoding,
            one.errors,
            one.line_buffering,
            one.write_through,
            one.name,
            getattr(one, "mode", "absent"),
            one is getattr(sys, f"__{name}__"),
        ]
    return found


def interpreter():
    main = sys.modules["__main__"]
    attributes = ("__file__", "__name__", "__package__", "__doc__", "__spec__", "__cached__", "__annotations__")
    return {
        "main": {name: str(getattr(main, name, "absent")) for name in attributes},
        "loader": type(main.__loader__).__name__,
        "builtins": type(__builtins__).__name__,
        "is_main": main.__dict__ is globals(),
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.displayhook is sys.__displayhook__,
            sys.unraisablehook is sys.__unraisablehook__,
            threading.excepthook is threading.__excepthook__,
            sys.breakpointhook is sys.__breakpointhook__,
            str([sys.gettrace(), sys.getprofile(), sys.get_asyncgen_hooks()]),
        ],
        "finders": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
        "path_hooks": [getattr(h, "__qualname__", str(h)) for h in sys.path_hooks],
        "bytecode": [sys.dont_write_bytecode, sys.pycache_prefix],
        "dlopen": sys.getdlopenflags(),
        "hash": hash("a word"),
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "encodings": [sys.getfilesystemencoding(), locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()],
        "tools": [tracemalloc.is_tracing(), faulthandler.is_enabled()],
        "threads": sorted((t.name, t.daemon) for t in threading.enumerate()),
        "main_thread": [
            threading.current_thread() is threading.main_thread(),
            threading.main_thread().native_id == os.getpid(),
            threading.main_thread().ident == threading.get_ident(),
        ],
        "mp_main": sys.modules.get("__mp_main__") is main,
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "process": [multiprocessing.current_process().name, str(multiprocessing.parent_process())],
        "children": len(multiprocessing.active_children()),
        "temporary": [tempfile.tempdir, tempfile.gettempdir()],
        "socket_timeout": socket.getdefaulttimeout(),
    }


def blas_threads():
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = []
    for path in {line.split(maxsplit=5)[5] for line in lines if "openblas" in line}:
        library = ctypes.CDLL(path)
        names = [f"{a}openblas_get_num_threads{b}" for a in ("scipy_", "") for b in ("64_", "_64", "")]
        found += [getattr(library, name)() for name in names if hasattr(library, name)]
    return found


def torch_state():
    import numpy
    import torch

    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), blas_threads()],
        "kernel_threads": len(os.listdir("/proc/self/task")),
        "numpy": [str(numpy.geterr()), str(numpy.get_printoptions())],
        "printing": str(torch._tensor_str.PRINT_OPTS),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")],
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ],
        "cuda": [torch.cuda.is_initialized(), len(torch.cuda._queued_calls)],
        "distributed": torch.distributed.is_initialized(),
        "start_method": [
            multiprocessing.get_start_method(allow_none=True),
            torch.multiprocessing.get_sharing_strategy(),
        ],
        "handlers": handlers(),
        "warnings": [str(f) for f in warnings.filters],
        "loggers": {n: one for n, one in loggers().items() if not n.startswith(("torch", "c10d", "strobelight"))},
        "log": log_state(),
        "environment": dict(os.environ),
    }


def own():
    """What no two processes have in common."""
    import numpy
    import torch

    return {
        "random": random.random(),
        "initial_seed": torch.initial_seed(),
        "torch": torch.rand(1).item(),
        "numpy": numpy.random.rand(),
        "authkey": hashlib.sha256(multiprocessing.current_process().authkey).hexdigest(),
    }


if __name__ == "__main__":
    seen = EARLY | {"descriptors": descriptors(), "handlers": handlers(), "process": process(), "log": log_state()}
    seen |= {"streams": streams(), "interpreter": interpreter(), "torch": torch_state(), "own": own()}
    path = Path(os.environ["INSPECTED"]) / f"{os.environ['RANK']}.json"
    path.with_suffix(".part").write_text(json.dumps(seen, default=str))
    path.with_suffix(".part").rename(path)
    if "--fail" in sys.argv:
        while len(list(path.parent.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        raise ValueError("on purpose")
