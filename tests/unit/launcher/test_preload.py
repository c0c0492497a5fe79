"""What the zygote loads beforehand: found in the last run, tried in a child, and not where a script sets variables."""

import json
import os
import sys
import types
from importlib.machinery import ModuleSpec

import pytest

from everstep.launcher import imports, trial
from everstep.launcher.config import LaunchConfig
from everstep.launcher.preload import settings


def module(name, origin):
    made = types.ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, origin=origin)
    return made


def test_installed_packages_alone_are_kept_and_not_what_was_there_before():
    loaded = {
        "lib": module("lib", "/env/lib/__init__.py"), "lib.part": module("lib.part", "/env/lib/part.py"),
        "beside": module("beside", "/home/me/beside.py"), "sys": module("sys", "built-in"),
        "alias": module("lib", "/env/lib/__init__.py"), "early": module("early", "/env/early.py"),
        "everstep.data": module("everstep.data", "/env/everstep/data.py"), "bare": types.ModuleType("bare"),
    }  # fmt: skip
    assert imports.installed(loaded, {"early"}, ["/env"]) == ["lib", "lib.part"]


def test_the_last_run_of_the_same_script_counts(tmp_path):
    for number, (name, script) in enumerate([("a", "/x.py"), ("b", "/y.py"), ("c", "/x.py"), ("d", "/z.py")]):
        (tmp_path / name).mkdir()
        file = tmp_path / name / imports.FILE
        file.write_text(json.dumps({"script": script, "modules": [name]}))
        os.utime(file, (number, number))
    (tmp_path / "d" / imports.FILE).write_text("torn {")
    new = tmp_path / "new"
    assert imports.of_last_run(new, "/x.py") == ["c"]
    assert imports.of_last_run(tmp_path / "a", "/x.py") == ["a"]
    assert imports.of_last_run(new, "/z.py") == []


def test_of_an_edited_script_what_was_preloaded_is_found_out_anew(tmp_path):
    script = tmp_path / "x.py"
    script.write_text("import one")
    known = {name for name in sys.modules if not name.startswith("_pytest")}
    imports.keep(tmp_path, str(script), known, ["_pytest"])
    first = imports.of_last_run(tmp_path, str(script))
    assert "_pytest" in first
    imports.keep(tmp_path, str(script), known, first)
    assert imports.of_last_run(tmp_path, str(script)) == first
    script.write_text("import two")
    imports.keep(tmp_path, str(script), known, first)
    assert imports.of_last_run(tmp_path, str(script)) == []


FINE = "VALUE = 1"
RAISES = "raise RuntimeError('no rank here')"
ENDS = "import os; os._exit(7)"
THREADS = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
HANGS = "import time; time.sleep(600)"
EXITS = "raise SystemExit('start me with a launcher')"
ASKS = "import os; RANK = int(os.environ.get('LOCAL_RANK', 0)); SIZE = os.getenv('WORLD_SIZE')"
ASKS_IN_VAIN = "import os; os.environ['RANK']"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (RAISES, "no rank here"), (ENDS, "it ended the process (status 7)"), (THREADS, "it begins threads"),
        (HANGS, "its import did not end within 1 s"), (EXITS, "SystemExit('start me with a launcher')"),
        (ASKS, "it reads LOCAL_RANK, WORLD_SIZE"), (ASKS_IN_VAIN, "it reads RANK"),
    ],
)  # fmt: skip
def test_what_spoils_a_fork_is_left_out_by_name(tmp_path, monkeypatch, text, why):
    for name, body in (("trial_first", FINE), ("trial_bad", text), ("trial_last", FINE)):
        (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    told = []
    names = ["trial_first", "trial_bad", "trial_last"]
    assert trial.harmless(names, os.fork, told.append, hang_s=1.0) == ["trial_first", "trial_last"]
    (word,) = told
    assert word.startswith("trial_bad is imported by each worker itself")
    assert why in word
    assert not [name for name in sys.modules if name.startswith("trial_")]


def test_a_package_that_asks_for_its_rank_falls_as_a_whole(tmp_path, monkeypatch):
    package = tmp_path / "trial_pack"
    package.mkdir()
    (package / "__init__.py").write_text("from . import part")
    (package / "part.py").write_text(ASKS)
    (tmp_path / "trial_other.py").write_text("import os; HOME = os.environ.get('HOME'); VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    told = []
    names = ["trial_pack:part", "trial_pack", "trial_pack.part", "trial_other:VALUE"]
    assert trial.harmless(names, os.fork, told.append) == ["trial_other:VALUE"]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("line", "cold", "alone"),
    [
        ('os.environ["OMP_NUM_THREADS"] = "8"', ("OMP_NUM_THREADS",), ()),
        ('os.environ["OMP_NUM_THREADS"] = "1"', (), ()),
        ('os.environ.setdefault("OMP_NUM_THREADS", "8")', (), ()),
        ('environ["TORCH_LOGS"] = "+dynamo"', ("TORCH_LOGS",), ()),
        ('os.putenv("MKL_DEBUG", x)', ("MKL_DEBUG",), ()),
        ('os.environ["HF_HOME"] = "/data"', (), ("HF_HOME",)),
        ('os.environ.update(HF_HOME="/data", MASTER_PORT="1")', (), ("HF_HOME",)),
        ('os.environ.update({"HF_HOME": "/data"})', (), ("HF_HOME",)),
        ("os.environ.update(more)", (), ("…",)),
        ("os.environ[name] = value", (), ("…",)),
        ('os.environ["NCCL_DEBUG"] = os.environ["RANK"]', (), ()),
        ('os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"', (), ()),
        ('print(os.environ["HF_HOME"]); settings["HF_HOME"] = 1', (), ()),
        ("def (", (), ()),
    ],
)
def test_variables_that_a_script_sets_are_found_in_its_text(tmp_path, line, cold, alone):
    script = tmp_path / "x.py"
    script.write_text(f"import os\n{line}\nimport torch\n")
    found = settings(LaunchConfig(script=str(script)), {"OMP_NUM_THREADS": "1"})
    assert (found.cold, found.alone) == (cold, alone)
