"""`everstep report`: tables, JSON, page, and folders that are none of ours."""

import argparse
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from everstep.errors import UsageError
from everstep.events import FaultNoticed
from everstep.goodput import commands
from everstep.goodput.report import write_page
from everstep.testing.simulated_run import SimulatedFault as Fault
from everstep.testing.simulated_run import SimulatedRun, showcase

FAULTS = [Fault(5, 1, "sigkill", 0.5), Fault(9, 0, "hang", 0.5), Fault(12, 1, "exception", 1.0)]
KEYS = ["wall_s", "steps", "training_goodput", "infra_goodput", "checkpoint_efficiency", "ranks", "faults"]
FAULT_KEYS = {
    "step", "rank", "type", "noticed_by", "detect_s", "stop_s", "regroup_s", "restore_s", "redo_s", "recovery_s",
    "steps_lost", "restored_from",
}  # fmt: skip


def report(*argv):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    args = parser.parse_args(["report", *map(str, argv)])
    return args.run(args)


@pytest.fixture
def folder(tmp_path):
    return SimulatedRun(ranks=2, steps=15, memory_tier=False, checkpoint_every=4, faults=FAULTS).write(tmp_path / "run")


def test_json_has_the_names_that_are_fixed(folder, capsys):
    assert report(folder, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told)[: len(KEYS)] == KEYS
    assert set(told["ranks"][0]) == {"rank", "wall_s", "seconds"}
    for rank in told["ranks"]:
        assert sum(rank["seconds"].values()) == pytest.approx(rank["wall_s"], abs=1e-6)
    for fault in told["faults"]:
        assert set(fault) == FAULT_KEYS | {"rebuild_s", "new_step_s"}
    assert [f["type"] for f in told["faults"]] == ["sigkill", "hang", "exception"]
    assert told["ledger"]["errors"] == []


def test_several_runs_are_a_list(folder, capsys):
    assert report(folder, folder, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_tables_fit_the_terminal_and_close(folder, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert report(folder) == 0
    out = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= columns
    assert "…" not in out
    for word in ("sigkill", "hang", "exception", "training goodput", "wall time", "recovery", "lost", "disk"):
        assert word in out


def test_a_twin_gives_the_fault_free_step(folder, tmp_path, capsys):
    twin = SimulatedRun(ranks=2, steps=15, step_s=0.9).write(tmp_path / "twin")
    assert report(folder, "--json", "--twin", twin) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ledger"]["fault_free_step_source"] == "median of the fault-free twin"
    assert told["training_goodput"] == pytest.approx(15 * 0.9 / told["wall_s"])


@pytest.mark.parametrize("make", ["nothing", "empty", "foreign", "torn", "headless"])
def test_a_folder_that_cannot_be_told_is_an_error_in_a_sentence(tmp_path, capsys, make):
    run = tmp_path / "run"
    if make != "nothing":
        (run / "events").mkdir(parents=True)
    if make == "foreign":
        (run / "events" / "x.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    if make == "torn":
        (run / "events" / "agent-1.jsonl").write_text('\n{"v":1,"event":"RunSt')
    if make == "headless":
        SimulatedRun(ranks=1, steps=3).write(run)
        (run / "events" / "agent-100.jsonl").unlink()
    assert report(run) in (1, 64)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("everstep: report: ")
    assert "Traceback" not in err


def test_a_ledger_that_does_not_close_is_told_and_is_no_success(tmp_path, capsys):
    run = SimulatedRun(ranks=2, steps=8, faults=[Fault(4, 1, "sigkill", 0.5)])
    run.records = [r for r in run.run() if not isinstance(r.event, FaultNoticed)]
    folder = run.write(tmp_path / "run")
    assert report(folder, "--html", tmp_path / "r.html") == 1
    assert "does not close" in capsys.readouterr().out
    assert "The ledger does not close" in (tmp_path / "r.html").read_text()


def test_without_a_run_the_newest_below_here_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert report() == 64
    SimulatedRun(ranks=1, steps=2).write(tmp_path / "everstep-runs" / "20260101-a")
    assert report("--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2


def test_a_page_that_cannot_be_written_says_where(folder, tmp_path, capsys):
    assert report(folder, "--html", tmp_path / "no" / "r.html") == 78
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"once for each"):
        commands._report([folder, folder], html=tmp_path / "r.html", as_json=False, twin=None)


# ------------------------------------------------------------------------------------------- the page


class Reader(HTMLParser):
    """Collects what a page would fetch, and checks that its elements nest."""

    VOID = frozenset({"meta", "hr", "br", "link", "img", "rect", "circle", "path"})

    def __init__(self):
        super().__init__()
        self.open, self.fetches, self.text, self.ids = [], [], [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.fetches += [
            v for k, v in attrs if k in ("src", "href", "data", "action", "xlink:href") and v and v[0] != "#"
        ]
        self.ids += [values["id"]] if "id" in values else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_stands_alone_and_tells_every_fault(tmp_path):
    run = showcase()
    run.steps = 60
    run.faults = [Fault(5 + 10 * i, f.rank, f.type, f.part) for i, f in enumerate(run.faults)]
    folder = replace(run).write(tmp_path / "run")
    ledger = write_page(folder, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    reader = read(page)
    assert reader.fetches == []
    assert not re.search(r"https?://|@import|url\(", page)
    assert "default-src 'none'" in page
    assert not list(tmp_path.glob("*.part"))
    text = " ".join(reader.text)
    for number, row in enumerate(ledger.recoveries, 1):
        assert f"fault-{number}" in reader.ids
        assert f"{row.type} on rank {row.rank}, step {row.step}: back after" in text
    assert page.count('class="lane') >= 4 + 5 * 4
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 600_000


def test_what_a_user_wrote_stays_text(tmp_path):
    run = SimulatedRun(ranks=1, steps=5, job="<script>alert(1)</script>", faults=[Fault(3, 0, "exception", 0.5)])
    run.run()
    run.records = [
        type(r)(r.stamp, type(r.event)(**{**vars_of(r.event), "values": {"`${alert(1)}</script>": 1.0 + r.event.step}}))
        if type(r.event).__name__ == "StepDone" else r
        for r in run.records
    ]  # fmt: skip
    write_page(run.write(tmp_path / "run"), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "<script>alert" not in page
    assert page.count("</script>") == 1


def vars_of(event):
    return {name: getattr(event, name) for name in event.__slots__}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_did_nothing_has_a_page_too(tmp_path, steps):
    write_page(SimulatedRun(ranks=1, steps=steps).write(tmp_path / "run"), tmp_path / "r.html")
    read((tmp_path / "r.html").read_text())
