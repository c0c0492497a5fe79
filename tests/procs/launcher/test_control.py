"""An operator looks at jobs that run: what is told, to whom, and that looking costs the job nothing."""

import json
import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request

import pytest

from everstep import cli
from everstep.launcher.agent.spy import find_spy

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

TRAIN = """
@everstep.resilient
def train(run):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(100_000, model=model, optimizer=optimizer):
        model(torch.full((2, 4), float(step))).sum().backward()
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        optimizer.step(); optimizer.zero_grad()
        note("step", step=step) if step == 2 else None
        time.sleep(0.01)
train()
"""


def asked(capsys, *words):
    """Run a command here; return its exit code, what it printed, and what it said."""
    capsys.readouterr()
    code = cli.main(list(words))
    told = capsys.readouterr()
    return code, told.out, told.err


def control_of(job):
    return json.loads((job.run_dir / "control.json").read_text())


def steps(told):
    return {p["rank"]: p["step"] for node in told["nodes"] for p in node["processes"] if p["rank"] is not None}


def pids(text):
    told = json.loads(text)
    return {p["rank"]: p["pid"] for node in told["nodes"] for p in node["processes"] if p["rank"] is not None}


def test_a_running_job_is_looked_at_by_those_who_may(start, capsys, monkeypatch):
    job = start(TRAIN, "--nproc-per-node", "2")
    job.wait_for("step", 2)
    run = str(job.run_dir)
    code, out, err = asked(capsys, "ps", run, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    by_role = {process["role"]: process for process in told["nodes"][0]["processes"]}
    assert by_role.keys() >= {"agent", "zygote", "store", "rank", "spare"}
    assert by_role["agent"]["pid"] == job.process.pid
    assert set(steps(told)) == {0, 1}
    assert min(steps(told).values()) >= 1
    assert "rank 1" in asked(capsys, "ps", run)[1]
    (node,) = json.loads(asked(capsys, "top", run, "--once", "--json")[1])["nodes"]
    assert [tier["what"] for tier in node["tiers"] if tier["tier"] == "memory"] == ["kept"]
    assert "memory" in asked(capsys, "top", run)[1], "where this is no terminal it is one look"

    control = control_of(job)
    with urllib.request.urlopen(f"http://127.0.0.1:{control['port']}/metrics") as numbers:
        assert b'everstep_rank_step{rank="1"}' in numbers.read(), "for a scraper, without the token"
    assert stat.S_IMODE((job.run_dir / "control.json").stat().st_mode) == 0o600
    assert control["address"] == "127.0.0.1"
    where = f"127.0.0.1:{control['port']}"
    monkeypatch.setenv("EVERSTEP_TOKEN", "another")
    code, out, err = asked(capsys, "ps", where, "--json")
    assert (code, out) == (64, "")
    assert "control.json" in err
    monkeypatch.setenv("EVERSTEP_TOKEN", control["token"])
    assert asked(capsys, "ps", where, "--json")[0] == 0
    monkeypatch.setenv("EVERSTEP_RUN_DIR", run)
    assert asked(capsys, "ps", "--json")[0] == 0

    goes_on_in_a_crowd(control["port"], lambda: json.loads(asked(capsys, "ps", run, "--json")[1]))
    assert asked(capsys, "drain", run)[0] == 0
    ended = job.ended()
    assert ended.code == 143, "as after SIGTERM"
    assert "ended by an operator" in ended.err
    assert ended.events("FaultNoticed") == []
    assert not (job.run_dir / "control.json").exists()
    code, _, err = asked(capsys, "ps", run)
    assert code == 1
    assert "is over" in err


HANG = """
@everstep.resilient
def train(run):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(100_000, model=model, optimizer=optimizer):
        model(torch.full((2, 4), float(step))).sum().backward()
        note("step", step=step) if step == 3 else None
        if step == 3 and run.rank == 1 and run.generation == 0: stand_here()
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        optimizer.step(); optimizer.zero_grad()
def stand_here():
    while True: time.sleep(0.01)
train()
"""


def groups_of(capsys, run):
    code, out, err = asked(capsys, "stacks", run, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)["groups"]


def functions(group):
    return [frame["function"] for frame in group["frames"]]


def test_where_ranks_stand_is_told_culprit_first_and_who_cannot_answer_too(start, capsys):
    job = start(HANG, "--nproc-per-node", "3", "--soft-timeout", "600")
    run = str(job.run_dir)
    job.wait_for("step", 3)
    stood = lambda found: [group["ranks"] for group in found]  # noqa: E731
    groups = until(lambda: groups_of(capsys, run), lambda found: stood(found) == [[1], [0, 2]])
    assert "stand_here" in functions(groups[0])
    assert (groups[0]["waits"], groups[1]["waits"]) == (False, True)
    assert "all_reduce" in functions(groups[1])[-1]
    assert functions(groups[0])[:2] == ["<module>", "train"]
    assert "rank 1: does not wait; others wait for it" in asked(capsys, "stacks", run)[1]
    ranks = pids(asked(capsys, "ps", run, "--json")[1])
    os.kill(ranks[2], signal.SIGSTOP)
    groups = until(lambda: groups_of(capsys, run), lambda found: found[0]["ranks"] == [2])
    assert groups[0]["why"].startswith("does not answer (state T")
    assert stood(groups[1:]) == [[1], [0]]
    os.kill(ranks[2], signal.SIGCONT)
    until(lambda: groups_of(capsys, run), lambda found: stood(found) == [[1], [0, 2]])
    assert [event for event in job.events() if event["event"] == "FaultNoticed"] == [], "nobody was judged for it"
    assert asked(capsys, "kill", run, "--rank", "1")[0] == 0
    job.wait_for("step", 6)
    assert asked(capsys, "kill", run, "--rank", "3")[0] == 1
    assert asked(capsys, "kill", run)[0] == 64, "neither a rank nor the job"
    assert asked(capsys, "kill", run, "--job")[0] == 0
    ended = job.ended()
    assert ended.code == 93
    assert [(fault["kind"], fault["injured_rank"]) for fault in ended.events("FaultNoticed")] == [("death", 1)]


@pytest.mark.long
@pytest.mark.skipif(not find_spy(), reason="py-spy is not installed on this machine")
def test_a_script_without_the_wrapper_is_read_from_outside(start, capsys):
    text = "def stand_here():\n    note('there')\n    time.sleep(600)\nstand_here()"
    job = start(text, "--nproc-per-node", "2", wrapped=False)
    job.wait_for("there", 2)
    (group,) = until(lambda: groups_of(capsys, str(job.run_dir)), lambda found: len(found) == 1 and found[0]["frames"])
    assert group["ranks"] == [0, 1]
    assert functions(group) == ["<module>", "stand_here"]
    job.process.terminate()
    job.ended()


@pytest.mark.long
def test_top_shows_a_job_until_it_is_over(start):
    job = start(TRAIN, "--nproc-per-node", "2")
    job.wait_for("step", 2)
    ours, theirs = pty.openpty()
    shown = bytearray()
    command = [sys.executable, "-m", "everstep.cli", "top", str(job.run_dir)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE) as top:
        os.close(theirs)
        while shown.count(b"steps/s") < 2:
            shown += os.read(ours, 65536)
        job.process.terminate()
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:  # its last writer has gone
            pass
        _, err = top.communicate()
    os.close(ours)
    assert top.returncode == 0
    assert b"the job is over" in err
    assert b"rank" in shown
    job.ended()


def until(look, happened, limit_s=120.0):
    deadline = time.monotonic() + limit_s
    while True:
        found = look()
        if happened(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.mark.long
def test_any_agent_answers_for_all_nodes_and_one_that_does_not_is_named(start, capsys):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    base = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    jobs = [start(TRAIN, *base, "--node-rank", str(number)) for number in range(2)]
    folders = [jobs[0].run_dir, jobs[1].run_dir / "node-1"]
    for job in jobs:
        job.wait_for("step")
    for folder in folders:
        code, out, err = asked(capsys, "ps", str(folder), "--json")
        assert code == 0, err
        assert steps(json.loads(out)).keys() == {0, 1}
    assert asked(capsys, "ps", str(jobs[1].run_dir), "--json")[0] == 0, "the folder above node-1's leads there too"
    os.kill(jobs[1].process.pid, signal.SIGSTOP)
    try:
        code, out, err = until(lambda: asked(capsys, "ps", str(folders[0]), "--json"), lambda told: told[0] != 0)
    finally:
        os.kill(jobs[1].process.pid, signal.SIGCONT)
    assert code == 1
    assert steps(json.loads(out)).keys() == {0}
    assert "node-1 did not answer" in err
    run = str(folders[0])
    until(lambda: asked(capsys, "ps", run)[0], lambda code: code == 0)
    for number, folder in enumerate(reversed(folders)):
        code, out, err = asked(capsys, "kill", str(folder), "--rank", str(number), "--json")
        assert code == 0, f"of the other node: {err}"
        killed = (number, json.loads(out)["pid"])
        until(
            lambda: pids(asked(capsys, "ps", run, "--json")[1]),
            lambda seen, it=killed: seen.keys() == {0, 1} and seen[it[0]] != it[1],
        )
    assert "host" in asked(capsys, "top", str(folders[1]), "--once")[1]
    assert asked(capsys, "drain", str(folders[1]))[0] == 0
    ended = [job.ended() for job in jobs]
    assert [one.code for one in ended] == [143, 143]
    faults = {(fault["kind"], fault["injured_rank"]) for fault in ended[0].events("FaultNoticed")}
    assert faults == {("death", 0), ("death", 1)}


@pytest.mark.long
def test_a_node_is_left_out_where_another_takes_its_ranks_and_stays_where_none_would(start, capsys):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    base = ("--nnodes", "2", "--spare-nodes", "1", "--rdzv-endpoint", f"127.0.0.1:{port}")
    jobs = [start(TRAIN, *base, "--node-rank", str(number)) for number in range(3)]
    run = str(jobs[0].run_dir)
    for job in jobs[:2]:
        job.wait_for("step")
    code, _, err = asked(capsys, "exclude", run, "--node", "node-7")
    assert (code, "it has node-0, node-1, node-2" in err) == (1, True)
    code, out, err = asked(capsys, "exclude", run, "--node", "node-1", "--json")
    assert (code, json.loads(out)["node"]) == (0, "node-1"), err
    left_out = jobs[1].ended()
    assert left_out.code == 75
    assert "node-1 is left out: an operator asked" in left_out.err

    def homes():
        nodes = json.loads(asked(capsys, "ps", run, "--json")[1])["nodes"]
        return {process["rank"]: node["node"] for node in nodes for process in node["processes"]}

    until(homes, lambda seen: (seen.get(0), seen.get(1)) == ("node-0", "node-2"))
    code, _, err = asked(capsys, "exclude", run, "--node", "node-0")
    assert (code, "too few would be left without node-0" in err) == (1, True)
    assert asked(capsys, "drain", run)[0] == 0
    assert [jobs[number].ended().code for number in (0, 2)] == [143, 143]


@pytest.mark.long
def test_a_job_runs_as_well_where_its_end_point_cannot_be(start, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        job = start("print('done')", "--control-endpoint", taken, wrapped=False)
        ended = job.ended()
    assert ended.code == 0
    assert taken in ended.err
    job = start("print('done')", "--control-endpoint", "none", wrapped=False)
    assert job.ended().code == 0
    assert start("print('done')", "--control-endpoint", "x:y", wrapped=False).ended().code == 64


def goes_on_in_a_crowd(port, ask):
    """Steps are done, and the operator is answered, while others keep the port busy."""
    crowd = crowd_at(port, 300)
    before = min(steps(ask()).values())
    until(ask, lambda told: min(steps(told).values()) > before + 5)
    for line in crowd:
        line.close()


def crowd_at(port, count):
    """Connections that say nothing, garble, or ask and do not read."""
    lines = []
    for number in range(count):
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex(("127.0.0.1", port))
        try:
            line.send((b"", b"\x16\x03\x01", b"GET /v1/ps HTTP/1.1\r\n\r\n")[number % 3])
        except OSError:
            pass
        lines.append(line)
    return lines
