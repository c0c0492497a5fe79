"""`everstep doctor` on this machine, with all its children; and children that do not come to their end."""

import errno
import itertools
import json
import os
import select
import socket
import subprocess
import sys

import pytest

from everstep.doctor.trial import MARK, Trial
from everstep.doctor.zygote_trial import ZygoteTrial

pytestmark = pytest.mark.procs


class Glances:
    """A second passes whenever somebody looks."""

    def __init__(self):
        self.now = itertools.count().__next__


def doctor(*words, path=""):
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [path, env["PYTHONPATH"]]))
    command = [sys.executable, "-m", "everstep", "doctor", "--json", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    rows = {row["what"]: row for row in json.loads(done.stdout)}
    return done.returncode, rows


def test_a_node_that_is_fit_with_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as door:
        endpoint = f"127.0.0.1:{door.getsockname()[1]}"
        words = ["--state", "1MB", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint]
        code, rows = doctor(*words, "--checkpoint-dir", str(tmp_path))
    assert code == 0, rows
    told = {what: row["level"] for what, row in rows.items()}
    wanted = ["zygote", "torch", "pidfd", "memfd", "kernel", "memory for snapshots", "checkpoint directory"]
    assert {told[what] for what in wanted} == {"ok"}, rows
    assert told["end point"] == told["end point's port"] == "warning"
    assert os.listdir(tmp_path) == []


def test_a_torch_that_does_not_import_is_a_problem_with_its_words(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is not there')\n")
    code, rows = doctor(path=str(tmp_path))
    assert code == 1
    for what in ("torch", "zygote"):
        assert rows[what]["level"] == "problem"
        assert "libcudart.so.12 is not there" in rows[what]["seen"]
    assert "checkpoint directory" not in rows


def test_a_child_that_does_not_end_is_given_up_with_what_it_stood_in():
    """As in a dead mount: it says what it does next, and nothing ever again."""
    word = MARK + json.dumps({"free": 7, "doing": "looking at it"})
    script = f"import signal; print({word!r}, flush=True); signal.pause()"
    trial = Trial("", {}, 3.0, command=[sys.executable, "-S", "-c", script], clock=Glances())
    assert select.select([trial._popen.stdout], [], [], 60)[0], "it has said nothing"
    assert trial.collect() == ({"free": 7}, "no answer within 3 s, in: looking at it")
    assert not os.path.exists(f"/proc/{trial.pid}")


@pytest.mark.long
def test_a_zygote_that_is_never_ready_is_given_up_and_ended(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import signal; signal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    assert ZygoteTrial(3.0, Glances()).collect() == ("not ready within 3 s", [])


def test_where_no_process_can_be_started_that_is_the_finding(monkeypatch):
    def refused(*words, **settings):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refused)
    word = "Resource temporarily unavailable"
    assert Trial("torch", {}, 60.0).collect() == ({}, f"no process can be started to try it: {word}")
    assert ZygoteTrial(60.0).collect() == (f"no process can be started: {word}", [])


def test_a_child_that_crashes_is_told_of():
    script = f'import os; print(\'{MARK}{{"doing": "asking"}}\', flush=True); os.abort()'
    trial = Trial("", {}, 60.0, command=[sys.executable, "-S", "-c", script])
    assert trial.collect() == ({}, "the process that tried it ended with -6, in: asking")
