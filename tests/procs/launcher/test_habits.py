"""Habits of scripts that know nothing of their launcher: what they leave behind is the same under torchrun and warm."""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.long]

SCRIPT = """
import json, os, sys, tempfile
import asks, threaded
import graphlib
rank = os.environ["RANK"]
losses = open(f"losses-{rank}", "w")
losses.write("0.5 0.25")
temporary = tempfile.NamedTemporaryFile(dir=".", prefix="temporary")
threaded.WORDS.put(rank)
threaded.WORDS.join()
facts = {"rank": asks.RANK, "needs": asks.SIZE, "beside": graphlib.VALUE, "heard": threaded.HEARD}
facts |= {"main": __file__, "path": sys.path[0]}
with open(f"facts-{rank}", "w") as file:
    json.dump(facts, file)
"""
ASKS = """
import os, sys
RANK = int(os.environ.get("LOCAL_RANK", 0))
SIZE = os.environ.get("WORLD_SIZE") or sys.exit("start me with a launcher")
"""
THREADED = """
import queue, threading
WORDS, HEARD = queue.Queue(), []
def listen():
    while True:
        HEARD.append(WORDS.get())
        WORDS.task_done()
threading.Thread(target=listen, daemon=True).start()
"""
LAUNCHERS = {"torchrun": ("-m", "torch.distributed.run"), "warm": ("-m", "everstep.cli", "run", "--run-dir", "../run")}


def left_by(folder, launcher, script):
    """Run it on two ranks in a folder of its own; return each file that it has left, with its text."""
    library, work = folder / "library", folder / "work"
    for made in (library, work / "app"):
        made.mkdir(parents=True)
    (library / "asks.py").write_text(ASKS)
    (library / "threaded.py").write_text(THREADED)
    for name in ("script.py", "app/__main__.py"):
        (work / name).write_text(SCRIPT)
        (work / name).with_name("graphlib.py").write_text("VALUE = 'of the script'")
    shutil.make_archive(str(work / "packed"), "zip", work / "app")
    before = {path.name for path in work.iterdir()}
    env = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{library}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *LAUNCHERS[launcher], "--nproc-per-node", "2", "--max-restarts", "0", script]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    left = {path.name: path.read_text() for path in work.iterdir() if path.name not in before}
    return {name: text.replace(str(folder), "HERE") for name, text in left.items()}


@pytest.mark.parametrize("script", ["script.py", "app", "packed.zip"])
def test_a_script_with_bad_habits_leaves_under_both_the_same(tmp_path, script):
    theirs = left_by(tmp_path / "theirs", "torchrun", script)
    ours = left_by(tmp_path / "ours", "warm", script)
    assert ours == theirs
    assert [json.loads(ours[f"facts-{rank}"])["rank"] for rank in (0, 1)] == [0, 1]
    assert ours["losses-1"] == "0.5 0.25"
