"""The page that says which test shows what names only tests that exist, and leaves nothing out."""

import re

import pytest

NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
PATHS = re.compile(r"`((?:scripts|docs|examples)/[\w./-]+|pyproject\.toml|CHANGELOG\.md|LICENSE|\.ci/run)`")
CASES = [
    "CS-01",
    "CS-13",
    "CS-18",
    "CS-28",
    "CS-37",
    "CL-01",
    "CL-09",
    "CL-13",
    "IR-01",
    "IR-12",
    "LA-06",
    "LA-23",
    "LA-25",
    "GP-04",
    "FI-01",
    "FI-03",
    "HD-01",
]


FIRST, THIRD, FOURTH, FIFTH = "traceability.md", "traceability-3.md", "traceability-4.md", "traceability-5.md"
LEAST = {FIRST: 150, THIRD: 55, FOURTH: 5, FIFTH: 15}  # tests that a page names: none has lost its rows


@pytest.fixture(scope="module")
def pages(request):
    return {name: (request.config.rootpath / "docs/results" / name).read_text() for name in LEAST}


@pytest.fixture
def page(pages):
    return pages[FIRST]


@pytest.mark.parametrize("name", LEAST)
def test_every_test_that_is_named_exists(pages, name, root):
    page = pages[name]
    texts, wrong = {}, []
    named = NAMED.findall(page)
    for file, test in named:
        if file not in texts:
            texts[file] = (root / file).read_text() if (root / file).exists() else None
        if texts[file] is None or (test and f"def {test}(" not in texts[file]):
            wrong.append(f"{file}::{test}")
    assert wrong == []
    assert len(named) >= LEAST[name]
    assert page.count("::test_") == sum(1 for _, test in named if test), "a name that is not written as the others are"


@pytest.mark.parametrize("name", LEAST)
def test_every_other_file_that_is_named_exists(pages, name, root):
    page = pages[name]
    assert [path for path in PATHS.findall(page) if not (root / path).exists()] == []


def test_every_experiment_and_every_case_has_one_row(page):
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert [row for row in rows if re.fullmatch(r"E\d+", row)] == [f"E{n}" for n in range(1, 34)]
    assert [row for row in rows if re.fullmatch(r"[A-Z]{2}-\d\d", row)] == CASES


@pytest.mark.parametrize("name", LEAST)
def test_every_row_shows_something_or_says_that_it_does_not(pages, name):
    for line in pages[name].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) > 1 and not set(cells[-1]) <= {"-"} and cells[-1] != "shown by":
            assert re.search(r"`|missing|by hand|\]\(", cells[-1]), line
