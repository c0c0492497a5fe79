"""What the command line may say, and the words with which the rest is refused."""

import errno
import os
import zipfile
from pathlib import Path

import pytest

from everstep.errors import ConfigurationError, UsageError
from everstep.launcher.agent.worker import Standing, arguments_of, environment_of, log_root, plan_logs, stream_of
from everstep.launcher.config import LaunchConfig, from_flags, mentions_everstep, writable
from everstep.launcher.preload import top_level_imports

FLAGS = {
    "module": False,
    "no_python": False,
    "training_script_args": [],
    "nproc": 2,
    "nodes": 1,
    "max_restarts": None,
    "grace": 15.0,
    "role": "default",
    "rdzv_id": "none",
    "redirects": "0",
    "tee": "0",
    "local_ranks_filter": "",
}


def script(tmp_path, text: str, name: str = "train.py") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("settings", "mend"),
    [
        ({"nproc": 0}, "at least one rank"),
        ({"spares": -1}, "0 or more"),
        ({"max_restarts": -1}, "leave it out"),
        ({"module": True, "no_python": True}, "contradict"),
        ({"soft_timeout_s": 9.0, "hard_timeout_s": 3.0}, "soft < hard"),
        ({"grace_s": -1.0}, "0 or more"),
        ({"nproc": 3, "min_world_size": 4}, "give 1 to 3"),
        ({"min_world_size": 0}, "keeps its size"),
        ({"replacement_timeout_s": -1.0}, "0 or more"),
        ({"death_timeout_s": 0.0}, "more than 0"),
        ({"gpu_memory_reclaim_s": -1.0}, "--gpu-memory-reclaim-timeout -1: give 0 or more"),
        ({"gpu_memory_tolerance_mb": float("nan")}, "--gpu-memory-tolerance-mb nan"),
        ({"min_world_size": 1, "wrapped": False}, "leave the flag out"),
    ],
)
def test_impossible_launches_are_refused_with_the_mend(settings, mend):
    with pytest.raises(UsageError, match=mend):
        LaunchConfig(script="x.py", **settings)


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({}, (None, None, 600.0)),
        ({"min_world_size": 2}, (2, 60.0, 600.0)),
        ({"min_world_size": 2, "replacement_timeout_s": 0.0}, (2, 0.0, 600.0)),
        ({"replacement_timeout_s": 3600.0}, (None, 3600.0, 3600.0)),
    ],
)
def test_how_long_a_replacement_is_awaited(settings, known):
    policy = LaunchConfig(script="x.py", nproc=3, **settings).policy
    assert (policy.min_world_size, policy.replace_deadline_s, policy.start_deadline_s) == known


def test_how_long_the_death_of_a_killed_rank_is_awaited():
    assert LaunchConfig(script="x.py").policy.death_deadline_s == 120.0
    assert LaunchConfig(script="x.py", death_timeout_s=7.0).policy.death_deadline_s == 7.0


def test_a_script_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        from_flags(FLAGS | {"training_script": str(tmp_path / "gone.py")})


def test_a_wrapped_script_keeps_one_spare(tmp_path):
    config = from_flags(FLAGS | {"training_script": script(tmp_path, "import everstep\n")})
    assert (config.wrapped, config.spares) == (True, 1)


def test_a_plain_script_keeps_none_and_an_explicit_one_is_an_error(tmp_path):
    plain = script(tmp_path, "import torch\n")
    assert from_flags(FLAGS | {"training_script": plain}).spares == 0
    with pytest.raises(UsageError, match="leave --spares"):
        from_flags(FLAGS | {"training_script": plain, "spares": 1})


def test_a_wrapper_in_a_module_beside_the_script_is_found(tmp_path):
    script(tmp_path, "from everstep import resilient\n", "loop.py")
    assert mentions_everstep(script(tmp_path, "import loop\n"))
    assert not mentions_everstep(script(tmp_path, "import json\n", "other.py"))


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("from everstep.fault_tolerance import RankMonitorClient\n", False),
        ('"""Start it with everstep run."""\nimport everstep.fault_tolerance as ft\n', False),
        ("from everstep import fault_tolerance  # NVRx's\n", False),
        ("from everstep import fault_tolerance as ft\nft.RankMonitorClient()\n", False),
        ("from everstep.fault_tolerance import RankMonitorClient\nimport everstep\n", True),
        ("from everstep.fault_tolerance import RankMonitorClient\nfrom everstep import resilient\n", True),
        ("from everstep.fault_tolerance import RankMonitorClient\nfrom everstep.inprocess import Wrapper\n", True),
        ("from everstep import fault_tolerance, inprocess\n", True),
        ("import everstep.fault_tolerance, everstep.inprocess\n", True),
        ("import everstep.fault_tolerance\neverstep.resilient(f)\n", True),
        ("# everstep run\n", True),
    ],
)
def test_a_rank_monitor_alone_wraps_no_function(tmp_path, text, wraps):
    assert mentions_everstep(script(tmp_path, text)) is wraps


def test_a_doubt_keeps_the_spare(tmp_path):
    assert mentions_everstep(script(tmp_path, "def broken(:\n"))
    assert mentions_everstep("no.such.module.anywhere", module=True)


def test_an_unwritable_folder_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--run-dir"):
        writable(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("text", "rank", "bits"),
    [("0", 0, 0), ("3", 1, 3), ("0:1,1:3", 0, 1), ("0:1,1:3", 1, 3), ("0:1,1:3", 2, 0), ("nonsense", 0, 0)],
)
def test_redirects_as_torchrun_writes_them(text, rank, bits):
    assert stream_of(text, rank) == bits


def test_each_run_has_a_folder_of_its_own_in_the_log_directory(tmp_path):
    named = LaunchConfig(script="x.py", log_dir=str(tmp_path / "logs"), run_id="job7")
    first, second = log_root(named, tmp_path), log_root(named, tmp_path)
    assert first != second
    assert first.parent == tmp_path / "logs"
    assert first.name.startswith("job7_")
    assert log_root(LaunchConfig(script="x.py"), tmp_path) == tmp_path / "logs"
    (tmp_path / "file").touch()
    assert log_root(LaunchConfig(script="x.py", log_dir=str(tmp_path / "file" / "x")), tmp_path).name == "none"


def test_logs_that_go_nowhere_have_no_error_file_either(tmp_path):
    nowhere = LaunchConfig(script="x.py", log_dir=os.devnull, redirects="3", tee="3")
    logs = plan_logs(nowhere, log_root(nowhere, tmp_path), 0, 0)
    assert (logs.stdout, logs.stderr, logs.tee_stdout, logs.error_file) == ("", "", False, "")
    assert not list(tmp_path.iterdir())


def test_an_argument_may_hold_the_local_rank_and_nothing_else_is_touched():
    others = ["$HOME", "${rank}", "a b", "50%", "kill $$", "$${local_rank}", "$", "${}"]
    config = LaunchConfig(script="x.py", arguments=("--gpu=${local_rank}", "$local_rank.$local_ranks", *others))
    assert arguments_of(config, 3) == ["--gpu=3", "3.$local_ranks", *others]


def test_no_log_of_an_earlier_start_is_written_into(tmp_path):
    config = LaunchConfig(script="x.py", redirects="3")
    first, second = plan_logs(config, tmp_path, 0, 0), plan_logs(config, tmp_path, 0, 0)
    assert first.folder != second.folder
    assert first.folder.is_dir()
    assert second.stdout.endswith("attempt_0.1/0/stdout.log")


def test_a_rank_sees_what_torchrun_would_set(tmp_path):
    config = LaunchConfig(script="x.py", nproc=4, max_restarts=3)
    got = environment_of({"HOME": "/x"}, config, Standing(2, 4, 2, 4), 1, ("127.0.0.1", 1234), "e.json")
    assert (got["RANK"], got["LOCAL_RANK"], got["WORLD_SIZE"], got["LOCAL_WORLD_SIZE"]) == ("2", "2", "4", "4")
    assert (got["MASTER_ADDR"], got["MASTER_PORT"], got["TORCHELASTIC_RESTART_COUNT"]) == ("127.0.0.1", "1234", "1")
    assert (got["OMP_NUM_THREADS"], got["TORCHELASTIC_MAX_RESTARTS"], got["HOME"]) == ("1", "3", "/x")


def test_torch_s_own_watchdogs_are_off_in_a_wrapped_job_and_a_user_s_own_values_win():
    """Its dump on an error is announced to every later group, which then cannot end for 480 s (seen on a GPU)."""
    names = [f"TORCH_NCCL_{n}" for n in ("ENABLE_MONITORING", "RETHROW_CUDA_ERRORS", "DUMP_ON_TIMEOUT")]
    names.append("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    own = dict.fromkeys(names, "1")
    as_torchrun = [None, None, None, "1"]
    for wrapped, base, expected in ((True, {}, ["0"] * 4), (False, {}, as_torchrun), (True, own, ["1"] * 4)):
        config = LaunchConfig(script="x.py", wrapped=wrapped)
        got = environment_of(base, config, Standing(0, 1, 0, 1), 0, ("127.0.0.1", 1234), "e.json")
        assert [got.get(name) for name in names] == expected


def test_a_rank_of_several_nodes_sees_its_place_on_its_own():
    got = environment_of(
        {}, LaunchConfig(script="x.py", nproc=2, nnodes=3), Standing(5, 6, 1, 2, 2, 3), 0, ("n", 1), "e"
    )
    assert (got["RANK"], got["WORLD_SIZE"], got["LOCAL_RANK"], got["LOCAL_WORLD_SIZE"]) == ("5", "6", "1", "2")
    assert (got["GROUP_RANK"], got["GROUP_WORLD_SIZE"], got["ROLE_RANK"], got["ROLE_WORLD_SIZE"]) == (
        "2",
        "3",
        "5",
        "6",
    )


def test_a_job_of_several_nodes_knows_how_many_ranks_each_starts_with():
    config = LaunchConfig(script="x.py", nproc=2, nnodes=3, least_nodes=2, at_work=("node-0", "node-2"))
    policy = config.policy
    assert (policy.world_size, policy.local_world_size, policy.min_world_size, policy.by_node) == (6, 2, 4, True)
    assert policy.shares == (("node-0", 2), ("node-2", 2))
    assert (config.world_size, config.most_ranks) == (4, 6)
    one = LaunchConfig(script="x.py", nproc=2)
    assert (one.policy.shares, one.policy.by_node, one.several) == ((), False, False)
    assert LaunchConfig(script="x.py", spare_nodes=1).several


def test_a_job_without_a_name_is_known_by_its_script():
    unnamed = [LaunchConfig(script=script, nnodes=2).terms("1") for script in ("a/x.py", "b/x.py", "b/y.py")]
    assert unnamed[0] == unnamed[1] != unnamed[2]
    named = [LaunchConfig(script=script, nnodes=2, run_id="j").terms("1") for script in ("x.py", "y.py")]
    assert named[0] == named[1]


def test_fewer_ranks_than_the_fewest_nodes_have_are_refused():
    with pytest.raises(UsageError, match="--min-world-size 3 with --nnodes 2:3: so many nodes have 4 ranks"):
        LaunchConfig(script="x.py", nproc=2, nnodes=3, least_nodes=2, min_world_size=3)
    assert LaunchConfig(script="x.py", nproc=2, nnodes=3, least_nodes=2, min_world_size=5).policy.min_world_size == 5


def test_restarts_without_a_number_are_not_told_as_none(tmp_path):
    """A script that asks whether this is the last attempt must not be told so at the first."""
    got = environment_of({}, LaunchConfig(script="x.py"), Standing(0, 1, 0, 1), 7, ("127.0.0.1", 1234), "e.json")
    assert int(got["TORCHELASTIC_RESTART_COUNT"]) < int(got["TORCHELASTIC_MAX_RESTARTS"])
    got = environment_of(
        {}, LaunchConfig(script="x.py", max_restarts=0), Standing(0, 1, 0, 1), 0, ("127.0.0.1", 1234), "e.json"
    )
    assert got["TORCHELASTIC_MAX_RESTARTS"] == "0"


def test_what_a_script_imports_of_installed_packages_is_preloaded_but_no_code_of_the_user_s_own(tmp_path, monkeypatch):
    script(tmp_path, "", "beside.py")
    on_the_path = tmp_path / "path"
    on_the_path.mkdir()
    (on_the_path / "named_by_pythonpath.py").touch()
    monkeypatch.syspath_prepend(on_the_path)
    names = ("os", "beside", "pytest", "named_by_pythonpath", "installed_nowhere", "torch")
    text = "\n".join([*(f"import {name}" for name in names), "from rich.x import A, B", "from . import c"])
    config = LaunchConfig(script=script(tmp_path, text))
    assert top_level_imports(config) == ["pytest", "rich.x:A", "rich.x:B"]
    assert top_level_imports(LaunchConfig(script=script(tmp_path, "def broken(:\n"))) == []


@pytest.mark.parametrize(("code", "mend"), [(errno.ENOSPC, "Free some space there. Name"), (errno.EDQUOT, "Free some"),
                                            (errno.EROFS, "system. Name another")])  # fmt: skip
def test_a_run_folder_that_cannot_be_is_told_with_what_mends_it(tmp_path, monkeypatch, code, mend):
    def refused(self, **more):
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(ConfigurationError, match=rf"run cannot be written: .*{mend}.*--run-dir"):
        writable(tmp_path / "run")


@pytest.mark.parametrize(("text", "wrapped"), [("import torch", False), ("import everstep", True)])
def test_an_archive_is_looked_into(tmp_path, text, wrapped):
    path = tmp_path / "packed.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", "import part")
        archive.writestr("part.py", text)
    assert mentions_everstep(str(path)) is wrapped
