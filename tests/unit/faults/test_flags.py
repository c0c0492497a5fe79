import argparse
import json

import pytest

from everstep import environ
from everstep.errors import UsageError
from everstep.faults import add_arguments, commands, flags
from everstep.faults.core import codec
from everstep.faults.core.plan import Spec, plan


def parse(*words, add=flags.add_run_arguments):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("spell", [lambda w: w, lambda w: "--" + w[2:].replace("-", "_")])
def test_the_aws_flags_in_both_spellings(spell):
    words = {
        "--fault-count": "5", "--fault-seed": "42", "--fault-types": "exception,hang,sigkill",
        "--fault-type-weights": "0.5,0.25,0.25", "--fault-steps": "100", "--save-fault-plan": "x.json",
    }  # fmt: skip
    request = flags.request_from(parse(*(w for k, v in words.items() for w in (spell(k), v))))
    assert request is not None
    assert request.spec == Spec(5, 42, ("exception", "hang", "sigkill"), (0.5, 0.25, 0.25), 100)
    assert str(request.save_to) == "x.json"
    assert request.environment() == {flags.LAUNCHER_ASKED: "1"}
    with pytest.raises(argparse.ArgumentError):  # the file flag exists in both spellings too
        parse(spell("--fault-plan"))


def test_nothing_asked_is_nothing():
    assert flags.request_from(parse()) is None
    assert flags.request_from(parse("--fault-count", "0")) is None


def test_defaults():
    request = flags.request_from(parse("--fault-count", "2"))
    assert request is not None
    assert request.spec == Spec(2, 0, ("exception",), (), None)


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        ("--fault-count five", "--fault-count 'five': give a whole number"),
        ("--fault-count 2 --fault-seed x", "--fault-seed 'x'"),
        ("--fault-count 2 --fault-steps x", "--fault-steps 'x'"),
        ("--fault-seed 3", "--fault-seed without --fault-count"),
        ("--fault-types hang --fault-type-weights 1", "--fault-types, --fault-type-weights without"),
        ("--fault-count 2 --fault-types hang,boom", "'boom' is not known; choose from"),
        ("--fault-count 2 --fault-types=,", "choose from"),
        ("--fault-count 2 --fault-types hang --fault-type-weights 1,2", "2 weights for 1 types"),
        ("--fault-count 2 --fault-types hang --fault-type-weights a", "'a' is not a number"),
        ("--fault-count -2", "0 to"),
        ("--fault-plan /nowhere/plan.json", "/nowhere/plan.json cannot be read: No such file"),
        ("--fault-plan x --fault-seed 1", "leave the other"),
        ("--save-fault-plan x", "give --fault-count"),
    ],
)
def test_flags_that_cannot_be_meant(words, mend):
    with pytest.raises(UsageError, match=mend):
        flags.request_from(parse(*words.split()))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ('{"faults": [], "fault_seed": 3}', "the plan: 'fault_seed' is not known"),
        ('{"faults": [{"step": 5, "rank": 0, "type": "hang", "postion": "backward"}]}', "fault 0: 'postion' is not"),
        ('{"faults": [], "asked": {"seed": 1, "n": 2}}', "asked: 'n' is not known"),
    ],
)
def test_a_key_that_nobody_reads_is_refused(tmp_path, wrong, told):
    (tmp_path / "plan.json").write_text(wrong)
    with pytest.raises(UsageError, match=told):
        flags.request_from(parse("--fault-plan", str(tmp_path / "plan.json")))


def test_a_plan_is_replayed_from_a_file_or_a_run_folder(tmp_path):
    made = plan(1, 3, ("hang",), (), 2, 50)
    (tmp_path / "faults.json").write_text(codec.dumps(made, {0: 1.0}))
    for path in (tmp_path, tmp_path / "faults.json"):
        request = flags.request_from(parse("--fault-plan", str(path)))
        assert request is not None
        assert request.plan == made


def test_a_script_s_own_arguments():
    assert flags.script_spec() is None
    args = parse("--fault_count", "3", "--fault_types", "hang,exception", add=add_arguments)
    assert args.fault_count == "3"
    assert flags.script_spec() == Spec(3, 0, ("hang", "exception"))


def test_both_at_once_is_an_error_and_unused_arguments_are_not():
    environ.update({flags.LAUNCHER_ASKED: "1"})
    try:
        parse(add=add_arguments)
        assert flags.script_spec() is None
        parse("--fault-count", "1", add=add_arguments)
        with pytest.raises(UsageError, match="not both"):
            flags.script_spec()
    finally:
        environ.remove(flags.LAUNCHER_ASKED)


def everstep(*words):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers(dest="command", required=True))
    return commands.run(parser.parse_args(["faults", *words]))


ASKED = ("plan", "--fault-count", "2", "--fault-seed", "42", "--fault-types", "exception,hang", "--world-size", "2")


def test_the_command_prints_saves_and_shows(tmp_path, capsys):
    saved = tmp_path / "plan.json"
    assert everstep(*ASKED, "--fault-steps", "50", "--save-fault-plan", str(saved)) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[2].split() == ["0", "16", "1", "hang", "backward"]
    assert everstep("show", str(saved)) == 0
    assert capsys.readouterr().out == printed
    assert everstep("show", str(saved), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(saved.read_text())
    assert everstep("plan", "--fault-plan", str(saved), "--world-size", "2") == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (ASKED, "add --fault-steps"),
        (("plan", "--world-size", "2"), "--fault-count or --fault-plan"),
        ((*ASKED, "--fault-steps", "50", "--save-fault-plan", "/nowhere/x"), "writable folder"),
        (("show", "/nowhere/x"), "cannot be read"),
    ],
)
def test_the_command_refuses(words, mend):
    with pytest.raises(UsageError, match=mend):
        everstep(*words)
