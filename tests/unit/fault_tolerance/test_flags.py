"""`ft_launcher`'s flags: every spelling that NVRx has, what comes before what, and the words of refusal."""

import json
import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the parser of everstep run is torch's own")
from everstep import wiring
from everstep.errors import UsageError
from everstep.fault_tolerance import launcher as ft_launcher
from everstep.fault_tolerance.core.terms import DONE, DONE_OTHERWISE, REFUSED
from everstep.launcher import flags
from everstep.launcher.config import from_flags

SURFACE = json.loads((Path(__file__).parent / "nvrx/surface.json").read_text())
FT = (*wiring.EXTENSIONS, wiring.FT_LAUNCHER)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print(1)\n")
    return str(path)


@pytest.fixture
def parse(script):
    def read(*words, extensions=FT):
        return flags.parse([*words, script], extensions)

    return read


def test_every_flag_of_nvrx_is_heard_in_each_of_its_spellings():
    """The table was read from NVRx 0.4.1 itself (`make peers-surface`)."""
    known = {flag for action in flags.build(FT)._actions for flag in action.option_strings}
    theirs = [flag for _, spellings, _ in SURFACE["flags"] for flag in spellings]
    assert len(theirs) > 90
    assert sorted(set(theirs) - known) == []


@pytest.mark.parametrize(
    "words", [("--ft-safety-factor", "3"), ("--ft_safety_factor=3",), ("--ft-param-safety_factor", "3")]
)
@pytest.mark.parametrize("extensions", [FT, wiring.EXTENSIONS], ids=["ft_launcher", "everstep run"])
def test_a_setting_reaches_the_rank_monitors_however_it_is_spelled(parse, words, extensions):
    assert parse(*words, extensions=extensions)["fault_tolerance"] == {"safety_factor": 3.0}


def test_nothing_is_set_where_nothing_is_given(parse):
    given = parse()
    assert given["fault_tolerance"] is None
    assert given["ft_notices"] == []


def test_flags_come_before_the_file_which_comes_before_defaults(parse, tmp_path, monkeypatch):
    (tmp_path / "ft.yaml").write_text(
        "x: {fault_tolerance: {safety_factor: 4, rank_heartbeat_timeout: null, rank_section_timeouts: {step: 9}}}"
    )
    path = str(tmp_path / "ft.yaml")
    expected = {"safety_factor": 3.0, "rank_heartbeat_timeout": None, "rank_section_timeouts": {"step": 9.0}}
    assert parse("--ft-cfg-path", path, "--ft-safety-factor", "3")["fault_tolerance"] == expected
    monkeypatch.setenv("PET_FT_CFG_PATH", path)
    assert parse("--ft-safety-factor", "3")["fault_tolerance"] == expected
    assert parse()["fault_tolerance"] == expected | {"safety_factor": 4.0}
    (tmp_path / "other.yaml").write_text("fault_tolerance: {safety_factor: 7}")
    other = parse("--fault-tol-cfg-path", str(tmp_path / "other.yaml"), "--ft-rank-section-timeouts", "a:1,b:null")
    assert other["fault_tolerance"] == {"safety_factor": 7.0, "rank_section_timeouts": {"a": 1.0, "b": None}}


def test_a_flag_takes_the_place_of_its_own_setting_in_the_variable_alone(parse, monkeypatch):
    monkeypatch.setenv("EVERSTEP_FAULT_TOLERANCE", '{"safety_factor": 2, "rank_heartbeat_timeout": 50}')
    assert parse()["fault_tolerance"] is None  # workers inherit it as it is
    merged = {"safety_factor": 3.0, "rank_heartbeat_timeout": 50}
    assert parse("--ft-safety-factor", "3")["fault_tolerance"] == merged
    for wrong in ("{", "[1]"):
        monkeypatch.setenv("EVERSTEP_FAULT_TOLERANCE", wrong)
        with pytest.raises(UsageError, match="EVERSTEP_FAULT_TOLERANCE"):
            parse("--ft-safety-factor", "3")


@pytest.mark.parametrize("text", ["no_such_section: 1", None])
def test_a_file_without_settings_is_refused_unless_it_may_be_missing(parse, tmp_path, text):
    """NVRx goes on with its defaults, without a word, where the section is not there (W37)."""
    if text is not None:
        (tmp_path / "ft.yaml").write_text(text)
    words = ("--ft-cfg-path", str(tmp_path / "ft.yaml"))
    with pytest.raises(UsageError, match="--ft-ignore-missing-cfg"):
        parse(*words)
    for spelling in ("--ft-ignore-missing-cfg", "--ignore-missing-fault-tol-cfg"):
        given = parse(*words, spelling)
        assert given["fault_tolerance"] is None
        assert given["ft_notices"][0].endswith("Defaults hold.")


def test_what_is_no_setting_in_a_file_is_named(parse, tmp_path):
    (tmp_path / "ft.yaml").write_text("fault_tolerance: {rank_heartbeat_timout: 9, safety_factor: 2}")
    given = parse("--ft-cfg-path", str(tmp_path / "ft.yaml"))
    assert given["fault_tolerance"] == {"safety_factor": 2.0}
    assert "rank_heartbeat_timout are no settings" in given["ft_notices"][0]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_done_is_refused_by_its_name_and_with_the_reason(parse, tmp_path, name):
    flag = f"--ft-{name.replace('_', '-')}"
    with pytest.raises(UsageError, match=f"{flag} .* is not done here: ") as refused:
        parse(flag, "true")
    assert REFUSED[name] in str(refused.value)
    (tmp_path / "ft.yaml").write_text(f"fault_tolerance: {{{name}: 1}}")
    with pytest.raises(UsageError, match=f"{name} \\(in the file"):
        parse("--ft-cfg-path", str(tmp_path / "ft.yaml"))
    (tmp_path / "ft.yaml").write_text(f"fault_tolerance: {{{name}: null}}")
    parse("--ft-cfg-path", str(tmp_path / "ft.yaml"))


@pytest.mark.parametrize(
    "name", ["enable_nic_monitor", "enable_nic_healthcheck", "numa_bind_strict", "enable_log_server"]
)
def test_a_refused_thing_may_be_turned_off(parse, name):
    assert parse(f"--ft-{name.replace('_', '-')}", "False")["ft_notices"] == []


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (("--ft-workload-check-interval", "1"), "--ft-workload-check-interval 1 changes nothing"),
        (("--ft-node-health-check-interval", "1"), "--ft-node-health-check-interval 1 changes nothing"),
        (("--ft-restart-check-interval", "7"), "--ft-restart-check-interval 7 changes nothing"),
        (("--ft-rank-termination-signal", "SIGTERM"), "--ft-rank-termination-signal SIGTERM changes nothing"),
        (("--ft-skip-section-response", "false"), "--ft-skip-section-response False changes nothing"),
        (("--ft-gpu-memory-poll-interval", "1"), "--ft-gpu-memory-poll-interval 1 changes nothing"),
        (("--ft-check-remaining-processes", "no"), "--ft-check-remaining-processes False changes nothing"),
        (("--ft-install-exception-hook", "0"), "--ft-install-exception-hook False changes nothing"),
        (("--ft-rdzv-impl", "legacy"), "--ft-rdzv-impl legacy changes nothing"),
        (("--workers-stop-timeout", "3"), "--workers-stop-timeout changes nothing"),
    ],
)
def test_what_changes_nothing_says_so_and_why(parse, words, begins):
    (told,) = parse(*words)["ft_notices"]
    assert told.startswith(begins + ": ")


@pytest.mark.parametrize(
    "words",
    [
        ("--ft-rank-termination-signal", "SIGKILL"), ("--ft-skip-section-response", "true"),
        ("--ft-check-remaining-processes", "true"), ("--ft-install-exception-hook", "true"),
        ("--ft-rdzv-impl", "barrier"), ("--ft-restart-policy", "any-failed"), ("--restart-policy", "any-failed"),
    ],
)  # fmt: skip
def test_what_is_done_anyway_needs_no_word(parse, words):
    assert parse(*words)["ft_notices"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ft-restart-policy", "all"), "invalid choice"),
        (("--ft-rank-termination-signal", "SIGUSR1"), "ended by SIGKILL here"),
        (("--ft-enable-nic-monitor", "perhaps"), "neither true nor false"),
        (("--ft-rank-heartbeat-timeout", "soon"), "rank_heartbeat_timeout 'soon'"),
        (("--ft-rank-section-timeouts", "step"), "NAME:SECONDS"),
        (("--ft-safety-factor", "0.1"), "1 or more"),
        (("--ft-gpu-memory-reclaim-timeout", "soon"), "a number, 0 or more"),
        (("--ft-gpu-memory-tolerance-mb", "-1"), "a number, 0 or more"),
        (("--ft-max-no-progress-cycles", "2.5"), "a whole number"),
        (("--ft-per-cycle-applog-prefix", "here"), "an absolute path"),
        (("--ft-no-restart-exit-code", "none"), "none"),
        (("--ft-no-such-flag", "1"), "unrecognized"),
        (("--rdzv-backend", "etcd", "--nnodes", "2"), "knows static and c10d"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_words(parse, words, said):
    with pytest.raises(UsageError, match=said) as refused:
        from_flags(parse(*words))
    assert refused.value.exit_code == 64


def test_the_defaults_are_ft_launcher_s_under_its_name_alone(parse, script, monkeypatch):
    for name in ("PET_MAX_RESTARTS", "PET_NODE_RANK", "PET_MASTER_PORT", "PET_RDZV_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    theirs, ours = from_flags(parse()), from_flags(parse(extensions=wiring.EXTENSIONS))
    assert (theirs.max_restarts, ours.max_restarts) == (0, None)
    assert (theirs.grace_s, ours.grace_s) == (1800.0, 15.0)
    assert from_flags(parse("--max-restarts", "4", "--term-timeout", "9")).max_restarts == 4
    assert from_flags(parse("--term-timeout", "9")).grace_s == 9.0
    assert from_flags(parse("--term-timeout", "9", "--grace", "8")).grace_s == 8.0
    monkeypatch.setenv("PET_TERM_TIMEOUT", "7")
    assert from_flags(parse()).grace_s == 7.0
    two = from_flags(parse("--nnodes", "2:2", "--master-addr", "node0"))
    assert two.endpoint is not None
    assert (str(two.endpoint), two.endpoint.hosts) == ("node0:29500", None)  # c10d: whose address it is opens it
    Path(script).write_text("import everstep\n")
    assert from_flags(parse()).max_restarts is None  # restarts in the process are none of ft_launcher's


PAGE = (Path(__file__).parents[3] / "docs/launcher-flags.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split(" | ")]
    for line in PAGE.split("## ft_launcher's flags\n")[1].split("\n## ")[0].splitlines()
    if line.startswith("| `")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("|` ")[:40])
def test_each_row_of_the_page_names_a_test_that_exists(row, root):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[2])
    assert named
    assert [test for file, test in named if f"def {test}(" not in (root / file).read_text()] == []


def test_the_page_has_each_setting_and_says_what_the_parser_says():
    told = {flag: row[1] for row in ROWS for flag in re.findall(r"`--([a-z-]+)`", row[0])}
    for name in {*DONE, *DONE_OTHERWISE, *REFUSED} - {"workers_stop_timeout"}:
        here = told[f"ft-{name.replace('_', '-')}"]
        assert here.startswith("refused: ") == (name in REFUSED)
        assert here.startswith("changes nothing, and says so: ") == (name in DONE_OTHERWISE)
        assert here.endswith(REFUSED.get(name, DONE_OTHERWISE.get(name, "")))
    assert {"term-timeout", "workers-stop-timeout", "ft-cfg-path", "ft-ignore-missing-cfg"} <= set(told)


@pytest.mark.parametrize(
    ("nnodes", "spare", "expected"),
    [("1", "0", (1, 0)), ("2:2", "0", (2, 0)), ("2:5", "0", (2, 3)), ("2:5", "1", (2, 4)), ("3", "2", (3, 2))],
)
def test_of_a_range_of_nodes_the_least_work_and_the_others_wait(parse, nnodes, spare, expected):
    """torchrun's range is another: the most work, as long as they are there."""
    words = ("--nnodes", nnodes, "--spare-nodes", spare)
    theirs, ours = from_flags(parse(*words)), parse(*words, extensions=wiring.EXTENSIONS)
    assert (theirs.nnodes, theirs.spare_nodes, theirs.least_nodes) == (*expected, None)
    assert (ours["nodes"], ours["spare_nodes"]) == (int(nnodes[-1]), int(spare))


@pytest.mark.parametrize("nnodes", ["5:2", "x:2", "0"])
def test_a_range_that_is_none_is_refused(parse, nnodes):
    with pytest.raises(UsageError):
        from_flags(parse("--nnodes", nnodes))


def test_healthy_workers_are_kept_in_a_wrapped_function_and_elsewhere_that_is_refused(parse, script):
    words = ("--ft-restart-policy", "min-healthy")
    with pytest.raises(UsageError, match="in a wrapped function alone"):
        wiring.riders(from_flags(parse(*words)))
    assert wiring.riders(from_flags(parse("--ft-restart-policy", "any-failed"))).notices == []
    Path(script).write_text("import everstep\n")
    assert "changes nothing: healthy ranks" in wiring.riders(from_flags(parse(*words))).notices[0]


def test_device_memory_is_waited_for_as_it_says(parse):
    config = from_flags(parse("--ft-gpu-memory-reclaim-timeout", "7", "--ft-gpu_memory_tolerance_mb", "64"))
    assert (config.gpu_memory_reclaim_s, config.gpu_memory_tolerance_mb) == (7.0, 64.0)
    assert from_flags(parse("--ft-gpu-memory-reclaim-timeout", "0")).reclaim is None
    assert from_flags(parse()).reclaim == [50.0, 512.0]


def test_the_exit_code_that_is_not_to_be_requeued_is_taken(parse):
    assert parse("--ft-no-restart-exit-code", "94")["no_restart_exit_code"] == 94


def test_its_own_distribution_has_one_command_and_is_of_our_version(root):
    made = tomllib.loads((root / "packages/ft-launcher/pyproject.toml").read_text())["project"]
    ours = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert made["scripts"] == {"ft_launcher": f"{ft_launcher.__name__}:{ft_launcher.main.__name__}"}
    assert made["dependencies"] == [f"everstep=={ours['version']}"]
    assert made["version"] == ours["version"]
    assert list(ours["scripts"]) == ["everstep"]  # it would take NVRx's command away where both are installed


def test_each_setting_has_one_place():
    assert not set(DONE) & set(DONE_OTHERWISE)
    assert not {*DONE, *DONE_OTHERWISE} & set(REFUSED)
    known = {*DONE, *DONE_OTHERWISE, *REFUSED, "ignore_missing_cfg", "cfg_path"}
    theirs = {name.removeprefix("ft_") for name, _, _ in SURFACE["flags"] if name.startswith("ft_")}
    config = SURFACE["modules"]["fault_tolerance.config"]["FaultToleranceConfig"]["fields"]
    assert sorted({*theirs, *config} - known) == []
