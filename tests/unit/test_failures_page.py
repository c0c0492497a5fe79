"""The page of faults: every row is whole, and names tests that exist."""

import re

import pytest

TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@pytest.fixture(scope="module")
def rows(request):
    page = (request.config.rootpath / "docs/failures.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| what happened")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_says_who_when_what_at_which_price_and_with_which_code(rows):
    assert len(rows) >= 30
    assert [row for row in rows if len(row) != 7 or not all(row)] == []


def test_every_row_names_tests_that_exist(rows, request):
    root, lacking = request.config.rootpath, []
    for *_, shown in rows:
        named = TEST.findall(shown)
        lacking += [f"{file}::{test}" for file, test in named if f"def {test}(" not in (root / file).read_text()]
        assert named, shown
    assert lacking == []
