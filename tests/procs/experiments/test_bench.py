"""The benchmarks with real processes: our native surface, a small module with NVRx's interface, simulated agents."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from everstep.clock import SYSTEM
from everstep.errors import UsageError
from everstep.experiments.bench import commands, controlplane, inprocess, launch
from everstep.experiments.bench.launch import Impl, Plan
from everstep.experiments.core.figures import Case

pytest.importorskip("torch")
pytestmark = [pytest.mark.procs, pytest.mark.timeout(280)]
HERE = Path(__file__).parent


def parsed(*words):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


def bench(*words, **more):
    """Run the command as a person does; return its result."""
    path = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "everstep", "bench", *words, "--json"], capture_output=True, text=True, timeout=270,
        check=False, env=os.environ | {"PYTHONPATH": path} | more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_our_native_surface_is_measured_with_the_parts_that_the_ledger_knows(tmp_path):
    found = bench("inprocess", "--faults", "2", "--steps", "5", "--limit", "60", "--out", str(tmp_path))
    (row,) = found["rows"]
    assert (row["faults"], row["recovered"], row["least_world"], row["bystanders_lost"]) == (2, 2, 2, 0)
    assert row["outcomes"] == {"done": 1}
    assert row["left_behind"] == 0
    assert set(row["parts_s"]) == {"detect_s", "stop_s", "regroup_s", "rebuild_s", "restore_s", "redo_s", "new_step_s"}
    assert 0 < sum(row["parts_s"].values()) < 2 * row["recovery_s"][2]
    assert sum(row["outside_s"].values()) <= row["recovery_s"][2]
    assert [v["budget_kept"] in (True, False) for v in found["verdicts"]] == [True]
    assert list(tmp_path.glob("*/*/run/events/*.jsonl")), "--out keeps what was written"


@pytest.mark.long
def test_a_killed_rank_is_measured_to_the_first_step_of_its_spare():
    found = bench("inprocess", "--fault", "sigkill", "--faults", "1", "--steps", "5", "--limit", "60")
    (row,) = found["rows"]
    assert (row["recovered"], row["least_world"], row["outcomes"]) == (1, 2, {"done": 1})


@pytest.mark.parametrize(
    "launcher", ["everstep", *(pytest.param(name, marks=pytest.mark.long) for name in ("bare", "torchrun"))]
)
def test_our_wrapper_runs_the_same_function_under_every_launcher(launcher):
    found = bench("inprocess", "--impl", "everstep.inprocess", "--launcher", launcher, "--faults", "2", "--steps", "5",
                  "--limit", "60")  # fmt: skip
    (row,) = found["rows"]
    assert (row["recovered"], row["least_world"], row["bystanders_lost"], row["outcomes"]) == (2, 2, 0, {"done": 1})
    assert set(row["parts_s"] or {}) == ({"detect_s", "stop_s", "regroup_s"} if launcher == "everstep" else set())


def test_implementations_take_turns_on_the_same_cases_and_an_endless_one_costs_its_limit():
    found = bench(
        "inprocess", "--impl", "fake_inprocess", "--fault", "exception,hang", "--faults", "2", "--steps", "4",
        "--runs", "2", "--limit", "5",
    )  # fmt: skip
    good, endless = found["rows"]
    assert (good["fault"], good["runs"], good["faults"], good["recovered"]) == ("exception", 2, 4, 4)
    assert good["outcomes"] == {"done": 2}
    assert good["parts_s"] is None
    assert (endless["fault"], endless["faults"], endless["recovered"], endless["recovery_s"]) == ("hang", 2, 0, None)
    assert endless["outcomes"] == {"no new step within 5 s of the fault": 2}


def test_a_death_that_nobody_takes_over_is_no_figure_and_what_is_left_behind_is_counted_and_ended():
    found = bench(
        "inprocess", "--impl", "fake_inprocess", "--fault", "sigkill", "--faults", "1", "--steps", "4", "--limit", "5",
        FAKE_LEAVES_BEHIND="1",
    )  # fmt: skip
    (row,) = found["rows"]
    assert (row["faults"], row["recovered"]) == (1, 0)
    assert row["left_behind"] == 2
    assert not [p for p in psutil.process_iter() if {launch.TOKEN, "FAKE_LEAVES_BEHIND"} <= _environ(p).keys()]


def _environ(process):
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def test_a_benchmark_that_is_told_to_end_ends_what_it_has_started(tmp_path):
    words = ["bench", "inprocess", "--impl", "fake_inprocess", "--fault", "hang", "--out", str(tmp_path)]
    path = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])
    child = subprocess.Popen([sys.executable, "-m", "everstep", *words], env=os.environ | {"PYTHONPATH": path})
    while not any('"fault"' in tape.read_text() for tape in tmp_path.glob("*/*/tape-*.jsonl")):
        assert child.poll() is None
        SYSTEM.sleep(0.05)
    child.terminate()
    assert child.wait(60) == 143
    assert not [p for p in psutil.process_iter() if _environ(p).get(launch.TOKEN, "").startswith(f"{child.pid}-")]


def test_the_control_plane_is_measured_at_each_size_beside_the_barrier():
    found = bench("controlplane", "--ranks", "16,64", "--rounds", "2", "--processes", "2", "--limit", "100")
    assert [(r["ranks"], r["nodes"], r["ours"]["rounds"], r["barrier"]["rounds"]) for r in found["rows"]] == [
        (16, 2, 2, 2),
        (64, 8, 2, 2),
    ]
    for row in found["rows"]:
        parts = sum(row["ours"]["parts_s"].values()) + row["ours"]["agent_s"]
        assert 0 < parts <= 2 * row["ours"]["whole_s"][2]
        assert row["ours"]["bytes"] <= 40 * row["ranks"] + 200
    assert set(found["growth"]) == {"fault to next roster", "NVRx, fault to past its barrier"}


@pytest.mark.long
def test_restarts_starts_ends_and_rests_of_an_unwrapped_script_are_measured():
    found = bench(
        "injob", "--ways", "unwrapped,cold,spare,torchrun", "--fault", "sigkill,hang", "--ranks", "2", "--faults", "1",
        "--workers", "2", "--idle", "2",
    )  # fmt: skip
    cases = [(row["way"], row["fault"], row["faults"], row["recovered"]) for row in found["restarts"]]
    ways = ("unwrapped", "cold", "spare", "torchrun")
    assert cases == [*((way, "sigkill", 1, 1) for way in ways), ("spare", "hang", 1, 1)]
    assert {row["left_behind"] for row in found["restarts"]} == {0}
    assert all(row["noticed_s"] for row in found["restarts"] if row["way"] != "torchrun")
    assert [row["way"] for row in found["launches"]] == ["unwrapped", "cold", "torchrun"]
    assert [row["way"] for row in found["idle"]] == ["unwrapped", "torchrun"]
    ours = {part["name"] for part in found["idle"][0]["processes"]}
    assert {"everstep-zygote", "store"} <= ours
    assert [verdict["what"] for verdict in found["verdicts"]] == [
        "unwrapped, sigkill", "spare, sigkill", "spare, hang", "exit of a finished job", "agent and zygote at rest",
    ]  # fmt: skip


@pytest.mark.long
def test_a_key_for_each_rank_is_measured_as_well():
    found = bench("controlplane", "--ranks", "16,8", "--rounds", "1", "--processes", "1", "--arrivals", "rank",
                  "--without-barrier")  # fmt: skip
    assert [(r["ranks"], r["arrivals"], r["ours"]["rounds"]) for r in found["rows"]] == [
        (16, "rank", 1),
        (8, "rank", 1),
    ]


def test_a_run_that_comes_to_nothing_is_ended(tmp_path, monkeypatch):
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(launch, "commands", lambda *_: [(sleeper, {})])
    ran, left = launch.run(
        Impl("json", sys.executable, "bare"), Case("hang", 1), Plan(start_s=0.2), tmp_path / "run"
    )  # fmt: skip
    assert (ran.outcome, ran.recoveries, left) == ("no end within 0.2 s", (), 0)


def test_ours_runs_under_everstep_run_and_others_bare():
    assert launch.choose("everstep", None, None) == Impl("everstep", sys.executable, "everstep")
    assert launch.choose("json", None, None).launcher == "bare"
    assert launch.choose("json", None, "torchrun", "plain") == Impl("json", sys.executable, "torchrun", "plain")
    with pytest.raises(UsageError, match="give one of own, plain"):
        launch.choose("json", meet="by chance")


@pytest.mark.parametrize(
    ("module", "python", "launcher", "match"),
    [
        ("json", "/no/such/python", None, "no such interpreter"),
        ("json", None, "rocket", "give one of bare, everstep, torchrun"),
        ("no_such_module_of_ours", None, None, "name one that can: --python no_such_module_of_ours=PATH"),
    ],
)
def test_an_implementation_that_cannot_be_run_is_refused_before_anything_runs(module, python, launcher, match):
    with pytest.raises(UsageError, match=match):
        launch.choose(module, python, launcher)


def test_flags_of_modules_that_are_not_measured_are_refused():
    with pytest.raises(UsageError, match="yours is not among what is measured: json"):
        inprocess.implementations(parsed("inprocess", "--impl", "json", "--python", "yours=python3"))


@pytest.mark.parametrize(
    ("program", "match"),
    [("raise SystemExit(3)", "ended with 3"), ("import sys; sys.stdin.read()", "no end within 0.3 s")],
)
def test_clients_that_end_or_say_nothing_are_told(program, match):
    clients = controlplane.Clients([sys.executable, "-c", program], 1, 0.3 if "stdin" in program else 30.0)
    with pytest.raises((controlplane.TooLate, BrokenPipeError), match=match):
        clients.begin(1, {})
    clients.end()
