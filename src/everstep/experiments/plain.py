"""The plain loop behind a resilient script: the README's diff, taken back.

There is no second copy of the script that could drift: what a stranger reads in the README is what is run under plain
torchrun, both to compare step rates and to show that resilience changes no bit of the training.
"""

from dataclasses import dataclass

from everstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Hunk:
    """One place of a diff: the same lines without and with what was added."""

    before: tuple[str, ...]
    after: tuple[str, ...]


def hunks(diff: str) -> tuple[Hunk, ...]:
    """Read a unified diff; where its line numbers are left out (`@@` alone), nothing is lost to us."""
    found: list[tuple[list[str], list[str]]] = []
    for line in diff.splitlines():
        if line.startswith(("---", "+++")):
            continue
        if line.startswith("@@"):
            found.append(([], []))
            continue
        if not found or line[:1] not in ("+", "-", " ", ""):
            raise UsageError(f"{line!r} is no line of a diff; expected +, - or a space before it, and @@ above it.")
        before, after = found[-1]
        if not line.startswith("+"):
            before.append(line[1:])
        if not line.startswith("-"):
            after.append(line[1:])
    return tuple(Hunk(tuple(before), tuple(after)) for before, after in found)


def added(diff: str) -> list[str]:
    """Return the lines, blank ones left out, that a diff adds."""
    return [line[1:] for line in diff.splitlines() if line.startswith("+") and line[:3] != "+++" and line[1:].strip()]


def plain(source: str, diff: str) -> str:
    """Return `source` without what `diff` adds. Raises UsageError where the diff does not fit it exactly once."""
    lines = source.splitlines()
    for hunk in hunks(diff):
        size = len(hunk.after)
        places = [at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == hunk.after]
        if len(places) != 1:
            shown = "\n".join(hunk.after)
            raise UsageError(f"the diff does not fit the script: found {len(places)} times instead of once:\n{shown}")
        lines[places[0] : places[0] + size] = hunk.before
    return "\n".join(lines) + "\n"
