"""A warm worker is told from a cold one by nothing but speed: one script looks around itself and tells."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(180)]
INSPECTOR = Path(__file__).with_name("inspector.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
EVERSTEP = (sys.executable, "-m", "everstep.cli", "run", "--max-restarts", "0", "--run-dir")
THE_JOB_S = {
    "EVERSTEP_BORN", "EVERSTEP_JOB", "EVERSTEP_MONITOR_PAGE", "INSPECTED", "MASTER_ADDR", "MASTER_PORT",
    "PYTHONHASHSEED", "RES_OPTIONS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCH_CPP_LOG_LEVEL",
}  # fmt: skip
"""Variables that differ from one launch to the next, or are everstep's (docs/launcher.md)."""
ABOVE = 496
"""Descriptors above it are the launcher's."""


def folder_of(tmp_path, name):
    """A folder of its own with a link to the script in it: `sys.path` has the folder that the link leads to."""
    made = tmp_path / name
    made.mkdir()
    (made / "linked.py").symlink_to(INSPECTOR)
    return made


def surroundings():
    """In the launcher, before it is exec'd: nothing here is what a process has by itself."""
    for number in (signal.SIGINT, signal.SIGQUIT):  # ignored where the suite runs in the background of a shell
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2048))
    resource.setrlimit(resource.RLIMIT_CORE, (4096, 8192))


def look(folder, *command, env=None, ranks=1):
    """Run the script; return what each rank found, its launcher's exit code and what was printed as an error."""
    environment = {n: v for n, v in os.environ.items() if n not in {"OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"}}
    environment |= {"INSPECTED": str(folder), "TMPDIR": str(folder.parent), "PYTHONWARNINGS": "default::BytesWarning"}
    done = subprocess.run(
        command, cwd=folder, env=environment | (env or {}), preexec_fn=surroundings, start_new_session=True,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return found, done.returncode, done.stderr


def told(found, *, pools=True):
    """What is to be the same: all but what is a process's own, the job's variables, and descriptors of the launcher's.

    `pools`: the kernel's count of threads too; OpenBLAS has one more where its pool has been made larger.
    """
    kept = {name: value for name, value in found.items() if name != "own"}
    kept["descriptors"] = {n: what for n, what in found["descriptors"].items() if int(n) < ABOVE}
    environment = found["torch"]["environment"]
    kept["torch"] = found["torch"] | {"environment": {n: v for n, v in environment.items() if n not in THE_JOB_S}}
    kept["interpreter"] = {n: v for n, v in found["interpreter"].items() if n != "hash"}
    if not pools:
        kept["process"] = {n: v for n, v in kept["process"].items() if n != "threads"}
        kept["torch"].pop("kernel_threads")
    text = json.dumps(kept).replace(environment["INSPECTED"], "HERE")
    return json.loads(re.sub(r"0x[0-9a-f]+|pipe:\[\d+\]", "…", text))


def differences(one, other, path=""):
    """Every place where two of them differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        rows = [differences(one.get(n), other.get(n), f"{path}.{n}") for n in sorted({*one, *other})]
        return [row for found in rows for row in found]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        rows = [differences(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(zip(one, other, strict=True))]
        return [row for found in rows for row in found]
    return [] if one == other else [f"{path}: {one!r} is not {other!r}"]


def test_a_script_finds_in_a_worker_of_the_zygote_what_it_finds_in_a_fresh_interpreter(tmp_path):
    plain, warm = folder_of(tmp_path, "plain"), folder_of(tmp_path, "warm")
    (found, found_too), code, _ = look(warm, *EVERSTEP, "run", "--nproc-per-node", "2", "linked.py", "a", ranks=2)
    assert code == 0
    environment = found["torch"]["environment"]
    (fresh,), _, _ = look(plain, sys.executable, "-u", "linked.py", "a", env=environment | {"INSPECTED": str(plain)})
    assert not differences(told(found), told(fresh))
    for name, value in found["own"].items():
        assert len({value, found_too["own"][name], fresh["own"][name]}) == 3, name
    ours = {n: what for n, what in found["descriptors"].items() if int(n) >= ABOVE}
    assert len(ours) == 3
    assert not any(inherited for _, inherited in ours.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "words", "env"),
    [
        (1, ["linked.py", "--fail"], {}),  # one: what two print as they fail is mixed
        (1, ["linked.py", "a"], {}),
        (1, ["-m", "inspector"], {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{INSPECTOR.parent}"}),
        (2, ["linked.py"], {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "7"}),
        (1, ["linked.py"], {"OPENBLAS_NUM_THREADS": "1", "PYTHONDEVMODE": "1", "PYTHONUTF8": "1"}),
    ],
)
def test_torchrun_cold_and_warm_agree(tmp_path, ranks, words, env):
    each = {}
    for name, launcher in (
        ("torchrun", TORCHRUN),
        ("cold", (*EVERSTEP, "run", "--preload", "none")),
        ("warm", (*EVERSTEP, "run")),
    ):
        folder = folder_of(tmp_path, name)
        found, code, err = look(folder, *launcher, "--nproc-per-node", str(ranks), *words, env=env, ranks=ranks)
        at = err.find("Traceback (most recent call last):\n")
        end = err.find("\n", err.find("on purpose"))
        each[name] = [[told(one, pools=False) for one in found], code, err[at:end].replace(str(folder), "HERE")]
        if "--fail" in words:
            assert at >= 0
        assert len({one["own"]["initial_seed"] for one in found}) == ranks
    assert not differences(each["cold"][0], each["torchrun"][0])
    assert not differences(each["warm"], each["cold"])
    assert ("--fail" not in words) == (each["warm"][1] == 0)


SETS = """
import os
os.environ["OMP_NUM_THREADS"] = "2"
import torch
os.write(1, f"threads {torch.get_num_threads()}\\n".encode())
"""
LAZY = """
import sys
there = "rich.table" in sys.modules
def main():
    import rich.table
    sys.stdout.write(f"there before: {there}\\n")  # in one piece: both ranks write to one pipe
main()
"""


def said(folder, text, *words):
    script = folder / "script.py"
    script.write_text(text)
    command = [*EVERSTEP[:4], "--run-dir", str(folder / words[0]), "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.long
def test_what_the_last_run_imported_is_there_in_the_next_but_not_for_another_script(tmp_path):
    assert said(tmp_path, LAZY, "one")[0] == "there before: False\n" * 2
    assert said(tmp_path, LAZY, "two")[0] == "there before: True\n" * 2
    other = tmp_path / "other"
    other.mkdir()
    assert said(other, LAZY, "../three")[0] == "there before: False\n" * 2


@pytest.mark.long
def test_a_script_that_sets_what_torch_reads_when_it_is_loaded_begins_cold_and_is_told(tmp_path):
    out, err = said(tmp_path, SETS, "one")
    assert out == "threads 2\n" * 2
    assert "sets OMP_NUM_THREADS, which is read when torch is loaded: each worker is a new interpreter" in err
