"""The command line, tables and picture of `everstep bench checkpoint`, and what it refuses before anything runs."""

import argparse
import dataclasses
import json

import pytest

from everstep import cli
from everstep.errors import ConfigurationError, UsageError
from everstep.experiments.bench import checkpoint, checkpoint_disk, commands, plot
from everstep.experiments.bench.checkpoint_show import COLUMNS, cells
from everstep.experiments.core.checkpoints import MODES, Window, row
from everstep.experiments.core.figures import NVRX
from everstep.experiments.core.tapes import Ending


def parsed(*words):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


def window(**more):
    values = {
        "bare": ((10, 1.0),), "before": ((1, 0.0), (2, 1.0)), "ends": ((4, 2.2), (5, 2.4)),
        "saves": ((3, 2.0, 2.1), (4, 2.2, 2.3), (5, 2.4, 2.5)), "durable": ((1, 1.0), (2, 1.9), (3, 2.15), (4, 2.3)),
        "write_s": 0.5, "copy_s": 0.001, "holds": (4,), "claimed": 4,
    }  # fmt: skip
    return Window(**(values | more))


def result(tmp_path):
    rows = [
        row("everstep", 1, [window(), window()], "done"),
        row("torch.save", 1, [window(holds=(3, 4))], "done", 1),
        row("nvrx", 1, [], "needs CUDA"),
    ]
    machine = {"cores": 2, "load": 0.5, "load_at_end": 1.0, "when": "2026-01-01T00:00:00+00:00", "system": "Linux"}
    body = {
        "bench": "checkpoint", "machine": machine, "versions": {"everstep, coalesce": {"torch": "2.13"}},
        "plan": {"state": 8_000_000, "device": "cpu", "step_s": 0.1, "work": "sleep", "rounds": 2},
        "disk": {"path": "bindfs", "asked": 10_000_000, "measured": 10.4e6}, "rows": rows,
        "verdicts": checkpoint.judged(rows, "cpu"),
    }  # fmt: skip
    file = tmp_path / "result.json"
    file.write_text(json.dumps(body))
    return file


def test_flags_are_read_as_they_are_meant():
    args = parsed("checkpoint", "--bandwidth", "10MB/s", "--intervals", "1,10,100", "--modes", "everstep,torch.save")
    assert (args.bandwidth, args.intervals, args.modes) == (10_000_000, [1, 10, 100], ["everstep", "torch.save"])
    assert (args.state, parsed("checkpoint").modes) == (64_000_000, list(MODES))
    assert parsed("checkpoint", "--bandwidth", "unlimited").bandwidth is None


@pytest.mark.parametrize(
    "words",
    [
        ("--bandwidth", "fast"), ("--bandwidth", "0"), ("--intervals", "0"), ("--intervals", "1,1"), ("--state", "-1"),
        ("--intervals", ""), ("--modes", "rsync"), ("--modes", ""), ("--step", "0"), ("--step", "inf"),
        ("--rounds", "0"), ("--ranks", "0"), ("--seconds", "nan"), ("--work", "think"), ("--device", "tpu"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        parsed("checkpoint", *words)
    assert words[0] in capsys.readouterr().err


def test_a_saved_result_is_shown_again(tmp_path, capsys):
    assert cli.main(["bench", "show", str(result(tmp_path))]) == 0
    said = capsys.readouterr().out
    assert "50.00%" in said
    assert "0.40 of 0.80 s" in said
    assert "1 steps" in said
    assert "needs CUDA" in said
    assert "not whole: torch.save and fsync, every 1: the checkpoint of step 4 holds state of step 3 and 4" in said
    assert "budget missed: everstep, coalesce, every 1: 50.00% of the time, promised 98.50%" in said


def test_a_row_without_figures_has_as_many_cells_as_one_with():
    rows = [row("nvrx", 1, [], "needs CUDA", 2), row("nvrx", 1, [window(durable=())], "done")]
    assert [len(cells(each)) for each in rows] == [len(COLUMNS)] * 2
    assert "none durable" in cells(rows[1])


def test_a_result_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, which is not installed here")
    plot.draw(json.loads(result(tmp_path).read_text()), tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_a_throttle_that_is_not_to_be_had_is_refused_by_its_name(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="the package bindfs"):
        checkpoint_disk.check(1000)
    checkpoint_disk.check(None)
    assert cli.main(["bench", "checkpoint", "--modes", "torch.save"]) == 78
    assert "bindfs" in capsys.readouterr().err


def test_a_store_that_cannot_serve_is_named(tmp_path):
    with pytest.raises(UsageError, match="there is no such folder"), checkpoint_disk.disk(None, tmp_path / "no", 1):
        pass
    with pytest.raises(UsageError, match="bytes free"), checkpoint_disk.disk(None, tmp_path, 1 << 60):
        pass


def test_an_interpreter_that_was_named_and_is_not_there_is_refused():
    with pytest.raises(UsageError, match=NVRX):
        checkpoint._implementations(["nvrx"], "/no/python")


NO_CUDA = {"failed": "AssertionError: Torch not compiled with CUDA enabled", "at": 7.0}
LOST = {"failed": "RuntimeError: Connection closed by peer", "at": 7.1}


@pytest.mark.parametrize(
    ("tapes", "outs", "ending", "said"),
    [
        ((None,), ("",), Ending(1.0, (-9,), 7.0), "no end within 7 s"),
        ((None,), ("Traceback\nImportError: no name",), Ending(1.0, (1,)), "ImportError: no name"),
        ((None,), ("",), Ending(1.0, (-9,)), "exit code -9"),
        ((NO_CUDA,), ("",), Ending(1.0, (1,)), "needs CUDA"),
        ((LOST, NO_CUDA), ("", ""), Ending(1.0, (1, 1)), "needs CUDA"),
        ((None, None), ("", "said"), Ending(1.0, (0, -9)), "said"),
        ((dataclasses.asdict(window()), LOST), ("", ""), Ending(1.0, (0, 1)), LOST["failed"]),
    ],
)
def test_a_loop_without_a_figure_says_why(tapes, outs, ending, said, tmp_path):
    for rank, (tape, out) in enumerate(zip(tapes, outs, strict=True)):
        (tmp_path / f"out-{rank}.txt").write_text(out)
        if tape is not None:
            (tmp_path / f"window-{rank}.json").write_text(json.dumps(tape))
    assert checkpoint._read("nvrx", tmp_path, ending) == (None, said)


def test_loops_of_several_ranks_are_one_window(tmp_path):
    slow = window(saves=((3, 2.0, 2.1), (4, 2.2, 2.3), (5, 2.4, 2.7)))
    for rank, tape in enumerate((window(), slow)):
        (tmp_path / f"window-{rank}.json").write_text(json.dumps(dataclasses.asdict(tape)))
    assert checkpoint._read("everstep", tmp_path, Ending(1.0, (0, 0))) == (slow, "done")
