"""Ranks that stand at the same place are one group; whoever the others wait for comes first: pure.

Rule 1: what is said of a group is what was seen: it does not answer, it waits for others, others wait for it. That a
        job hangs is nowhere said: at any moment of a healthy job some ranks wait for others.
Rule 2: a stack is the same where file, line and function of all frames are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.operator.core.rows import plain
from everstep.ranks import brief

Found = Mapping[str, Any]
Frame = tuple[str, int, str]
_WAITING_PHASES = ("waiting", "done")


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks with one stack, and what is known of why they stand there."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    step: int | None  # the least of theirs
    quiet_s: float | None  # since the last sign of progress of any of them
    waits: bool
    why: str  # that it was not its own answer, or none
    frames: tuple[Frame, ...]  # the innermost last

    def to_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        names = ("file", "line", "function")
        frames = [dict(zip(names, frame, strict=True)) for frame in self.frames]
        return {
            "ranks": list(self.ranks), "nodes": list(self.nodes), "step": self.step, "quiet_s": self.quiet_s,
            "waits": self.waits, "why": self.why, "frames": frames,
        }  # fmt: skip


def groups(ranks: Iterable[Found]) -> list[Group]:
    """Return the groups: who does not answer, who does not wait, who is behind, before the others."""
    same: dict[tuple[Any, ...], list[Found]] = {}
    for rank in ranks:
        same.setdefault((_frames(rank), _waits(rank), _kind(rank)), []).append(rank)
    found = [_group(members) for members in same.values()]
    return sorted(found, key=_place)


def _place(group: Group) -> tuple[bool, bool, float, int, int]:
    step = float("inf") if group.step is None else group.step
    return not group.why.startswith("does not answer"), group.waits, step, len(group.ranks), group.ranks[0]


def _group(members: Sequence[Found]) -> Group:
    first = members[0]
    steps = [rank["step"] for rank in members if rank["step"] is not None]
    quiet = [rank["mark_age_s"] for rank in members if rank["mark_age_s"] is not None]
    return Group(
        ranks=tuple(sorted(rank["rank"] for rank in members)),
        nodes=tuple(sorted({str(rank["node"]) for rank in members})),
        step=min(steps, default=None),
        quiet_s=min(quiet, default=None),
        waits=_waits(first),
        why="; ".join(sorted({str(rank["why"]) for rank in members if rank["why"]})),
        frames=_frames(first),
    )


def _kind(rank: Found) -> str:
    """What of `why` tells groups apart: the place in the kernel may differ from rank to rank."""
    return str(rank["why"]).partition("(")[0]


def _waits(rank: Found) -> bool:
    return bool(rank["waiting"]) or rank["phase"] in _WAITING_PHASES


def _frames(rank: Found) -> tuple[Frame, ...]:
    """Return the stack of the thread that trains."""
    first = next((thread for thread in rank["threads"] if thread["first"]), None)
    return () if first is None else tuple((str(f), int(n), str(name)) for f, n, name in first["frames"])


def title(group: Group, found: Sequence[Group]) -> str:
    """Say who they are and what they do."""
    who = f"{'rank' if len(group.ranks) == 1 else 'ranks'} {brief(group.ranks)}"
    where = f" ({', '.join(group.nodes)})" if len({node for each in found for node in each.nodes}) > 1 else ""
    others = any(other.waits for other in found if other is not group)
    one = len(group.ranks) == 1
    if group.why:
        does = group.why
    elif group.waits:
        does = "waits for others" if one else "wait for others"
    elif others:
        does = "does not wait; others wait for it" if one else "do not wait; others wait for them"
    else:
        does = "runs" if one else "run"
    return f"{who}{where}: {does}"


def place(file: str, line: int, function: str) -> str:
    """Return a frame as it is printed."""
    return f"    {plain(file)}:{line} in {plain(function)}"


def lines(group: Group, found: Sequence[Group]) -> list[str]:
    """Return what is printed of a group."""
    facts = [
        "" if group.step is None else f"step {group.step} done",
        "" if group.quiet_s is None else f"last mark {group.quiet_s:.1f} s ago",
    ]
    told = ", ".join(fact for fact in facts if fact)
    frames = [place(*frame) for frame in group.frames]
    return [title(group, found), *([f"  {told}"] if told else []), *(frames or ["    its stack is not known"])]
