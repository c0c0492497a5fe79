"""What a finding is, and how findings are told to people and scripts."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # a job runs; something is slower, weaker or untried
    PROBLEM = "problem"  # a job would be refused, or fail


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `expected` and `mend` are empty where it is ok."""

    level: Level
    what: str
    seen: str
    expected: str = ""
    mend: str = ""

    def row(self) -> dict[str, str]:
        """As `--json` has it."""
        return {
            "level": self.level.value,
            "what": self.what,
            "seen": self.seen,
            "expected": self.expected,
            "mend": self.mend,
        }


def ok(what: str, seen: str) -> Finding:
    """Nothing to mend."""
    return Finding(Level.OK, what, seen)


def warning(what: str, seen: str, expected: str, mend: str) -> Finding:
    """A job runs, with less."""
    return Finding(Level.WARNING, what, seen, expected, mend)


def problem(what: str, seen: str, expected: str, mend: str) -> Finding:
    """A job would not run."""
    return Finding(Level.PROBLEM, what, seen, expected, mend)


def count(findings: Iterable[Finding], level: Level) -> int:
    """Return how many are of `level`."""
    return sum(1 for one in findings if one.level is level)


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return them for people: a line each, and what to do below where there is something to do."""
    width = max((len(one.what) for one in findings), default=0)
    told: list[str] = []
    for one in findings:
        told.append(f"{one.level.value:8} {one.what:{width}}  {one.seen}")
        if one.expected:
            told.append(f"{'':8} {'':{width}}  expected: {one.expected}")
        if one.mend:
            told.append(f"{'':8} {'':{width}}  mend: {one.mend}")
    return told


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line: what it comes to."""
    problems, warnings = count(findings, Level.PROBLEM), count(findings, Level.WARNING)
    return f"{_many(problems, 'problem')}, {_many(warnings, 'warning')} in {_many(len(findings), 'finding')}"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
