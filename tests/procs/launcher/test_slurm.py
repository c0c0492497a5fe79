"""A job under a real Slurm of two nodes, both on this machine: the example's sbatch file, as a user would submit it."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long, pytest.mark.timeout(400)]

HOST = socket.gethostname()
EXAMPLE = Path(__file__).parents[3] / "examples" / "slurm" / "train.sbatch"
CONF = """
ClusterName=t
SlurmctldHost={host}
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/control.pid
SlurmdPidFile={home}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName={host}-too NodeHostname={host} NodeAddr=127.0.0.1 Port={other} CPUs=1
PartitionName=p Nodes={host},{host}-too Default=YES MaxTime=INFINITE State=UP
"""
TRAIN = """
import json, os, sys, time, torch, torch.distributed as dist, everstep
@everstep.resilient
def train(run):
    weight = torch.nn.Linear(2, 2)
    for step in run.steps(int(sys.argv[1]), weight=weight):
        dist.all_reduce(torch.ones(1))
        with open(sys.argv[2], "a") as file:
            told = [step, run.rank, os.environ.get("SLURM_RESTART_COUNT"), os.environ["TORCHELASTIC_RUN_ID"]]
            file.write(json.dumps(told) + "\\n")
        time.sleep(0.05)
train()
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


class Cluster:
    """`slurmctld` and two `slurmd`, whose every file lies in one folder."""

    def __init__(self, home):
        self.home = home
        for name in ("state", f"spool-{HOST}", f"spool-{HOST}-too"):
            (home / name).mkdir()
        conf = home / "slurm.conf"
        ports = {"control": free_port(), "first": free_port(), "other": free_port()}
        conf.write_text(CONF.format(home=home, host=HOST, user=getpass.getuser(), **ports))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"SLURM_CONF": str(conf), "PATH": path}
        self.daemons = [self._daemon("slurmctld", "-D", "-f", str(conf))]
        self.daemons += [self._daemon("slurmd", "-D", "-f", str(conf), "-N", name) for name in (HOST, f"{HOST}-too")]

    def _daemon(self, *words):
        with open(self.home / f"{words[-1].replace('/', '_')}.log", "w") as log:
            return subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)

    def say(self, *words, check=True):
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, cwd=self.home, timeout=60)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def until(self, holds, limit_s=150):
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline, "\n".join(path.read_text() for path in self.home.glob("*.out"))
            time.sleep(0.1)

    def end(self):
        self.say("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}", check=False)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(30)


@pytest.fixture
def cluster(tmp_path):
    lacking = [tool for tool in ("slurmctld", "slurmd", "sbatch", "srun") if shutil.which(tool) is None]
    if lacking or os.getuid():
        pytest.skip(f"needs root, and Slurm (Debian: slurmctld slurmd slurm-client; missing: {lacking})")
    made = Cluster(tmp_path)
    try:
        made.until(lambda: made.say("sinfo", "-h", "-t", "idle", "-o", "%D", check=False) == "2", 60)
        yield made
    finally:
        made.end()


def test_time_that_is_nearly_up_saves_requeues_and_the_job_goes_on(cluster, tmp_path):
    """SIGUSR1 comes to every process of the step, ranks too: 143, `scontrol requeue`, and no step is done twice."""
    script, steps = tmp_path / "train.py", tmp_path / "steps"
    script.write_text(TRAIN)
    steps.touch()

    def done():
        return [eval(line, {"null": None}) for line in steps.read_text().splitlines()]

    base = ["sbatch", "--parsable", f"--output={tmp_path}/%j.out", "--export=ALL,RANKS=1", str(EXAMPLE), str(script)]
    job = cluster.say(*base, "150", str(steps))
    cluster.until(lambda: len(done()) > 60)
    cluster.say("scancel", "--signal=USR1", job)
    cluster.until(lambda: "Restarts=1" in cluster.say("scontrol", "show", "job", job))
    stopped = done()

    cluster.until(lambda: "JobState=COMPLETED" in cluster.say("scontrol", "show", "job", job), 250)
    told = (tmp_path / f"{job}.out").read_text()
    last = max(step for step, *_ in stopped)
    assert last < 150
    assert f"after step {last}. The checkpoint of step {last} is durable" in told
    assert sorted((step, rank) for step, rank, *_ in done()) == [(s, r) for s in range(1, 151) for r in range(2)]
    assert {line[3] for line in done()} == {f"slurm-{job}.0"}
    assert {line[2] for line in done()[len(stopped) :]} == {"1"}
    assert f"from Slurm: --nnodes 2, --node-rank 0, --rdzv-endpoint {HOST}:{20000 + int(job) * 31 % 10000}" in told


def test_a_job_that_is_cancelled_or_whose_time_is_up_saves_before_it_ends(cluster, tmp_path):
    """SIGTERM to all processes, and SIGKILL 30 s later: the step that runs is durable all the same."""
    script, steps = tmp_path / "train.py", tmp_path / "steps"
    script.write_text(TRAIN)
    steps.touch()
    base = ["sbatch", "--parsable", f"--output={tmp_path}/%j.out", "--export=ALL,RANKS=1", str(EXAMPLE), str(script)]
    job = cluster.say(*base, "100000", str(steps))
    cluster.until(lambda: steps.read_text().count("\n") > 60)
    cluster.say("scancel", job)
    out = tmp_path / f"{job}.out"
    cluster.until(lambda: out.read_text().count("is durable: the next start goes on from there") >= 1)
    saved = [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith("step-")]
    last = max(int(line[1:].partition(",")[0]) for line in steps.read_text().splitlines())
    assert f"step-{last}" in saved


def test_two_agents_on_a_node_are_refused_with_what_to_write(cluster, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = ["srun", "-N1", "--ntasks-per-node=2", "--overcommit", "everstep", "run", str(script)]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 64
    assert "`srun --ntasks-per-node=1`" in done.stderr
