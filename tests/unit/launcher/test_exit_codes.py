"""The table that a scheduler's rules are written from, and the example that follows it."""

import re
from pathlib import Path

from everstep.errors import ExitCode

ROOT = Path(__file__).parents[3]
AGAIN = {"1": "start again, counted", "75": "again, on another node, not counted", "128 + n": "again, not counted"}


def table():
    page = (ROOT / "docs" / "launcher.md").read_text()
    part = page.partition("## Exit codes, for a scheduler")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_page_has_each_code_and_says_what_to_do():
    rows = table()
    assert [int(re.match(r"\d+", code)[0]) for code in rows] == sorted(ExitCode)
    assert {code: row[1] for code, row in rows.items() if "again" in row[1] and "not again" not in row[1]} == AGAIN
    assert {code for code, row in rows.items() if row[3] == "FailJob"} == {"64", "78", "93"}
    assert {code for code, row in rows.items() if row[3] == "Ignore"} == {"75"}


def test_the_example_starts_again_after_those_that_are_worth_it():
    text = (ROOT / "examples" / "slurm" / "train.sbatch").read_text()
    taken = {int(code) for code in re.findall(r"\$code == (\d+)", text)}
    wanted = {code for code, row in table().items() if row[2] == "`scontrol requeue`"}
    assert taken == {143, 75}
    assert wanted == {"75", "128 + n"}
