"""One frame of `everstep top`, from what agents have told now and a moment ago: pure.

Rule 1: what is worth a look comes first, and what does not fit is counted, not dropped without a word.
Rule 2: a rate needs two looks; in the first there is none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.operator.core.rows import ago, plain, seconds, size, state
from everstep.ranks import brief

Found = Mapping[str, Any]
Row = tuple[str, ...]
RANK_COLUMNS = ("rank", "node", "state", "cpu", "memory", "step", "last mark", "phase")
NODE_COLUMNS = ("node", "host", "phase", "generation", "step", "ranks", "restarts")
TIER_COLUMNS = ("tier", "step", "", "bytes", "took", "")
MOST_FAULTS, MOST_NOTICES = 5, 3
_ENDS = ("kept", "committed", "failed", "damaged", "taken", "planned")


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown. Each row has as many words as its columns."""

    pace: str  # steps a second, and how long one takes
    nodes: tuple[Row, ...]  # none where there is one
    ranks: tuple[Row, ...]
    more: int  # ranks that are not shown
    others: str  # the processes beside them
    tiers: tuple[Row, ...]
    faults: tuple[str, ...]
    notices: tuple[str, ...]


def frame(now: Found, before: Found | None, passed_s: float, most_ranks: int) -> Frame:
    """Return what to show of `now`; `before` is what was told `passed_s` seconds ago."""
    ranks = _ranks(now)
    earlier = {(node, p["pid"]): p for node, p in _processes(before)} if before is not None else {}
    ordered = sorted(ranks, key=_worth)
    shown = sorted(ordered[:most_ranks], key=lambda each: int(each[1]["rank"]))
    return Frame(
        pace=_pace(now, before, passed_s),
        nodes=tuple(_nodes(now)),
        ranks=tuple(_rank(node, p, earlier.get((node, p["pid"])), passed_s) for node, p in shown),
        more=len(ordered) - len(shown),
        others=_others(now),
        tiers=tuple(_tiers(now)),
        faults=tuple(_faults(now)),
        notices=tuple(_notices(now)),
    )


def _nodes(told: Found) -> Iterable[Row]:
    if len(told["nodes"]) + len(told["silent"]) < 2:  # noqa: PLR2004 - one node is what all the rest is about
        return
    for node in told["nodes"]:
        ranks = brief(p["rank"] for p in node["processes"] if p["rank"] is not None)
        generation, step = ("" if node[name] is None else str(node[name]) for name in ("generation", "step"))
        yield (
            str(node["node"]), str(node["host"]), str(node["phase"]), generation, step, ranks,
            str(node["restarts"]),
        )  # fmt: skip
    for name in told["silent"]:
        yield str(name), "", "does not answer", "", "", "", ""


def _processes(told: Found | None) -> list[tuple[str, Found]]:
    return [] if told is None else [(str(node["node"]), p) for node in told["nodes"] for p in node["processes"]]


def _ranks(told: Found) -> list[tuple[str, Found]]:
    return [(node, p) for node, p in _processes(told) if p["rank"] is not None]


def _worth(each: tuple[str, Found]) -> tuple[bool, float, int]:
    """Who does not run comes first, then who has been silent for longest."""
    _, process = each
    return process["state"] not in "TtDZX", -(process.get("mark_age_s") or 0.0), int(process["rank"])


def _rank(node: str, process: Found, before: Found | None, passed_s: float) -> Row:
    step = process.get("step")
    return (
        str(process["rank"]), node, state(process["state"]), _share(process, before, passed_s),
        size(process["resident_bytes"]), "" if step is None else str(step), ago(process.get("mark_age_s")),
        plain(process.get("phase") or ""),
    )  # fmt: skip


def _share(process: Found, before: Found | None, passed_s: float) -> str:
    """Return the cores that it has used since."""
    if before is None or passed_s <= 0 or process["cpu_s"] is None or before["cpu_s"] is None:
        return ""
    return f"{max(0.0, 100 * (process['cpu_s'] - before['cpu_s']) / passed_s):.0f} %"


def step_of(told: Found) -> int | None:
    """Return the last step that is done on all ranks; None while one has done none."""
    steps = [node["step"] for node in told["nodes"]]
    return None if not steps or None in steps else min(steps)


def _pace(now: Found, before: Found | None, passed_s: float) -> str:
    typical = [node["typical_step_s"] for node in now["nodes"] if node["typical_step_s"]]
    parts: list[str] = []
    step, earlier = step_of(now), None if before is None else step_of(before)
    if step is not None and earlier is not None and passed_s > 0 and step >= earlier:
        parts.append(f"{(step - earlier) / passed_s:.2f} steps/s")
    if typical:
        parts.append(f"nine of ten steps take {max(typical):.3f} s at most")
    return ", ".join(parts)


def _others(told: Found) -> str:
    """Return how many processes of which kind there are beside the ranks."""
    roles = [str(p["role"]) for _, p in _processes(told) if p["rank"] is None and p["role"] != "agent"]
    kinds = dict.fromkeys(sorted(roles))
    return ", ".join(f"{roles.count(kind)} {kind}{'s' if roles.count(kind) > 1 else ''}" for kind in kinds)


def _tiers(told: Found) -> Iterable[Row]:
    """Of each tier: what it has, and what came to no good end since."""
    newest: dict[tuple[str, str], Found] = {}
    for node in told["nodes"]:
        for row in node["tiers"]:
            key = str(row["tier"]), str(row["what"])
            if key not in newest or (row["step"], -_age(row)) > (newest[key]["step"], -_age(newest[key])):
                newest[key] = row
    for (tier, what), row in sorted(newest.items(), key=lambda each: (each[0][0], _end(each[0][1]))):
        if what in _ENDS and not (what in ("planned", "taken") and row["step"] <= _good(newest, tier)):
            took = seconds(row["seconds"]) if row.get("seconds") else ""
            told_of = f"{what} {ago(row.get('age_s'))}".strip()
            yield tier, str(row["step"]), told_of, size(row["bytes"]), took, plain(row.get("text") or "")[:80]


def _end(what: str) -> int:
    return _ENDS.index(what) if what in _ENDS else len(_ENDS)


def _age(row: Found) -> float:
    return float(row.get("age_s") or 0.0)


def _good(newest: Mapping[tuple[str, str], Found], tier: str) -> int:
    return max(
        (int(newest[tier, what]["step"]) for what in ("kept", "committed") if (tier, what) in newest), default=-1
    )


def _faults(told: Found) -> Iterable[str]:
    """The last ones; each agent has its own record of one, and the first tells it."""
    seen: dict[tuple[Any, ...], Found] = {}
    for node in told["nodes"]:
        for fault in node["faults"]:
            seen.setdefault((fault["generation"], fault["kind"], fault["rank"]), fault)
    for fault in _last(seen.values(), MOST_FAULTS):
        who = "" if fault["rank"] is None else f" of rank {fault['rank']}"
        at = "" if fault["step"] is None else f" after step {fault['step']}"
        first, _, _ = str(fault["text"]).partition("\n")
        yield plain(f"{ago(fault['age_s'])}: {fault['kind']}{who}{at}, noticed by {fault['noticed_by']}: {first}")


def _notices(told: Found) -> Iterable[str]:
    found = {str(n["text"]): n for node in told["nodes"] for n in node["notices"] if n["level"] != "info"}
    for notice in _last(found.values(), MOST_NOTICES):
        yield plain(f"{ago(notice['age_s'])}: {notice['text']}")


def _last(found: Iterable[Found], most: int) -> Sequence[Found]:
    """Return the newest, the newest last."""
    return sorted(found, key=_age, reverse=True)[-most:]
