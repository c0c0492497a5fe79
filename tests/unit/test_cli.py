"""The command line is light: what needs no torch loads none, and what is not Linux's runs elsewhere."""

import subprocess
import sys

import pytest

from everstep import cli

LIGHT = """
import sys
from everstep import cli
try:
    code = cli.main({words!r})
except SystemExit as end:
    code = end.code
heavy = [m for m in ("torch", "numpy", "everstep.launcher", "everstep.training") if m in sys.modules]
print(code, heavy)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["report", "--help"],
        ["faults", "plan", "--help"],
        ["checkpoint", "--help"],
        ["doctor", "--help"],
        ["ps", "--help"],
        [],
    ],
)
def test_commands_that_only_read_load_neither_torch_nor_the_launcher(words):
    done = subprocess.run([sys.executable, "-c", LIGHT.format(words=words)], capture_output=True, text=True, check=True)
    code = "64" if not words else "0"
    assert done.stdout.splitlines()[-1] == f"{code} []", done.stdout + done.stderr


def test_run_says_where_it_works(monkeypatch, capsys):
    monkeypatch.setattr(cli.platform, "system", lambda: "Darwin")
    assert cli.main(["run", "x.py"]) == 64
    assert "needs Linux" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["no-such-command"], ["report", "--no-such-flag"]])
def test_nonsense_is_exit_code_64(words, capsys):
    assert cli.main(words) == 64
    assert "--help" in capsys.readouterr().err
