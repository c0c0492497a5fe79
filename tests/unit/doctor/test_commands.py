"""The command: what it is asked, what it prints, how it exits."""

import json

import pytest

from everstep import cli
from everstep.doctor import examine
from everstep.doctor.core.findings import ok, problem, warning

WELL = [ok("kernel", "6.1"), warning("own name", "a is 127.0.0.1", "another", "Mend /etc/hosts.")]
ILL = [*WELL, problem("torch", "2.1", "2.8 to 2.13", "Install a newer torch.")]


@pytest.fixture
def asked(monkeypatch):
    heard = []

    def give(found):
        monkeypatch.setattr(examine, "examine", lambda what: heard.append(what) or found)
        return heard

    return give


@pytest.mark.parametrize(("found", "code"), [(WELL, 0), (ILL, 1)])
def test_a_problem_is_exit_code_1_and_a_warning_none(found, code, asked, capsys):
    asked(found)
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out.startswith("ok       kernel")
    assert f"{code} problem{'' if code else 's'}, 1 warning in {len(found)} findings" in err


def test_rows_for_scripts_and_nothing_beside_them(asked, capsys):
    asked(ILL)
    assert cli.main(["doctor", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == [one.row() for one in ILL]
    assert err == ""


def test_flags_are_read_as_everstep_run_reads_them(asked):
    heard = asked(WELL)
    words = ["--state", "40GB", "--nproc_per_node", "8", "--rdzv-endpoint", "node-0", "--checkpoint-dir", "/mnt/ck"]
    assert cli.main(["doctor", *words]) == 0
    assert (heard[0].ranks, heard[0].state, heard[0].directory) == (8, 40 * 10**9, "/mnt/ck")
    assert str(heard[0].endpoint) == "node-0:29500"
    assert cli.main(["doctor"]) == 0
    assert heard[1] == examine.Asked(1)


@pytest.mark.parametrize(
    "words", [["--state", "much"], ["--nproc-per-node", "0"], ["--nproc-per-node", "gpu"], ["--rdzv-endpoint", "a:b"]]
)
def test_what_cannot_be_meant_is_exit_code_64(words, asked, capsys):
    asked(WELL)
    assert cli.main(["doctor", *words]) == 64
    assert words[1] in capsys.readouterr().err


def test_not_linux_is_the_finding(monkeypatch, capsys):
    monkeypatch.setattr(cli.platform, "system", lambda: "Darwin")
    assert cli.main(["doctor", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["level"], row["seen"]) == ("problem", "Darwin")
