"""`python -m everstep.fault_tolerance.launcher`: what a script for NVRx's `ft_launcher` finds, and how its job ends."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long]

SCRIPT = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME"]
names.append("TORCHELASTIC_RESTART_COUNT")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
told = {name: os.environ[name] for name in names} | {"argv": sys.argv[1:]}
told["settings"] = json.loads(os.environ.get("EVERSTEP_FAULT_TOLERANCE", "null"))
os.write(1, (json.dumps(told) + "\\n").encode())
if sys.argv[1] == "always" or (sys.argv[1] == "once" and attempt == "0"):
    sys.exit(int(os.environ["RANK"]))
"""
SETTINGS = """
trainer:
  fault_tolerance:
    initial_rank_heartbeat_timeout: 600
    rank_section_timeouts: {step: 30, save: null}
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "ft.yaml").write_text(SETTINGS)

    def ft_launcher(*words, python=sys.executable, module="everstep.fault_tolerance.launcher", **environment):
        command = [python, "-m", module, "--nproc-per-node", "2", "--ft-cfg-path", "ft.yaml", *words]
        surroundings = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | environment
        done = subprocess.run(command, cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=120)
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return (
            done.returncode,
            sorted(told, key=lambda one: (one["TORCHELASTIC_RESTART_COUNT"], one["RANK"])),
            done.stderr,
        )

    return ft_launcher


def test_settings_of_its_file_and_its_flags_reach_the_ranks(run):
    code, told, err = run("--ft-rank_heartbeat_timeout", "45", "script.py", "well", "--lr", "1")
    assert code == 0, err
    expected = {
        "initial_rank_heartbeat_timeout": 600.0, "rank_heartbeat_timeout": 45.0,
        "rank_section_timeouts": {"step": 30.0, "save": None},
    }  # fmt: skip
    assert [one["settings"] for one in told] == [expected, expected]
    assert [one["argv"] for one in told] == [["well", "--lr", "1"]] * 2


def test_a_failure_is_no_restart_unless_there_are_some(run):
    code, told, _ = run("script.py", "once")
    assert code == 1
    assert {one["TORCHELASTIC_RESTART_COUNT"] for one in told} == {"0"}
    code, told, err = run("script.py", "once", PET_MAX_RESTARTS="1")
    assert code == 0, err
    assert [one["RANK"] for one in told if one["TORCHELASTIC_RESTART_COUNT"] == "1"] == ["0", "1"]


def test_starts_that_lead_nowhere_end_the_job_and_each_leaves_its_file_and_its_log(run, tmp_path):
    """Two starts without an iteration more: 94 instead of 93, as asked; a third may have begun, and is ended."""
    (tmp_path / "latest").write_text("40")
    watched = ("--ft-checkpoint-iteration-file", "latest", "--ft-max-no-progress-cycles", "2")
    kept = (
        "--ft-cycle-info-dir",
        "info",
        "--ft-nvrx-logfile",
        "agent.log",
        "--ft-per-cycle-applog-prefix",
        f"{tmp_path}/logs/run.log",
    )
    (tmp_path / "logs").mkdir()
    code, told, err = run(
        *watched,
        *kept,
        "--ft-no-restart-exit-code",
        "94",
        "--max-restarts",
        "9",
        "script.py",
        "always",
        SLURM_JOB_ID="5",
    )
    assert code == 94, err
    assert "2 starts in a row made no progress: iteration 40" in err
    assert "ERROR 2 starts in a row made no progress" in (tmp_path / "agent.log").read_text()
    assert told == []  # it stands in the files of the cycles
    for cycle in (0, 1):
        info = json.loads((tmp_path / f"info/cycle_info.5.0.{cycle}").read_text())
        assert (info["cycle_number"], info["active_ranks"], bool(info["cycle_end_time"])) == (cycle, "0-1", True)
        assert info["cycle_log_file"] == f"{tmp_path}/logs/run_cycle{cycle}.log"
        lines = (tmp_path / f"logs/run_cycle{cycle}.log").read_text().splitlines()
        assert {line[:4] for line in lines} >= {"1: {"}  # its peer may have been ended before it came so far
        assert {line[:4] for line in lines} <= {"0: {", "1: {"}
        assert all(f'"TORCHELASTIC_RESTART_COUNT": "{cycle}"' in line for line in lines)


def test_a_rank_that_sends_no_heartbeat_for_longer_than_the_flag_says_begins_anew(run, tmp_path):
    """NVRx's own way: heartbeats of a script that is not wrapped, a timeout by flag, a restart of all workers."""
    (tmp_path / "beats.py").write_text(
        "import json, os, time\n"
        "from everstep.fault_tolerance import RankMonitorClient\n"
        "client = RankMonitorClient()\n"
        "client.init_workload_monitoring()\n"
        "client.send_heartbeat()\n"
        "me = {n: os.environ[n] for n in ('RANK', 'TORCHELASTIC_RESTART_COUNT')}\n"
        "me |= {'beat': client.cfg.rank_heartbeat_timeout, 'section': dict(client.cfg.rank_section_timeouts)}\n"
        "os.write(1, (json.dumps(me) + '\\n').encode())\n"
        "while me['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    time.sleep(0.2)\n"
        "    if me['RANK'] == '0':\n"
        "        client.send_heartbeat()\n"
    )
    code, told, err = run("--ft-rank-heartbeat-timeout", "4", "--max-restarts", "1", "beats.py")
    assert code == 0, err
    assert {(one["beat"], str(one["section"])) for one in told} == {(4.0, "{'step': 30.0, 'save': None}")}
    assert [(one["RANK"], one["TORCHELASTIC_RESTART_COUNT"]) for one in told] == [
        ("0", "0"),
        ("1", "0"),
        ("0", "1"),
        ("1", "1"),
    ]
    assert "rank 1 made no progress" in err
    assert "limit 4.0 s" in err


def test_of_two_nodes_for_one_the_other_waits_and_takes_its_ranks(tmp_path):
    """`--nnodes 1:2` as NVRx's HEAD means it; neither was given a name, and they are one job all the same."""
    (tmp_path / "script.py").write_text(
        "import os, time\n"
        "me = [os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'GROUP_RANK', 'TORCHELASTIC_RESTART_COUNT')]\n"
        "print('began', *me, flush=True)\n"
        "while me[3] == '0':\n"
        "    time.sleep(1)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    logs, agents = [tmp_path / f"{number}.log" for number in range(2)], []
    try:
        for number, log in enumerate(logs):
            command = [sys.executable, "-m", "everstep.fault_tolerance.launcher", *words]
            with log.open("w") as out:
                agents.append(
                    subprocess.Popen(
                        [*command, "--run-dir", str(number), "script.py"], cwd=tmp_path, stdout=out, stderr=out
                    )
                )
        deadline = time.monotonic() + 60
        while not (worked := [n for n, log in enumerate(logs) if log.read_text().count("began") == 2]):
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.05)
        agents[worked[0]].kill()
        other = 1 - worked[0]
        assert agents[other].wait(60) == 0, logs[other].read_text()
        began = sorted(line for line in logs[other].read_text().splitlines() if line.startswith("began"))
        assert began == ["began 0 2 0 1", "began 1 2 0 1"]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def test_a_node_that_does_not_reach_its_storage_starts_nothing(run, tmp_path):
    code, told, err = run("--ft-storage-health-check-path", f"{tmp_path}/data,{tmp_path}", "script.py", "well")
    assert (code, told) == (75, [])
    assert f"this node is not fit for the job: {tmp_path}/data: No such file or directory" in err
    assert not (tmp_path / "everstep-runs").exists()


def test_what_is_refused_starts_nothing(run):
    code, told, err = run("--ft-segment", "4", "script.py", "well")
    assert (code, told) == (64, [])
    assert "--ft-segment 4 is ft_launcher's, and is not done here" in err


@pytest.mark.parametrize(("words", "code"), [(("well",), 0), (("once", "--lr", "1"), 0), (("always",), 1)])
def test_a_script_finds_the_same_as_under_nvrx_s_own(run, root, words, code):
    """The same flags, file and script; `make peers` has made the other's environment.

    Where no restart is left NVRx 0.4.1 ends with 0 if the others had ended well before, with 1 if one had to be ended.
    """
    peers = root / ".venv-peers/bin/python"
    if not peers.exists():
        pytest.skip("`make peers` has not been run here")
    flags = ("--max-restarts", "1", "--role", "trainer", "--ft-rank-section-timeouts", "step:5", "script.py", *words)
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    theirs = run(*flags, python=str(peers), module=module, PYTHONPATH="")
    ours = run(*flags)
    assert ours[0] == code, ours[2]
    assert theirs[0] in (0, code), theirs[2]
    for one in (*ours[1], *theirs[1]):
        del one["settings"]
    last = [[one for one in side[1] if one["RANK"] == "1"] for side in (theirs, ours)]  # the one that fails
    assert last[0] == last[1]
