"""The command line of `everstep bench`, and what its drivers decide before anything runs."""

import argparse
import io
import json
import sys

import pytest
from rich.console import Console

from everstep import cli
from everstep.errors import ConfigurationError, UsageError
from everstep.experiments.bench import commands, controlplane, inprocess, launch, plot, show
from everstep.experiments.bench.launch import Impl, Plan
from everstep.experiments.core.figures import NVRX, Case, row
from everstep.experiments.core.tapes import Recovery, Run

OPEN = "no new step within 9 s of the fault"


def parsed(*words):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


def result(tmp_path, **more):
    case = Case("exception", 2)
    over = Recovery(0, 1, 2, 0.0, 0.02, 0.03, 0.04, 2, 0)
    rows = [
        row({"impl": "everstep", "launcher": "everstep"}, case, [Run((over, over), 2, 3.0, "done")], [{"stop_s": 0.1}]),
        row({"impl": NVRX, "launcher": "bare"}, case, [Run((Recovery(0, 1, 2),), 0, 9.0, OPEN)], (), 2),
    ]  # fmt: skip
    machine = {"cores": 2, "load": 0.5, "load_at_end": 1.0, "when": "2026-01-01T00:00:00+00:00", "system": "Linux"}
    body = {
        "bench": "inprocess", "machine": machine, "versions": {"everstep": {"torch": "2.13"}}, "plan": {}, "rows": rows,
        "verdicts": inprocess.judged(rows),
    }  # fmt: skip
    file = tmp_path / "result.json"
    file.write_text(json.dumps(body | more))
    return file


def printed(body):
    out = io.StringIO()
    show.print_result(body, Console(file=out, highlight=False))
    return out.getvalue()


def test_flags_are_read_as_they_are_meant():
    args = parsed("inprocess", "--fault", "exception,hang", "--ranks", "2,4", "--against", "nvrx", "--json")
    assert (args.fault, args.ranks, args.impl, args.against) == (["exception", "hang"], [2, 4], None, ["nvrx"])
    assert parsed("controlplane", "--ranks", "4096").ranks == [4096]


@pytest.mark.parametrize(
    "words",
    [
        ("inprocess", "--fault", "lightning"),
        ("inprocess", "--ranks", "0"),
        ("inprocess", "--ranks", "two"),
        ("inprocess", "--faults", "0"),
        ("inprocess", "--against", "luck"),
        ("controlplane", "--arrivals", "pigeon"),
        (),
    ],
)
def test_what_cannot_be_meant_is_refused(words, capsys):
    assert cli.main(["bench", *words]) == 64
    assert "everstep" in capsys.readouterr().err


def test_values_for_one_module_or_for_all():
    assert inprocess.by_module(["py3", "a.b=py4"], "python") == {"": "py3", "a.b": "py4"}
    assert inprocess.by_module(["a=/x=y/python"], "python") == {"a=/x": "y/python"}


@pytest.mark.parametrize("given", [["a="], ["=x"], ["x", "y"], ["a=x", "a=y"]])
def test_values_that_contradict_one_another_are_refused(given):
    with pytest.raises(UsageError, match="--python"):
        inprocess.by_module(given, "python")


@pytest.mark.parametrize(("launcher", "processes"), [("bare", 3), ("torchrun", 1), ("everstep", 1)])
def test_a_run_is_started_as_its_launcher_does(launcher, processes, tmp_path):
    impl = Impl("some.module", "python3", launcher, "plain")
    made = launch.commands(impl, Case("hang", 3, tuned=True), Plan(injured=7, soft_s=5.0), tmp_path)
    assert len(made) == processes
    words, more = made[-1]
    text = " ".join(words)
    assert "--impl some.module" in text
    assert "--injured 2" in text
    assert "--meet plain" in text
    assert "--tuned --soft 5.0" in text
    assert ("--hard-timeout 15.0" in text) == (launcher == "everstep")
    assert more.get("RANK") == ("2" if launcher == "bare" else None)


def test_ports_differ():
    assert len(set(launch.free_ports(5))) == 5


def test_one_number_of_ranks_means_all_sizes_up_to_it():
    assert controlplane.sizes([4096]) == [64, 256, 1024, 4096]
    assert controlplane.sizes([300]) == [64, 256, 300]
    assert controlplane.sizes([8, 4]) == [8, 4]


@pytest.mark.parametrize(("count", "processes", "split"), [(5, 2, [(0, 2), (2, 5)]), (2, 4, [(0, 1), (1, 2)])])
def test_clients_are_spread_evenly(count, processes, split):
    assert controlplane.shares(count, processes) == split


@pytest.mark.parametrize(
    ("count", "processes", "split"), [(9, 3, [(0, 1), (1, 5), (5, 9)]), (2, 4, [(0, 1), (1, 2)]), (3, 1, [(0, 3)])]
)
def test_the_planner_has_a_process_to_itself(count, processes, split):
    assert controlplane.shares(count, processes, first_alone=True) == split


def test_parts_lie_end_to_end():
    assert controlplane.ladder([1.0, 3.0, 2.0, 3.5]) == [2.0, 0.0, 0.5]


def sized(*seconds):
    return [
        {"ranks": ranks, "nodes": ranks // 8, "ours": None if s is None else {"whole_s": [s, s, s]}}
        for ranks, s in zip((64, 4096), seconds, strict=True)
    ]


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        ((0.02, 0.9), [True, True]),
        ((0.02, 1.5), [False, False]),
        ((0.001, 0.9), [True, False]),
        ((0.02, None), [False]),
    ],
)
def test_the_budget_of_the_control_plane_is_a_second_and_linear_growth(seconds, kept):
    assert [v["budget_kept"] for v in controlplane.judged(sized(*seconds))] == kept


def test_a_saved_result_is_shown_again(tmp_path, capsys):
    assert cli.main(["bench", "show", str(result(tmp_path))]) == 0
    said = capsys.readouterr().out
    assert "everstep, native (everstep)" in said
    assert f"{OPEN}; 2 processes left behind" in said
    assert "budget kept: everstep, native (everstep), exception, 2 ranks: within 0.06 s" in said


def test_json_is_printed_as_it_was_saved(tmp_path, capsys):
    file = result(tmp_path)
    assert cli.main(["bench", "show", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bench": "patience"}'])
def test_what_is_no_result_is_refused(text, tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text(text)
    assert cli.main(["bench", "show", str(file)]) == 64
    assert str(file) in capsys.readouterr().err


def test_sizes_without_an_end_are_shown_as_such(tmp_path):
    ours = {"whole_s": [0.5, 0.4, 0.6], "parts_s": dict.fromkeys(show._PARTS, 0.1), "agent_s": 0.01, "bytes": 2000}
    rows = [
        {"ranks": 64, "nodes": 8, "ours": ours, "barrier": {"whole_s": [0.2, 0.1, 0.3], "parts_s": {"barrier": 0.1}}},
        {"ranks": 256, "nodes": 32, "ours": None, "barrier": None},
    ]
    body = json.loads(result(tmp_path).read_text())
    more = {"bench": "controlplane", "rows": rows, "growth": {"x": None}, "barrier_by": "by hand"}
    said = printed(body | more | {"verdicts": controlplane.judged(rows)})
    assert "0.500 (0.400 to 0.600)" in said
    assert said.count("no end") == 3  # ours, theirs, and the budget's


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'everstep\[plots\]'"):
        plot.check()
    assert cli.main(["bench", "show", str(tmp_path / "none"), "--plot", "x.png"]) == 78
    assert "matplotlib" in capsys.readouterr().err


def test_a_result_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, which is not installed here")
    target = tmp_path / "x.svg"
    plot.draw(json.loads(result(tmp_path).read_text()), target)
    assert "not over" in target.read_text()
