"""Forks the ranks of one scenario after another from one warm interpreter, so that torch is imported once.

A request is one line of JSON: a test file, a function in it, how many ranks, its arguments. Each rank runs
`function(rank, port, **arguments)` in a process of its own, where `port` is that of a TCPStore in one more process.
The answer is one line: for each rank its return value, or what killed it.
"""

import importlib.util
import json
import os
import select
import signal
import sys
import time
import traceback
from datetime import timedelta

LIMIT_S = 50.0


def load(path):
    """Import a test file once, by its path."""
    name = "scenario_" + os.path.basename(path).removesuffix(".py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def fork(work):
    """Run `work` in a child, return its pid and the pipe that its answer comes from."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    os.close(ours)
    os.setpgid(0, 0)
    signal.alarm(int(LIMIT_S) + 5)
    try:
        answer = {"value": work(theirs)}
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stderr.flush()
    os.write(theirs, json.dumps(answer).encode())
    os._exit(0)


def host(pipe):
    """A store that lives until it is killed; says its port first."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    os.write(pipe, f"{store.port}\n".encode())
    signal.pause()


def answers(pipes, limit_s):
    """Read each pipe to its end, or until the limit."""
    texts, until = dict.fromkeys(pipes, b""), time.monotonic() + limit_s
    open_pipes = set(pipes)
    while open_pipes and (left := until - time.monotonic()) > 0:
        for fd in select.select(list(open_pipes), [], [], left)[0]:
            piece = os.read(fd, 65536)
            texts[fd] += piece
            if not piece:
                open_pipes.discard(fd)
    return [texts[fd] for fd in pipes]


def serve(request):
    """Run one scenario."""
    function = getattr(load(request["file"]), request["function"])
    store_pid, store_pipe = fork(host)
    port = int(os.read(store_pipe, 64))
    arguments = request["arguments"]
    children = [fork(lambda _, rank=rank: function(rank, port, **arguments)) for rank in range(request["ranks"])]
    texts = answers([pipe for _, pipe in children], request["limit_s"])
    results = []
    for (pid, pipe), text in zip(children, texts, strict=True):
        if not text:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(pipe)
        results.append(json.loads(text) if text else {"died": os.waitstatus_to_exitcode(status)})
    os.kill(store_pid, signal.SIGKILL)
    os.waitpid(store_pid, 0)
    os.close(store_pipe)
    return results


def main():
    """Serve until the other side closes."""
    import torch
    import torch._dynamo
    import torch._inductor.config
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        out.write(json.dumps(serve(json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
