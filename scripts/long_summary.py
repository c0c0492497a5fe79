"""What `make test-long` came to, as a page: one row a test, its cases together. Tells of failures, and keeps them.

usage: python scripts/long_summary.py JUNIT.XML… [> docs/results/long.md]

Reads pytest's own reports; several where the tier was run in parts. A case that stands in two of them was run again:
the later report counts, and the page tells how many there are. Seeds stand in the tests (their parameters and
constants), so the same cases come again; what a test recorded of itself (`record_property`) is told beside it.
"""

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Row:
    """One test function."""

    cases: int = 0
    seconds: float = 0.0
    bad: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)


def suite_of(report: Path) -> ET.Element:
    """Return the one suite of a report."""
    suite = ET.parse(report).getroot().find("testsuite")
    if suite is None:
        sys.exit(f"{report}: no <testsuite> in it; give it pytest's --junitxml file.")
    return suite


def cases_of(suites: Sequence[ET.Element]) -> dict[tuple[str | None, str | None], ET.Element]:
    """Return the last run of each case; an error while cleaning up stands in an element of its own, beside it."""
    found: dict[tuple[str | None, str | None], ET.Element] = {}
    for suite in suites:
        here: dict[tuple[str | None, str | None], ET.Element] = {}
        for case in suite.iter("testcase"):
            key = case.get("classname"), case.get("name")
            if key in here:
                here[key].extend(list(case))
            else:
                here[key] = case
        found |= here
    return found


def rows(suites: Sequence[ET.Element]) -> dict[str, Row]:
    """Gather the cases of each test."""
    found: dict[str, Row] = defaultdict(Row)
    for case in cases_of(suites).values():
        name = case.get("name", "").partition("[")[0]
        row = found[f"{case.get('classname', '').replace('.', '/')}.py::{name}"]
        row.cases += 1
        row.seconds += float(case.get("time", 0.0))
        for kind in ("failure", "error"):
            row.bad += [f"{case.get('name')}: {e.get('message', '')[:200]}" for e in case.findall(kind)]
        row.skipped += [e.get("message", "") for e in case.findall("skipped")]
        row.told |= {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
    return found


def page(suites: Sequence[ET.Element]) -> str:
    """Return the page."""
    found = rows(suites)
    again = sum(len(cases_of([suite])) for suite in suites) - len(cases_of(suites))
    minutes = ", ".join(f"{float(suite.get('time', 0.0)) / 60:.0f}" for suite in suites)
    cases, bad = sum(r.cases for r in found.values()), sum(len(r.bad) for r in found.values())
    skipped = sum(len(r.skipped) for r in found.values())
    lines = [
        "# The full counts",
        "",
        f"`make test-long`, {suites[-1].get('timestamp', '')[:10]}: {cases} cases, {bad} failed, {skipped} skipped, "
        f"in {len(suites)} part{'s' * (len(suites) > 1)} ({minutes} minutes), {again} of them run again. "
        "Seeds are the tests' own parameters.",
        "",
        "| test | cases | result | seconds | told |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(found.items()):
        result = f"{len(row.bad)} FAILED" if row.bad else f"{len(row.skipped)} skipped" if row.skipped else "passed"
        told = ", ".join(f"{k} {v}" for k, v in sorted(row.told.items()))
        lines.append(f"| `{name}` | {row.cases} | {result} | {row.seconds:.0f} | {told} |")
    for name, row in sorted(found.items()):
        lines += [f"\n{name}\n\n* " + "\n* ".join(row.bad + sorted(set(row.skipped)))] if row.bad or row.skipped else []
    return "\n".join(lines)


if __name__ == "__main__":
    print(page([suite_of(Path(report)) for report in sys.argv[1:]]))
