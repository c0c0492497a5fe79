"""scripts/setup.py: what it decides and says; that it works is shown by whoever runs `make`."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup.py"


def load():
    spec = importlib.util.spec_from_file_location("everstep_setup", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load()


def test_a_machine_that_will_do_passes():
    setup.check_machine((3, 11), "linux", True)
    setup.check_machine((3, 14), "linux", True)


@pytest.mark.parametrize(
    ("version", "platform", "venv", "mend"),
    [
        ((3, 10), "linux", True, "Python 3.10 is too old, Everstep needs 3.11 or newer"),
        ((3, 12), "darwin", True, "needs Linux, and this is darwin"),
        ((3, 12), "linux", False, "sudo apt-get install python3.12-venv"),
    ],
)
def test_a_machine_that_will_not_do_is_told_what_to_do(version, platform, venv, mend, monkeypatch):
    monkeypatch.setattr(setup, "find", lambda version: "")
    with pytest.raises(setup.CannotSetUp, match=re.escape(mend)) as caught:
        setup.check_machine(version, platform, venv)
    assert "\n" not in str(caught.value), "one line"


def test_an_interpreter_that_is_new_enough_is_named_where_there_is_one(monkeypatch):
    monkeypatch.setattr(setup, "find", lambda version: "/opt/python3.12" if version == "3.12" else "")
    with pytest.raises(setup.CannotSetUp, match=r"found /opt/python3\.12, use it with PYTHON="):
        setup.check_machine((3, 9), "linux", True)


@pytest.mark.parametrize(
    ("version", "good"),
    [("2.8.0", True), ("2.13.0+cpu", True), ("2.10.0a0+git", True), ("2.7.1", False), ("1.13.1", False),
     ("3.0.0", False), ("unknown", False)],
)  # fmt: skip
def test_which_torch_is_in_range(version, good):
    assert setup.in_range(version) is good


STAMP = {"python": "3.11", "sources": "abc", "extras": ["dev", "examples"], "torch": None}


def test_an_environment_serves_whoever_needs_no_more_than_it_holds():
    assert setup.serves(STAMP, "3.11", ["examples"], "abc")
    assert setup.serves(STAMP | {"torch": "2.9.0"}, "3.11", ["examples"], "abc", "2.9.0")


@pytest.mark.parametrize(
    "wanted",
    [
        ("3.12", ["dev"], "abc"),
        ("3.11", ["peers"], "abc"),
        ("3.11", ["dev"], "changed"),
        ("3.11", ["dev"], "abc", "2.9.0"),
    ],
)
def test_an_environment_that_lacks_something_does_not_serve(wanted):
    assert not setup.serves(STAMP, *wanted)
    assert not setup.serves({}, *wanted)


@pytest.mark.parametrize(
    ("purpose", "python", "stamps", "torch", "folder"),
    [
        ("dev", "3.11", {}, None, ".venv"),
        ("dev", "3.11", {".venv": STAMP}, None, ".venv"),
        ("dev", "3.12", {".venv": STAMP}, None, ".venv-3.12"),
        ("demo", "3.11", {}, None, ".venv"),
        ("demo", "3.11", {}, "2.9.1", ".venv-demo"),
        ("demo", "3.11", {".venv": STAMP}, "2.9.1", ".venv"),
        ("demo", "3.12", {".venv": STAMP}, "2.9.1", ".venv-demo"),
        ("oldest", "3.11", {".venv": STAMP}, None, ".venv-oldest"),
        ("peers", "3.12", {}, None, ".venv-peers"),
        ("pure", "3.12", {".venv": STAMP}, None, ".venv-pure-3.12"),
    ],
)
def test_each_purpose_has_its_folder(purpose, python, stamps, torch, folder):
    assert setup.folder_for(purpose, python, stamps, torch) == folder


def test_the_constraint_on_torch_can_be_swapped_and_nothing_else():
    text = setup.CONSTRAINTS.read_text()
    swapped = setup.constraints(text, "2.8.0")
    assert "torch==2.13.0" in text.splitlines()
    assert [line for line in swapped.splitlines() if line not in text.splitlines()] == ["torch==2.8.0"]
    assert setup.constraints(text, None) == text


REMOTE = "https://example.invalid/x.whl"


def test_what_lies_on_this_disk_is_not_announced_as_a_download():
    assert setup.announcement([("torch", "2.13.0", "file:///w/torch.whl")]).endswith("nothing to download")
    text = setup.announcement([("torch", "2.13.0", "file:///w/torch.whl"), ("rich", "15.0.0", REMOTE)])
    assert text == "about to download 1 package, about 1 MB"


def test_a_cuda_build_is_announced_with_all_that_it_brings():
    items = [
        ("torch", "2.13.0", REMOTE),
        ("nvidia-cudnn-cu13", "9.9", REMOTE),
        ("triton", "3.5", REMOTE),
        ("mypy", "2.4.1", REMOTE),
    ]
    text = setup.announcement(items)
    assert "4 packages, about 4.7 GB" in text
    assert "torch 2.13.0 (4.7 GB, a CUDA build), mypy 2.4.1 (13 MB)" in text
    assert "torch 2.13.0 (200 MB)" in setup.announcement(items[:1])


def test_pips_report_is_read():
    report = {"install": [
        {"metadata": {"name": "PyYAML", "version": "6.0.4"}, "download_info": {"url": REMOTE}},
        {"metadata": {"name": "everstep", "version": "0.1.0"}, "download_info": {"url": "file:///here"}},
    ]}  # fmt: skip
    assert setup.to_install(json.dumps(report)) == [("pyyaml", "6.0.4", REMOTE)]


def test_without_a_network_the_way_out_is_named():
    text = setup.explain_failure("WARNING: Retrying\nERROR: Could not find a version that satisfies torch\n")
    assert "PIP_ARGS='--no-index --find-links FOLDER'" in text
    assert setup.explain_failure("ERROR: disk full\n") == "pip could not install: disk full"
    assert setup.explain_failure("a\nb\nc\nd\n") == "pip could not install: b | c | d"


def test_the_pure_environment_holds_all_that_we_need_but_torch():
    wanted = setup.wanted("pure", [])
    assert any(need.startswith("pydantic") for need in wanted)
    assert "pytest" in wanted
    assert not [need for need in wanted if need.startswith("torch")]
    assert setup.wanted("dev", ["dev", "examples"]) == ["-e", ".[dev,examples]"]


def test_each_extra_and_each_pin_is_known_to_the_project():
    import tomllib

    project = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {extra for wanted in setup.EXTRAS.values() for extra in wanted} <= set(extras)
    asked = {re.split(r"[\[<>=]", need)[0] for need in [*project["dependencies"], *extras["dev"], *extras["examples"]]}
    pinned = {line.split("==")[0] for line in setup.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")}
    assert pinned == asked


def test_an_interpreter_that_is_not_there_does_not_answer():
    assert setup.answers("/nonexistent/python") == ""


@pytest.mark.parametrize("arguments", [[], ["nope"], ["demo", "dev"], ["find"]])
def test_a_wrong_call_is_a_usage_error(arguments, capsys):
    assert setup.main(arguments) == 64
    assert "is not one of demo, dev" in capsys.readouterr().err


def test_a_failure_is_one_line_and_its_own_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(setup, "has_venv", lambda: False)
    assert setup.main(["dev"]) == 78
    told = capsys.readouterr()
    assert told.err.startswith("setup: Python")
    assert told.err.count("\n") == 1
    assert told.out == ""
