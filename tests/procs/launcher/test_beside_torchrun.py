"""One script and its flags under torchrun and under `everstep run`: exit code, error files, logs, what it reads."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long]

SCRIPT = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    what, place = sys.argv[1:3]
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"loss of rank {rank} attempt {attempt} place {place} role {os.environ['ROLE_NAME']}")
    if rank != "1":
        open(f"printed-{rank}-{attempt}", "w").close()
        return
    while not os.path.exists(f"printed-0-{attempt}"):  # else it may be ended before it has printed
        time.sleep(0.01)
    if what == "once" and attempt == "1":
        return
    if what in ("raise", "once"):
        raise ValueError("the third batch is bad")
    if what == "exit":
        sys.exit(3)
    if what == "kill":
        os.kill(os.getpid(), 9)
    if what == "abort":
        os.abort()
if __name__ == "__main__":
    main()
"""
LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run"),
    "everstep": ("-m", "everstep.cli", "run", "--run-dir", "run"),
}
FLAGS = ("--nproc-per-node", "2", "--redirects", "3", "--tee", "1", "--log-dir", "logs", "--role", "trainer")


def both(tmp_path, *words, **environment):
    """Run the same under both; return for each the exit code, what was shown, and all files below its log folder."""
    told = {}
    for name, launcher in LAUNCHERS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        own = os.environ | {"TORCHELASTIC_ERROR_FILE": "why.json"} | environment
        command = [sys.executable, *launcher, *words]
        done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=120)
        runs = list((folder / "logs").glob("*")) if (folder / "logs").exists() else []
        files = {str(path.relative_to(run)): path for run in runs for path in run.rglob("*") if path.is_file()}
        told[name] = done.returncode, sorted(done.stdout.splitlines()), files, folder / "why.json"
    return told["torchrun"], told["everstep"]


@pytest.mark.parametrize("what", ["fine", "raise", "once", "exit", "kill", "abort"])
def test_a_script_ends_under_both_alike_and_leaves_the_same_files(tmp_path, what):
    restarts = ("--max-restarts", "1" if what == "once" else "0")
    words = ("--duplicate-stdout-filters", "of rank 1", *restarts, "script.py", what, "local-${local_rank}")
    theirs, ours = both(tmp_path, *FLAGS, *words)
    assert ours[0] == theirs[0]
    assert ours[0] == (0 if what in ("fine", "once") else 1)
    assert ours[1] == theirs[1]  # what --tee shows, each line with its prefix; the argument's macro filled in
    assert set(ours[2]) == set(theirs[2])
    for name in (name for name in ours[2] if "stdout" in name):
        assert ours[2][name].read_text() == theirs[2][name].read_text(), name
    for error in (name for name in ours[2] if name.endswith("error.json")):
        told = [json.loads(files[error].read_text())["message"] for files in (theirs[2], ours[2])]
        assert told[0]["message"] == told[1]["message"] == "ValueError: the third batch is bad"
        assert ["main" in one["extraInfo"]["py_callstack"] for one in told] == [True, True]
    if what == "raise":
        reasons = [json.loads(side[3].read_text())["message"] for side in (theirs, ours)]
        assert reasons[0]["message"] == reasons[1]["message"] == "ValueError: the third batch is bad"
        assert reasons[0]["errorCode"] == reasons[1]["errorCode"] == 1


@pytest.mark.parametrize("code", [0, 5])
def test_another_program_ends_under_both_alike(tmp_path, code):
    theirs, ours = both(tmp_path, "--no-python", "--max-restarts", "0", "sh", "-c", f"echo $RANK; exit {code}")
    assert ours[:2] == theirs[:2]


def test_variables_are_flags_under_both(tmp_path):
    given = {"PET_NPROC_PER_NODE": "3", "PET_ROLE": "actor", "PET_LOCAL_RANKS_FILTER": "0,2", "PET_REDIRECTS": "0"}
    given["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "<${rank} of ${role_name}>"
    theirs, ours = both(tmp_path, "--tee", "1", "--max-restarts", "0", "script.py", "fine", "x", **given)
    assert ours[:2] == theirs[:2]
    assert len(ours[1]) == 2


def test_where_exit_codes_differ_ours_says_more(tmp_path):
    """torchrun's is 1 or 2 where a command line cannot be meant, and so is a failed job's; here it is 64."""
    theirs, ours = both(tmp_path, "gone.py")
    assert (theirs[0], ours[0]) == (1, 64)
    (tmp_path / "again").mkdir()
    theirs, ours = both(tmp_path / "again", "--no-such-flag", "script.py")
    assert (theirs[0], ours[0]) == (2, 64)
