"""One weakness of NVRx's checkpointing each, run by any module with its names: `scripts/checkpoint_weaknesses.py`.

    checkpoint_weakness.py --impl MODULE --case W41 --folder FOLDER

MODULE is `nvidia_resiliency_ext.checkpointing` or `everstep.checkpoint`. A world of one over gloo. NVRx's calls of
`torch.cuda.synchronize` do nothing here, so that it comes beyond W43 on a machine without CUDA; the case W43 has them
as they are. The last line of the output is what was seen.
"""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

IMPL = ""
FOLDER = ""
LIMIT = 20.0


def module(name: str) -> Any:
    """Return a module of the implementation."""
    return importlib.import_module(f"{IMPL}.{name}")


def saver(**kwargs: Any) -> Any:
    """Return a TorchAsyncCheckpoint."""
    return module("async_ckpt.torch_ckpt").TorchAsyncCheckpoint(**kwargs)


def core() -> Any:
    """Return the module of queues."""
    return module("async_ckpt.core")


def say(text: str) -> None:
    """Write down what was seen, and end at once: nothing that hangs keeps it."""
    print(text, flush=True)
    os._exit(0)


def cut_words(text: str, most: int = 150) -> str:
    """Return a text as one line, cut behind a word."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most].rpartition(" ")[0] + " …"


def bounded(act: Any) -> str:
    """Say how `act` ended, within the limit."""
    told: list[str] = []

    def run() -> None:
        try:
            act()
            told.append("reported as finished")
        except BaseException as error:
            told.append(f"{type(error).__name__}: {cut_words(str(error))}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    return told[0] if told else f"waits, after {LIMIT:g} s still"


def children() -> list[int]:
    """Return the processes below this one."""
    import psutil

    return [p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def there(path: str) -> str:
    """Say whether a file can be loaded, and what is in it."""
    if not os.path.exists(path):
        return "no file"
    try:
        found = torch.load(path, weights_only=False)
    except Exception as error:
        return f"a torn file ({type(error).__name__})"
    return f"the {found['name']} state"


def missing(persistent: bool) -> None:
    """Save into a folder that is not there."""
    checkpoint = saver(persistent_queue=persistent)
    path = f"{FOLDER}/none/x.pt"
    checkpoint.async_save({"name": "new", "w": torch.ones(3)}, path)
    say(f"{bounded(lambda: checkpoint.finalize_async_save(blocking=True))}; {there(path)}")


def left(persistent: bool) -> None:
    """The worker leaves in the midst of a call."""
    queue, finalized = core().AsyncCallsQueue(persistent), []
    queue.schedule_async_request(core().AsyncRequest(os._exit, (17,), [lambda: finalized.append(1)], {}))
    told = bounded(lambda: queue.maybe_finalize_async_calls(blocking=True, no_dist=True))
    say(f"{told}; {'finalized' if finalized else 'not finalized'}")


def killed(persistent: bool) -> None:
    """The worker is killed in the midst of a call, as by a machine that is short of memory."""
    queue, finalized = core().AsyncCallsQueue(persistent), []
    queue.schedule_async_request(core().AsyncRequest(time.sleep, (600,), [lambda: finalized.append(1)], {}))
    deadline = time.monotonic() + LIMIT
    while not children() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(3.0)
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    told = bounded(lambda: queue.maybe_finalize_async_calls(blocking=True, no_dist=True))
    say(f"{told}; {'finalized' if finalized else 'not finalized'}")


def host() -> None:
    """Save tensors of the host."""
    checkpoint = saver()
    told = bounded(lambda: checkpoint.async_save({"name": "new", "w": torch.ones(3)}, f"{FOLDER}/x.pt"))
    aware = bounded(lambda: module("local.basic_state_dict").BasicTensorAwareStateDict({"w": torch.ones(3)}))
    aware = aware.replace("reported as finished", "works")
    say(f"async_save: {told.replace('reported as finished', 'works')}; BasicTensorAwareStateDict: {aware}")


def overwritten() -> None:
    """A worker is killed while it writes over a file that is good."""
    path = f"{FOLDER}/x.pt"
    torch.save({"name": "old"}, path)
    checkpoint = saver(persistent_queue=False)
    checkpoint.async_save({"name": "new", "w": [torch.zeros(8 << 20) for _ in range(24)]}, path)
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and max(os.path.getsize(f"{FOLDER}/{n}") for n in os.listdir(FOLDER)) < 32 << 20:
        time.sleep(0.001)
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    told = bounded(lambda: checkpoint.finalize_async_save(blocking=True))
    say(f"{told}; {there(path)}")


def cut() -> None:
    """The newest local checkpoint is cut."""
    state_dict = module("local.base_state_dict").TensorAwareStateDict
    kinds: dict[str, Any] = dict.fromkeys(
        ("pop_tensors", "insert_tensors", "init_tensors", "copy_tensors_to_cpu", "restore_tensor_device"),
        lambda self, *args, **kwargs: None,
    )
    kind = type("Held", (state_dict,), kinds | {"tensors": property(lambda self: []), "is_hollow": False})
    globals()["Held"] = kind
    kind.__module__ = "__main__"
    manager = module("local.ckpt_managers.local_manager").LocalCheckpointManager
    for iteration in (1, 2):
        held = kind()
        held.iteration = iteration
        manager(FOLDER, "job").save(held, iteration)
    folder = f"{FOLDER}/job/0"
    newest = sorted(os.listdir(folder))[-1]
    os.truncate(f"{folder}/{newest}", 100)
    fresh = manager(FOLDER, "job")
    told: list[str] = []

    def load() -> None:
        fresh.find_latest()
        told.append(f"loads iteration {fresh.load()[1][0]}")

    ended = bounded(load)
    say(f"{told[0] if told else ended}; {len(os.listdir(folder))} files kept")


def large() -> None:
    """Save iteration 10⁷."""
    manager = module("local.ckpt_managers.local_manager").LocalCheckpointManager(FOLDER, "job")
    say(
        bounded(lambda: manager._local_ckpt_path_from_id((10_000_000, 0, "job"))).replace(
            "reported as finished", "works"
        )
    )


def odd() -> None:
    """Make groups of two of three ranks."""
    group = module("local.replication.group_utils").parse_group_sequence
    made: list[Any] = []
    told = bounded(lambda: made.append(group(1, 2, 3)))
    say(f"groups {made[0]}" if made else told)


def unguarded() -> None:
    """A script without a guard saves and never asks."""
    path = f"{FOLDER}/x.pt"
    script = (
        "import sys, torch, torch.distributed as dist\n"
        "torch.cuda.synchronize = lambda *a: None\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        f"from {IMPL}.async_ckpt.torch_ckpt import TorchAsyncCheckpoint\n"
        "c = TorchAsyncCheckpoint()\n"
        f"c.async_save({{'name': 'new', 'w': torch.ones(3)}}, {path!r})\n"
    )
    file = f"{FOLDER}/script.py"
    with open(file, "w") as out:
        out.write(script)
    try:
        done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=40, check=False)
        said = [line for line in done.stderr.splitlines() if "Error" in line or "everstep" in line]
        last = cut_words((said or ["nothing"])[-1])
        ended = f"exit code {done.returncode}" + (f", last words: {last}" if done.stderr.strip() else "")
    except subprocess.TimeoutExpired:
        ended = "does not end within 40 s"
    say(f"{ended}; {there(path)}")


def orphan() -> None:
    """The trainer is killed while its worker waits for more."""
    script = (
        "import os, sys, time, torch, torch.distributed as dist\n"
        "torch.cuda.synchronize = lambda *a: None\n"
        "if __name__ == '__main__':\n"
        " dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        f" from {IMPL}.async_ckpt.torch_ckpt import TorchAsyncCheckpoint\n"
        " c = TorchAsyncCheckpoint()\n"
        f" c.async_save({{'name': 'new'}}, {FOLDER + '/x.pt'!r})\n"
        " c.finalize_async_save(blocking=True)\n"
        " import psutil\n"
        " print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)\n"
        " os.kill(os.getpid(), 9)\n"
    )
    file = f"{FOLDER}/script.py"
    with open(file, "w") as out:
        out.write(script)
    with open(f"{FOLDER}/pids", "w") as out:  # a pipe would be held open by what outlives the trainer
        subprocess.run([sys.executable, file], stdout=out, stderr=subprocess.DEVNULL, timeout=60, check=False)
    with open(f"{FOLDER}/pids") as out:
        pids = [int(word) for word in out.read().split()]
    time.sleep(5.0)
    lives = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    for pid in lives:
        os.kill(pid, signal.SIGKILL)
    say(f"{len(lives)} of {len(pids)} processes live 5 s after it")


def counted() -> None:
    """Count what stands beside a trainer that has saved by torch and by DCP."""
    import psutil

    checkpoint = saver()
    checkpoint.async_save({"name": "new", "w": torch.ones(3)}, f"{FOLDER}/x.pt")
    checkpoint.finalize_async_save(blocking=True)
    saved = children()
    filesystem = module("async_ckpt.filesystem_async")
    queue = getattr(filesystem, "get_write_results_queue", None) or filesystem._get_write_results_queue
    queue()
    pss = sum(psutil.Process(pid).memory_full_info().pss for pid in children()) / 1e6
    say(f"{len(saved)} after a save, {len(children())} once DCP asks for results; {pss:.0f} MB (PSS) in all")


def buckets() -> None:
    """Write the files of one save on a disk whose every fsync takes a second: one of them, and four."""
    _written(1, "first")  # what stands beside a save is begun once
    strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(os.getpid()), "-e", "trace=fsync"]
    delaying = subprocess.Popen([*strace, "-e", "inject=fsync:delay_enter=1000000"])
    time.sleep(2.0)
    took = [_written(count, f"of-{count}") for count in (1, 4)]
    delaying.terminate()
    say(f"one file {took[0]:.1f} s, four {took[1]:.1f} s")


def _written(count: int, name: str) -> float:
    state = {f"w{n}": torch.ones(1000) for n in range(8)}
    writer = module("async_ckpt.filesystem_async").FileSystemWriterAsync(f"{FOLDER}/{name}", thread_count=count)
    os.makedirs(f"{FOLDER}/{name}", exist_ok=True)
    module("async_ckpt.state_dict_saver").save_state_dict_async_plan(state, writer, None, 0)
    write, preload, given = writer.get_save_function_and_args()
    arguments = list(given)
    if preload is not None:
        arguments[1] = preload()
    began = time.monotonic()
    write(*arguments)
    return time.monotonic() - began


CASES = {
    "W41": lambda: missing(False), "W41 left": lambda: left(False), "W41 killed": lambda: killed(False),
    "W42": lambda: missing(True), "W42 left": lambda: left(True), "W42 killed": lambda: killed(True), "W43": host,
    "W44": overwritten, "W45": buckets, "W46": cut, "W47": large, "W48": odd, "W51": unguarded, "W52": orphan,
    "W53": counted,
}  # fmt: skip


def main() -> None:
    """Run one case."""
    global IMPL, FOLDER
    parser = argparse.ArgumentParser()
    for name in ("--impl", "--case", "--folder"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    IMPL, FOLDER = args.impl, args.folder
    if args.case != "W43":
        torch.cuda.synchronize = lambda *_: None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    CASES[args.case]()


if __name__ == "__main__":
    main()
