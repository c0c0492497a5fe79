"""FaultToleranceConfig: NVRx's fields and defaults, read from YAML, flags and mappings; nonsense is refused by name."""

import argparse
import json
import logging
import signal
from dataclasses import MISSING, asdict, fields
from pathlib import Path

import pytest

from everstep.fault_tolerance.config import FaultToleranceConfig, sections

SURFACE = json.loads((Path(__file__).parent / "nvrx/surface.json").read_text())


def test_every_field_of_nvrx_is_here_with_its_default():
    """The table was read from NVRx 0.4.1 itself (`make peers-surface`)."""
    theirs = SURFACE["modules"]["fault_tolerance.config"]["FaultToleranceConfig"]
    mine = {one.name: one for one in fields(FaultToleranceConfig)}
    assert set(theirs["fields"]) <= set(mine)
    made = FaultToleranceConfig()
    texts = {"rank_termination_signal": "Signals.SIGKILL", "rank_section_timeouts": "a _HAS_DEFAULT_FACTORY_CLASS"}
    for name, _, default in theirs["parameters"]:
        if mine[name].default is MISSING:
            assert getattr(made, name) == {}
        else:
            assert texts.get(name, repr(getattr(made, name))) == default, name


def test_a_config_goes_over_json_and_yaml_and_back(tmp_path):
    config = FaultToleranceConfig(
        rank_section_timeouts={"step": 7, "save": None}, rank_heartbeat_timeout=None, log_level="warn",
        rank_termination_signal="sigterm", safety_factor=2,
    )  # fmt: skip
    assert (config.log_level, config.rank_termination_signal) == (logging.WARNING, signal.SIGTERM)
    assert FaultToleranceConfig.from_kwargs(**json.loads(json.dumps(asdict(config)))) == config
    config.to_yaml_file(str(tmp_path / "ft.yaml"))
    assert FaultToleranceConfig.from_yaml_file(str(tmp_path / "ft.yaml")) == config


@pytest.mark.parametrize(
    "text",
    [
        "fault_tolerance: {rank_heartbeat_timeout: 9}",
        "a: [1, {b: {fault_tolerance: {rank_heartbeat_timeout: '9'}}}]\nc: 3",
        "model: {x: 1}\nexp_manager:\n  fault_tolerance:\n    rank_heartbeat_timeout: 9\n    unknown: 1",
    ],
)
def test_the_section_is_found_at_any_depth(tmp_path, text):
    (tmp_path / "ft.yaml").write_text(text)
    assert FaultToleranceConfig.from_yaml_file(str(tmp_path / "ft.yaml")).rank_heartbeat_timeout == 9.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1", "no section `fault_tolerance`"),
        ("", "no section"),
        ("fault_tolerance: 7", "a mapping of settings"),
        ("fault_tolerance: [", "is no YAML"),
        ("fault_tolerance: {rank_heartbeat_timeout: soon}", "rank_heartbeat_timeout 'soon'"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, text, words):
    (tmp_path / "ft.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        FaultToleranceConfig.from_yaml_file(str(tmp_path / "ft.yaml"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        FaultToleranceConfig.from_yaml_file(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank_heartbeat_timeout": 0}, "more than 0"),
        ({"initial_rank_heartbeat_timeout": -1}, "initial_rank_heartbeat_timeout -1"),
        ({"rank_out_of_section_timeout": True}, "rank_out_of_section_timeout True"),
        ({"rank_heartbeat_timeout": float("nan")}, "nan"),
        ({"rank_section_timeouts": {"step": "x"}}, "rank_section_timeouts step 'x'"),
        ({"rank_section_timeouts": "step:1"}, "a mapping"),
        ({"workload_check_interval": None}, "workload_check_interval"),
        ({"safety_factor": 0.5}, "1 or more"),
        ({"rank_termination_signal": "SIGNONE"}, "SIGNONE"),
        ({"rank_termination_signal": 4096}, "4096"),
        ({"log_level": "loud"}, "loud"),
        ({"log_level": 7}, "10 to 50"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_its_name(given, words):
    with pytest.raises(ValueError, match=words):
        FaultToleranceConfig(**given)


def test_what_is_no_setting_is_ignored_or_refused_with_the_nearest():
    assert FaultToleranceConfig.from_kwargs(rank_heartbeat_timout=3) == FaultToleranceConfig()
    with pytest.raises(ValueError, match="perhaps rank_heartbeat_timeout is meant"):
        FaultToleranceConfig.from_kwargs(ignore_not_recognized=False, rank_heartbeat_timout=3)


def test_flags_beat_yaml_which_beats_defaults(tmp_path):
    (tmp_path / "ft.yaml").write_text("fault_tolerance: {rank_heartbeat_timeout: 9, safety_factor: 3}")
    args = argparse.Namespace(
        ft_cfg_path=str(tmp_path / "ft.yaml"), ft_rank_heartbeat_timeout="8", ft_rank_section_timeouts="a:1,b:none"
    )
    config = FaultToleranceConfig.from_args(args)
    assert (config.rank_heartbeat_timeout, config.safety_factor) == (8.0, 3.0)
    assert (config.rank_section_timeouts, config.initial_rank_heartbeat_timeout) == ({"a": 1.0, "b": None}, 3600.0)
    with pytest.raises(ValueError, match="--ft-cfg-path"):
        FaultToleranceConfig.from_args(argparse.Namespace(ft_cfg_path=None))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", {}), ("a:1", {"a": 1.0}), (" a : 2 , b:null,c:", {"a": 2.0, "b": None, "c": None}), ("x:y:3", {"x:y": 3.0})],
)
def test_sections_are_read_as_the_flag_writes_them(text, expected):
    assert sections(text) == expected


@pytest.mark.parametrize("text", ["a", ":1", "a:x", "a:1,b"])
def test_sections_that_cannot_be_meant_are_refused(text):
    with pytest.raises(ValueError, match=r"NAME:SECONDS|number of seconds"):
        sections(text)
