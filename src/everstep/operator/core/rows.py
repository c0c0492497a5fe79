"""What `everstep ps` shows, from what agents have told: pure."""

from collections.abc import Mapping, Sequence
from typing import Any

_STATES = {
    "R": "runs", "S": "sleeps", "D": "waits (D)", "T": "stopped", "t": "traced", "Z": "ended", "X": "ended", "I": "idle"
}  # fmt: skip
_ROLES = ("agent", "hub", "zygote", "store", "rank", "spare", "writer")
COLUMNS = ("node", "name", "pid", "state", "cpu", "memory", "step", "last mark", "phase")
Found = Mapping[str, Any]


def rows(told: Found) -> list[tuple[str, ...]]:
    """Return a row for each process, node by node, ranks in their order."""
    return [
        _row(str(node["node"]), process) for node in told["nodes"] for process in sorted(node["processes"], key=_place)
    ]


def _place(process: Found) -> tuple[int, int, str]:
    role = str(process["role"])
    number = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return number, process["rank"] if process["rank"] is not None else -1, str(process["name"])


def _row(node: str, process: Found) -> tuple[str, ...]:
    step = process.get("step")
    return (
        node,
        f"rank {process['rank']}" if process["rank"] is not None else plain(process["name"]),
        str(process["pid"]),
        state(process["state"]),
        seconds(process["cpu_s"]),
        size(process["resident_bytes"]),
        "" if step is None else str(step),
        ago(process.get("mark_age_s")),
        plain(process.get("phase") or ""),
    )


def head(told: Found) -> str:
    """Return the line above: how the job stands."""
    nodes: Sequence[Found] = told["nodes"]
    if not nodes:
        return "no node has answered"
    first = nodes[0]
    steps = [node["step"] for node in nodes]
    step = None if any(each is None for each in steps) else min(steps)
    generation = first["generation"]
    parts = [
        plain(first["script"]),
        str(first["phase"]),
        "" if generation is None else f"generation {generation}",
        f"{first['world_size']} ranks on {len(nodes) + len(told['silent'])} nodes"
        if len(nodes) + len(told["silent"]) > 1
        else f"{first['world_size']} ranks",
        "" if step is None else f"step {step} done on all",
    ]
    return ", ".join(part for part in parts if part)


def silent(told: Found) -> str:
    """Return a sentence about nodes that have not answered; empty where all have."""
    names = ", ".join(told["silent"])
    return f"{names} did not answer in time: stopped, cut off, or very busy" if names else ""


def plain(text: object) -> str:
    """Return what a job has said without what a terminal would act on."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def state(letter: str) -> str:
    """Return what the kernel's letter for a process's state means."""
    return _STATES.get(letter, letter)


def seconds(value: float | None) -> str:
    """Return a length of time, short."""
    if value is None:
        return ""
    if value < 100:  # noqa: PLR2004 - three digits
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"  # noqa: PLR2004 - an hour


def ago(value: float | None) -> str:
    """Return how long ago something was."""
    return "" if value is None else f"{seconds(max(0.0, value))} ago"


def size(value: int | None) -> str:
    """Return bytes in units of 1000, short."""
    if not value:
        return ""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if value >= one:
            return f"{value / one:.1f} {unit}"
    return f"{value // 1000} kB"
