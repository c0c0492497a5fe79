"""torchrun's manners: environment, exit codes, logs; and the words with which nonsense is refused."""

import os
import signal
import socket

import pytest

pytestmark = pytest.mark.procs

PLAIN = """
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
note("sum", value=x.item(), restarts=os.environ["TORCHELASTIC_RESTART_COUNT"], env=dict(os.environ), argv=sys.argv[1:],
     threads=torch.get_num_threads(), main=sys.modules["__main__"].__file__, draw=__import__("numpy").random.rand())
"""


def test_a_script_cannot_tell_it_from_torchrun(start):
    ended = start(PLAIN, "--nproc_per_node=2", "--standalone", args=("--lr", "0.1")).ended()
    assert ended.code == 0, ended.err
    notes = sorted(ended.of("sum"), key=lambda n: n["rank"])
    assert [n["value"] for n in notes] == [2.0, 2.0]
    for rank, note in enumerate(notes):
        env = note["env"]
        assert note["argv"] == ["--lr", "0.1"]
        assert note["main"].endswith("script.py")
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == (
            str(rank),
            str(rank),
            "2",
            "2",
        )
        assert env["OMP_NUM_THREADS"] == "1"
        assert note["threads"] == 1
    assert notes[0]["draw"] != notes[1]["draw"]  # a fork would have drawn the same (E17)


def test_an_unwrapped_script_begins_anew_on_a_new_store(start):
    fault = 'dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] < "2" and os.kill(os.getpid(), 9)\n'
    text = PLAIN + fault + "dist.barrier()\n"
    ended = start(text, "--nproc-per-node", "2", "--max-restarts", "3", wrapped=False).ended()
    assert ended.code == 0, ended.err
    assert sorted(n["restarts"] for n in ended.of("sum")) == ["0", "0", "1", "1", "2", "2"]
    assert len({n["env"]["MASTER_PORT"] for n in ended.of("sum")}) == 3
    assert len({n["pid"] for n in ended.of("sum")}) == 6


@pytest.mark.parametrize("end", ["sys.exit(7)", "os.kill(os.getpid(), 15)", "1 / 0", "os.abort()"])
def test_a_failed_worker_is_exit_code_1(start, end):
    text = f"note('here')\nif os.environ['RANK'] == '1':\n    {end}\nelse:\n    time.sleep(100)\n"
    ended = start(text, "--nproc-per-node", "2", "--max-restarts", "0", wrapped=False).ended()
    assert ended.code == 1
    assert "rank 1" in ended.err


def test_a_script_that_fails_at_import_is_told_once_and_not_restarted(start):
    ended = start("note('top')\nimport no_such_module\n", "--nproc-per-node", "2").ended()
    assert ended.code == 1
    assert len(ended.of("top")) == 2
    assert "ModuleNotFoundError: No module named 'no_such_module'" in ended.err
    assert ended.err.count("Traceback") <= 2


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--no-such-flag",), 64, "unrecognized"),
        (("--nproc-per-node", "0"), 64, "at least one rank"),
        (("--nproc-per-node", "many"), 64, "many"),
        (("--nnodes", "2"), 64, "one node"),
        (("--max-restarts", "few"), 64, "few"),
        (("--fault-count", "2", "--fault-types", "meteor"), 64, "meteor"),
        (("--fault-count", "2", "--fault-types", "hang,exception", "--fault-type-weights", "1"), 64, "weight"),
        (("--checkpoint-dir", "/proc/none/here"), 78, "/proc/none"),
        (("--checkpoint-dir", "/tmp", "--checkpoint-interval", "0"), 64, "1 or more"),
        (("--snapshot-memory", "lots"), 64, "amount of memory"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(start, flags, code, words):
    ended = start("note('top')\n", *flags).ended()
    assert (ended.code, ended.of("top")) == (code, []), ended.err
    assert words in ended.err
    assert "Traceback" not in ended.err


def test_a_port_in_use_is_named(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = start("note('top')\n", "--master-port", str(port)).ended()
    assert ended.code == 78
    assert str(port) in ended.err
    assert not ended.of("top")


def test_logs_of_every_start_are_kept_to_the_last_byte(start):
    text = (
        "sys.stdout.write(f'attempt {os.environ[\"TORCHELASTIC_RESTART_COUNT\"]} no newline')\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] < '2': os._exit(9)\n"
    )
    job = start(text, "--max-restarts", "2", "--redirects", "3", "--tee", "3", "--log-dir", "logs", wrapped=False)
    ended = job.ended()
    assert ended.code == 0, ended.err
    files = sorted((job.folder / "logs").rglob("stdout.log"))
    assert [f.read_text() for f in files] == [f"attempt {n} no newline" for n in range(3)]
    assert [line for line in ended.out.splitlines() if "[default0]:attempt" in line] == [
        f"[default0]:attempt {n} no newline" for n in range(3)
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_within_the_grace(start, number):
    text = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.fork() or time.sleep(1000)\nnote('up')\ntime.sleep(1000)\n"
    )
    job = start(text, "--nproc-per-node", "2", "--grace", "1.5")
    job.wait_for("up", 2)
    os.kill(job.process.pid, number)
    ended = job.ended(15)
    assert ended.code == 128 + number
    job.gone_within(0.5)


@pytest.mark.parametrize("state", ["sleeping", "stopped", "holding the interpreter lock", "training"])
def test_nothing_outlives_an_agent_that_is_killed(start, state):
    bodies = {
        "sleeping": "note('up'); time.sleep(1000)",
        "stopped": "note('up'); os.kill(os.getpid(), signal.SIGSTOP)",
        "holding the interpreter lock": "note('up'); ctypes.PyDLL(None).sleep(1000)",
        "training": "note('up')\n    for step in run.steps(10**6): dist.barrier()",
    }
    text = f"""
@everstep.resilient
def train(run):
    __import__("subprocess").Popen(["sleep", "1000"], start_new_session=True)
    {bodies[state]}
train()
"""
    job = start(text, "--nproc-per-node", "2")
    job.wait_for("up", 2)
    job.process.kill()
    job.process.wait()
    assert job.gone_within(2.0) < 2.0


def test_a_missing_rank_is_an_error_not_rank_0(start, tmp_path):
    import subprocess
    import sys

    script = tmp_path / "lone.py"
    script.write_text("import everstep\n@everstep.resilient\ndef f(run):\n    return run.world_size\nprint(f())\n")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert (alone.returncode, alone.stdout) == (0, "1\n"), alone.stderr
    assert "world of one" in alone.stderr
    broken = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment | {"WORLD_SIZE": "2"}
    )
    assert broken.returncode == 1
    assert "RANK is not set, but WORLD_SIZE is" in broken.stderr


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 1),
        ("sys.exit('text')", 1),
        ("raise KeyboardInterrupt", 1),
    ],
)
def test_what_ends_a_wrapped_function_ends_the_job_as_the_table_says(start, end, code):
    """IR-12; docs/launcher.md has the table."""
    text = f"@everstep.resilient\ndef train(run):\n    note('enter')\n    dist.barrier()\n    {end}\ntrain()\n"
    ended = start(text, "--nproc-per-node", "2").ended()
    assert ended.code == code, ended.err
    assert len(ended.of("enter")) == 2
