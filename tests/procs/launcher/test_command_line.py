"""torchrun's manners: environment, exit codes, logs; and the words with which nonsense is refused."""

import json
import os
import signal
import socket
import time

import pytest

from everstep.goodput import report

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


def test_an_unwrapped_script_begins_anew_and_its_last_failure_is_exit_code_1(start):
    """Each start on a new store, with its own logs, kept to the last byte; whatever a rank ends by, we end with 1.

    Who has started us reads why in our own TORCHELASTIC_ERROR_FILE.
    """
    text = PLAIN + (
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "sys.stdout.write(f'attempt {attempt} no newline')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    [lambda: sys.exit(7), lambda: os.kill(os.getpid(), 15), lambda: 1 / 0, os.abort][int(attempt)]()\n"
        "time.sleep(100)\n"
    )
    logs = ("--redirects", "3", "--tee", "0:1,1:3", "--log-dir", "logs", "--duplicate-stdout-filters", "mpt 1,mpt 3")
    surroundings = {"TORCHELASTIC_ERROR_FILE": "why.json"}
    job = start(text, "--nproc-per-node", "2", "--max-restarts", "3", *logs, wrapped=False, env=surroundings)
    ended = job.ended()
    assert ended.code == 1
    assert "all 3 restarts that --max-restarts allows are used: death of rank 1 (ended by signal 6)" in ended.err
    assert sorted(n["restarts"] for n in ended.of("sum")) == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert len({n["env"]["MASTER_PORT"] for n in ended.of("sum")}) == 4
    assert len({n["pid"] for n in ended.of("sum")}) == 8
    ends = [e["status"] for e in ended.events("ProcessEnded") if e["child_rank"] == 1]
    assert ends in ([7, -15, 1, -6], [7, -15, -9, -6])  # who has told of its exception may be ended before it ends
    assert "all 3 restarts" in json.loads((job.folder / "why.json").read_text())["message"]["message"]
    (run,) = (job.folder / "logs").iterdir()  # as torchrun: a new folder for each run
    for attempt in range(4):
        folder = run / f"attempt_{attempt}"
        gathered = folder / "filtered_stdout.log"
        lines = sorted(gathered.read_text().splitlines()) if gathered.exists() else []
        assert lines == [f"[default{rank}]:attempt {attempt} no newline" for rank in "01" if attempt in (1, 3)]
        assert [(folder / rank / "stdout.log").read_text() for rank in "01"] == [f"attempt {attempt} no newline"] * 2
        for rank in (0, 1):
            assert f"[default{rank}]:attempt {attempt} no newline" in ended.out.splitlines()
    printed = [line for line in ended.err.splitlines() if line.endswith("ZeroDivisionError: division by zero")]
    assert [line.startswith("[default1]:") for line in printed] == [True]


def test_a_kill_of_an_unwrapped_rank_is_told_as_what_it_was(start):
    """Its peers tell of the broken connection, often before it can be reaped; no step is known, and none made up."""
    text = PLAIN + (
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "for step in range(20):\n"
        "    dist.all_reduce(torch.ones(1000))\n"
        "    if step == 5 and (dist.get_rank(), attempt) in ((1, 0), (0, 1)):\n"
        "        os.kill(os.getpid(), 9)\n"
        "dist.destroy_process_group()\n"
    )
    ended = start(text, "--nproc-per-node", "2", wrapped=False).ended()
    assert ended.code == 0, ended.err
    told = [line for line in ended.err.splitlines() if "begin anew after" in line]
    assert len(told) == 2, ended.err
    for rank, line in zip((1, 0), told, strict=True):
        assert line.startswith(f"everstep: rank {rank} killed (SIGKILL); all ranks begin anew after ")
        assert "step" not in line.removeprefix("everstep")
    causes = {e["number"]: e for e in ended.events("FaultNoticed")}  # the last word on each
    assert [(n, e["kind"], e["injured_rank"]) for n, e in causes.items()] == [(0, "death", 1), (1, "death", 0)]
    ledger, _ = report.load(ended.run_dir)
    assert ledger.errors == []
    assert [(row.rank, row.type, row.step, row.steps_lost) for row in ledger.recoveries] == [
        (1, "death", None, None), (0, "death", None, None),
    ]  # fmt: skip
    assert all(row.recovery_s is not None for row in ledger.recoveries)


@pytest.mark.long
def test_a_fault_free_run_of_an_unwrapped_script_closes(start):
    ended = start(PLAIN, "--nproc-per-node", "2", wrapped=False).ended()
    assert ended.code == 0, ended.err
    ledger, _ = report.load(ended.run_dir)
    assert ledger.errors == []
    assert ledger.figures.steps is None


@pytest.mark.parametrize(
    ("flags", "wrapped", "mend"),
    [
        (("--fault-count", "1"), False, "Call everstep.faults.maybe_fail(step)"),
        (("--fault-count", "-3"), True, "a plan has 0 to"),
        (("--checkpoint-interval", "0"), True, "1 or more"),
    ],
)
def test_a_refused_command_line_leaves_no_run_folder(start, flags, wrapped, mend):
    ended = start("note('top')\n", *flags, wrapped=wrapped).ended()
    assert ended.code == 64
    assert mend in ended.err
    assert not ended.run_dir.exists()
    assert ended.of("top") == []


def test_a_run_folder_is_not_used_for_another_job(start):
    """A job of its own is taken up again: see test_hostile."""
    text = "note('top')\n"
    first = start(text, "--checkpoint-interval", "10")
    ended = first.ended()
    assert ended.code == 0, ended.err
    assert "--checkpoint-interval 10 is of no use alone" in ended.err
    other = start(text, "--nproc-per-node", "2", again=first).ended()
    assert other.code == 64
    assert "Name another with --run-dir" in other.err
    assert len(other.of("top")) == 1
    again = start(text, again=first, args=("more",)).ended()
    assert again.code == 0, again.err
    assert "goes on with other arguments: more (before: none)" in again.err


def test_a_script_that_fails_at_import_is_told_once_and_not_restarted(start):
    ended = start("note('top')\nimport no_such_module\n", "--nproc-per-node", "2").ended()
    assert ended.code == 1
    began = [n["rank"] for n in ended.of("top")]
    assert 1 <= len(began) == len(set(began)), (
        "each rank at most once; the first failure may come before the other begins"
    )
    assert "ModuleNotFoundError: No module named 'no_such_module'" in ended.err
    assert ended.err.count("Traceback") <= 2


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        pytest.param(("--fault-count", "2", "--fault-types", "meteor"), 64, "meteor", marks=pytest.mark.long),
        (("--checkpoint-dir", "/proc/none/here"), 78, "/proc/none"),
        pytest.param(("--snapshot-memory", "lots"), 64, "amount of memory", marks=pytest.mark.long),
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


def test_a_signal_ends_everything_within_the_grace(start):
    text = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.fork() or time.sleep(1000)\nnote('up')\ntime.sleep(1000)\n"
    )
    job = start(text, "--nproc-per-node", "2", "--grace", "1.5")
    job.wait_for("up", 2)
    os.kill(job.process.pid, signal.SIGTERM)
    ended = job.ended(15)
    assert ended.code == 128 + signal.SIGTERM
    job.gone_within(0.5)


def test_a_second_signal_does_not_wait_for_the_grace(start):
    job = start("signal.signal(signal.SIGINT, signal.SIG_IGN)\nnote('up')\ntime.sleep(1000)\n", "--grace", "1000")
    job.wait_for("up")
    os.kill(job.process.pid, signal.SIGINT)
    os.kill(job.process.pid, signal.SIGINT)  # the same one, by two ways
    time.sleep(1.5)
    assert job.process.poll() is None
    os.kill(job.process.pid, signal.SIGTERM)
    ended = job.ended(15)
    assert ended.code == 128 + signal.SIGINT
    assert "SIGTERM again: everything is killed" in ended.err
    job.gone_within(0.5)


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


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(7)", 1),
        pytest.param("sys.exit(0)", 0, marks=pytest.mark.long),
        pytest.param("sys.exit('text')", 1, marks=pytest.mark.long),
        pytest.param("sys.exit(type('X', (), {'__str__': lambda self: 1 / 0})())", 1, marks=pytest.mark.long),
        pytest.param("raise KeyboardInterrupt", 1, marks=pytest.mark.long),
    ],
)
def test_what_ends_a_wrapped_function_ends_the_job_as_the_table_says(start, end, code):
    """IR-12; docs/launcher.md has the table."""
    text = f"@everstep.resilient\ndef train(run):\n    note('enter')\n    dist.barrier()\n    {end}\ntrain()\n"
    ended = start(text, "--nproc-per-node", "2").ended()
    assert ended.code == code, ended.err
    assert len(ended.of("enter")) == 2


@pytest.mark.sample(1)
def test_a_script_that_exits_before_its_wrapped_call_is_not_begun_again(start):
    """A parser that refuses an argument would refuse it again: its words come once, and no restart is told of."""
    text = (
        "import argparse\nnote('begun')\nargparse.ArgumentParser().parse_args()\n"
        "@everstep.resilient\ndef train(run):\n    note('enter')\ntrain()\n"
    )
    ended = start(text, "--nproc-per-node", "1", args=["--stepz", "3"]).ended()
    assert ended.code == 1, ended.err
    assert (len(ended.of("begun")), ended.of("enter")) == (1, [])
    assert ended.err.count("unrecognized arguments: --stepz 3") == 1
    assert "the script failed before it came to the wrapped call: " in ended.err
    assert "sys.exit(2)" in ended.err
