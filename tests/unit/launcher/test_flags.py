"""The command line: torchrun's own parser, and the words with which nonsense is refused."""

import re
from pathlib import Path

import pytest
from torch.distributed import argparse_util
from torch.distributed.run import get_args_parser

from everstep.errors import EverstepError
from everstep.launcher import flags
from everstep.launcher.config import from_flags
from everstep.launcher.core.unlike import REFUSED
from everstep.launcher.run import named

EXTENSIONS = ("everstep.faults.flags:add_run_arguments",)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import everstep\n")
    return str(path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--no-such-flag",), "unrecognized"),
        (("--nproc-per-node", "0"), "at least one rank"),
        (("--nproc-per-node", "many"), "--nproc-per-node many: .* 1 or more, or cpu, gpu or auto"),
        (("--nnodes", "2"), "needs --node-rank"),
        (("--nnodes", "1:2"), "needs --node-rank"),
        (("--nnodes", "1", "--spare-nodes", "1"), "needs --node-rank"),
        (("--spare-nodes", "-1"), "give 0 or more"),
        (("--standalone", "--spare-nodes", "1"), "--standalone is a job of one node"),
        (("--nnodes", "2", "--rdzv-backend", "c10d"), "needs --rdzv-endpoint"),
        (("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "host:none"), "HOST:PORT"),
        (("--nnodes", "x"), "--nnodes x: give a number of nodes"),
        (("--nnodes", ""), "--nnodes : give a number of nodes"),
        (("--rdzv-backend", "etcd"), "knows static and c10d"),
        (("--nnodes", "0"), "1 or more"),
        (("--nnodes", "5:2"), "MIN <= MAX"),
        (("--nnodes", "-1:2"), "1 or more|expected one argument"),
        (("--max-restarts", "few"), "few"),
        (("--spares", "-1"), "0 or more"),
        (("--grace", "-1"), "0 or more"),
        (("--soft-timeout", "0"), "more than 0"),
        (("--first-timeout", "-3"), "more than 0"),
        (("--soft-timeout", "5", "--hard-timeout", "4"), "soft < hard"),
        (("--redirects", "4"), "0 to 3"),
        (("--tee", "0:x"), "0 to 3"),
        (("--local-ranks-filter", "one"), "local ranks"),
        (("--duplicate-stdout-filters", "loss", "--tee", "2"), "no rank's stdout is shown"),
        (("--duplicate-stderr-filters", "loss", "--tee", "0:1,1:1"), "no rank's stderr is shown"),
        (("--log-dir", __file__), "name a folder"),
        (("--logs-specs", "mine"), "does not do it"),
        (("--virtual-local-rank",), "does not do it"),
        (("-m", "--no-python"), "contradict"),
        (("--numa-binding", "node"), "does not do it"),
        (("--signals-to-handle", "SIGUSR1"), "hears no other"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_words(script, given, words):
    with pytest.raises(EverstepError, match=words) as refused:
        from_flags(flags.parse([*given, script], EXTENSIONS))
    assert refused.value.exit_code == 64


@pytest.mark.parametrize("spelling", ["--first-timeout", "--first_timeout"])
def test_flags_are_heard_with_dashes_and_with_underscores(script, spelling):
    config = from_flags(flags.parse([spelling, "7", "--nproc_per_node=2", script, "--lr", "1"], EXTENSIONS))
    assert (config.first_timeout_s, config.nproc, config.arguments) == (7.0, 2, ("--lr", "1"))


def test_streams_and_ranks_are_taken_as_torchrun_writes_them(script):
    given = ["--redirects", "3", "--tee", "0:1,1:3", "--local-ranks-filter", "0, 2", script]
    config = from_flags(flags.parse(given, EXTENSIONS))
    assert (config.redirects, config.tee, config.local_ranks_filter) == ("3", "0:1,1:3", "0, 2")


def test_a_port_is_what_was_given_and_else_any_free_one(script, monkeypatch):
    """torch up to 2.12 has 29500 for its default: a second job of the node was then refused."""
    monkeypatch.delenv("PET_MASTER_PORT", raising=False)
    assert from_flags(flags.parse([script], EXTENSIONS)).master_port is None
    assert from_flags(flags.parse(["--master-port", "7", script], EXTENSIONS)).master_port == 7
    monkeypatch.setenv("PET_MASTER_PORT", "8")
    assert from_flags(flags.parse([script], EXTENSIONS)).master_port == 8


def test_a_node_that_was_given_no_rank_takes_none_for_its_own(script, monkeypatch):
    monkeypatch.delenv("PET_NODE_RANK", raising=False)
    two = ["--nnodes", "2:2", "--nproc-per-node", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "n0:77"]
    config = from_flags(flags.parse([*two, script], EXTENSIONS))
    assert (config.nnodes, config.world_size) == (2, 6)
    assert config.endpoint is not None
    assert (config.endpoint.host, config.endpoint.port, config.endpoint.node_rank) == ("n0", 77, None)
    monkeypatch.setenv("PET_NODE_RANK", "1")
    config = from_flags(flags.parse([*two, script], EXTENSIONS))
    assert config.endpoint is not None
    assert config.endpoint.node_rank == 1


def test_one_node_meets_nobody_whatever_else_is_given(script):
    assert from_flags(flags.parse(["--standalone", "--nnodes", "4", script], EXTENSIONS)).endpoint is None
    assert (
        from_flags(flags.parse(["--rdzv-endpoint", "n0:77", "--rdzv-backend", "c10d", script], EXTENSIONS)).nnodes == 1
    )


def test_the_help_says_what_restarts_mean_here():
    told = " ".join(flags.build(EXTENSIONS).format_help().split())
    assert "Restarts of the whole job before it fails; left out, a fault that made progress" in told
    assert "worker group restarts" not in told


PAGE = Path(__file__).parents[3] / "docs/launcher-flags.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows_of(title):
    """Return the table below a title as (flags, variable, what it does here, tests)."""
    below = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split(" | ")] for line in below.splitlines() if line.startswith("| `")]


def test_the_page_has_each_of_torch_s_flags_its_variable_and_a_test():
    """A flag that a new torch adds fails here until the page says what it does; one that an old one lacks may stand."""
    rows = rows_of("torchrun's flags")
    told = {flag: row for row in rows for flag in re.findall(r"`(--?[a-z-]+)`", row[0])}
    for action in get_args_parser()._actions:
        for flag in (flag for flag in action.option_strings if "_" not in flag and flag not in ("-h", "--help")):
            assert flag in told, f"docs/launcher-flags.md says nothing of torchrun's {flag}"
            variable = told[flag][1].replace("STDOUT", "STDERR") if "stderr" in flag else told[flag][1]
            has_one = isinstance(action, (argparse_util.env, argparse_util.check_env))
            assert variable == (f"PET_{action.dest.upper()}" if has_one else "–"), flag
    spellings = {flag for action in flags.build(EXTENSIONS)._actions for flag in action.option_strings}
    assert {flag for action in get_args_parser()._actions for flag in action.option_strings} <= spellings


@pytest.mark.parametrize("row", rows_of("torchrun's flags"), ids=lambda row: row[0].strip("|` "))
def test_each_row_names_a_test_that_exists_or_is_refused_by_one(row, root):
    named = NAMED.findall(row[3])
    assert named, row
    assert [test for file, test in named if f"def {test}(" not in (root / file).read_text()] == []
    if row[2].startswith("refused"):
        assert [flag for flag in re.findall(r"--([a-z-]+)", row[0]) if flag.replace("-", "_") not in REFUSED] == []


def test_whatever_is_refused_has_a_row_that_says_so():
    refused = {
        flag for row in rows_of("torchrun's flags") if row[2].startswith("refused") for flag in row[0].split("`")
    }
    assert {f"--{name.replace('_', '-')}" for name in REFUSED} <= refused


def test_a_job_of_one_node_without_a_name_gets_one(script):
    """torchrun's `none` would be the same for all jobs of a machine."""
    assert named(from_flags(flags.parse([script], EXTENSIONS)), "a1").run_id == "a1"
    assert named(from_flags(flags.parse(["--rdzv-id", "mine", script], EXTENSIONS)), "a1").run_id == "mine"
    for others in (("--nnodes", "2"), ("--nnodes", "1:2"), ("--nnodes", "1", "--spare-nodes", "1")):
        several = from_flags(flags.parse([*others, "--node-rank", "0", script], EXTENSIONS))
        assert named(several, "a1").run_id == "none"  # the nodes must agree on it


def test_a_path_to_run_comes_before_a_module_and_another_program(script):
    for other in ("-m", "--no-python"):
        config = from_flags(flags.parse(["--run-path", other, script], EXTENSIONS))
        assert (config.module, config.no_python, config.script) == (False, False, script)


def test_torchrun_s_grace_is_ours(script, monkeypatch):
    given = vars(flags.build(EXTENSIONS).parse_args([script]))
    if "shutdown_timeout" not in given:
        pytest.skip("this torch has no --shutdown-timeout")
    assert from_flags(flags.parse(["--shutdown-timeout", "33", script], EXTENSIONS)).grace_s == 33.0
    assert from_flags(flags.parse(["--shutdown-timeout", "33", "--grace", "4", script], EXTENSIONS)).grace_s == 4.0
    assert from_flags(flags.parse([script], EXTENSIONS)).grace_s == 15.0
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "22")
    assert from_flags(flags.parse([script], EXTENSIONS)).grace_s == 22.0
    assert from_flags(flags.parse(["--shutdown-timeout", "33", script], EXTENSIONS)).grace_s == 33.0
