"""Run each weakness of NVRx's checkpointing under it and under ours, one script, and write down what was seen.

    python scripts/checkpoint_weaknesses.py --python .venv-peers/bin/python --page docs/results/checkpoint-weaknesses.md

Nothing in the page was known beforehand: a cell is the last line that the run of that case has printed.
"""

import argparse
import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("checkpoint_weakness.py")
DOES = {
    "W41": "a save into a folder that is not there, a process for each save",
    "W41 left": "the process that makes the call leaves (`os._exit(17)`), a process for each call",
    "W41 killed": "it is killed, as by a machine that is short of memory",
    "W42": "a save into a folder that is not there, one worker for all saves",
    "W42 left": "the worker leaves (`os._exit(17)`)",
    "W42 killed": "the worker is killed",
    "W43": "tensors of the host, `torch.cuda.synchronize` as it is",
    "W44": "the worker is killed while it writes over a good file",
    "W45": "the files of one save, where every fsync takes a second (strace delays it)",
    "W46": "the newest of two local checkpoints is cut",
    "W47": "the name of iteration 10,000,000",
    "W48": "groups of two among three ranks",
    "W51": "a script without a guard saves, and never asks whether it is done",
    "W52": "the trainer is killed while its worker waits for more",
    "W53": "what stands beside a trainer that has saved",
}
NOT_RUN = {
    "W49": "a copy from a device that is not waited for: needs a device",
    "W50": "nesting and sharded tensors: in W43's row, since NVRx's class takes no tensor of the host",
}


def one(python: str, impl: str, case: str, env: dict[str, str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        words = [python, "-W", "ignore", str(SCRIPT), "--impl", impl, "--case", case, "--folder", folder]
        log = Path(folder, "said")  # not a pipe: a worker that outlives its trainer would hold it open
        with log.open("w") as out:
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.DEVNULL, env=env, start_new_session=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(120)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # the session that was begun for it, and what it has left behind
            process.wait()
        lines = log.read_text().strip().splitlines()
    return lines[-1].replace(folder + "/", "") if lines else f"no word (exit code {process.returncode})"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=".venv-peers/bin/python")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    env = os.environ | {"TORCH_CPP_LOG_LEVEL": "fatal", "GLOO_SOCKET_IFNAME": "lo"}
    rows = []
    for case, does in DOES.items():
        if args.only and case.split()[0] not in args.only.split(","):
            continue
        theirs = one(args.python, "nvidia_resiliency_ext.checkpointing", case, env)
        ours = one(sys.executable, "everstep.checkpoint", case, env)
        rows.append(f"| {case.split()[0]} | {does} | {theirs} | {ours} |".replace("\n", " "))
        print(rows[-1], flush=True)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = [
        "# NVRx's checkpoint weaknesses, run beside ours", "",
        "Each row is one case of `scripts/checkpoint_weakness.py`, run once under NVRx 0.4.1 and once under ours with",
        "only the import changed. A cell is what that run has said last; nothing was known beforehand. No CUDA here;",
        "NVRx's calls of `torch.cuda.synchronize` do nothing, W43's row apart. Groups of one process over gloo.", "",
        f"`python scripts/checkpoint_weaknesses.py --page docs/results/checkpoint-weaknesses.md`, {when}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.", "",
        "| id | what was done | NVRx 0.4.1 | Everstep |", "|---|---|---|---|", *rows, "",
        "Not run:", "", "| id | why |", "|---|---|", *(f"| {name} | {why} |" for name, why in NOT_RUN.items()), "",
    ]  # fmt: skip
    if args.page:
        args.page.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
