"""Results as tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from everstep.experiments.bench import checkpoint_show
from everstep.experiments.core.figures import PARTS, name_of
from everstep.experiments.core.weaknesses import page

WIDTH = 180  # where nobody's terminal says otherwise
_OUTSIDE = {"back_s": "back in the function", "group_s": "group made", "step_s": "first step"}
_WORDS = {part: part.removesuffix("_s").replace("_", " ") for part in PARTS}
_PARTS = ("told", "arrived", "collected", "decided", "published", "read")


def print_result(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a result for a person."""
    out = console or Console(highlight=False)
    if not out.is_terminal:
        out.width = WIDTH
    found = result["machine"]
    out.print(
        f"{found['cores']} cores, load {found['load']:.1f} before and {found['load_at_end']:.1f} after, "
        f"{found['when']}, {found['system']}"
    )
    PRINTERS[result["bench"]](result, out)


def inprocess(result: Mapping[str, Any], out: Console) -> None:
    """Print what each fault cost, where the time went, and how that compares."""
    for module, pairs in result["versions"].items():
        out.print(f"{module}: " + ", ".join(f"{name} {version}" for name, version in pairs.items()))
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    table = _table("From the fault to the first new step on all ranks, seconds: median (least to most)",
                   "fault", "ranks", "implementation", "over", "seconds", "world after", "how runs ended")  # fmt: skip
    for row in rows:
        table.add_row(
            row["fault"], str(row["ranks"]), name_of(row), f"{row['recovered']} of {row['faults']}",
            span(row["recovery_s"]), _world(row), _endings(row),
        )  # fmt: skip
    out.print(table)
    table = _table("Where it went, medians in seconds", "fault", "ranks", "implementation", "seen from outside",
                   "our ledger")  # fmt: skip
    for row in rows:
        outside = row["outside_s"] or {}
        seen = ", ".join(f"{_OUTSIDE[name]} {seconds:.3f}" for name, seconds in outside.items())
        known = row["parts_s"] or {}
        ours = ", ".join(f"{_WORDS[part]} {known[part]:.3f}" for part in PARTS if part in known)
        table.add_row(row["fault"], str(row["ranks"]), name_of(row), seen or "-", ours or "-")
    out.print(table)
    _verdicts(result["verdicts"], out)


def injob(result: Mapping[str, Any], out: Console) -> None:
    """Print what restarts, starts, ends and a rest cost under each launcher."""
    if result["restarts"]:
        seen = ("first new step", "noticed", "first line", "from there to the step", "how runs ended")
        table = _table("From the fault, seconds: median (least to most)", "fault", "ranks", "launcher", "over", *seen)
        for row in result["restarts"]:
            spans = [span(row[name]) for name in ("recovery_s", "noticed_s", "began_s", "own_s")]
            over = f"{row['recovered']} of {row['faults']}"
            table.add_row(row["fault"], str(row["ranks"]), row["way"], over, *spans, _endings(row))
        out.print(table)
    if result["launches"]:
        ends = ("command to the last rank's first line", "to its first step", "last line of all to the end")
        table = _table("A job without a fault, seconds", "ranks", "launcher", *ends)
        for row in result["launches"]:
            table.add_row(str(row["ranks"]), row["way"], *(span(row[n]) for n in ("began_s", "step_s", "end_s")))
        out.print(table)
    if result["idle"]:
        table = _table("At rest, beside two ranks that sleep", "launcher", "of a core", "memory (PSS)", "of it")
        for row in result["idle"]:
            of_it = ", ".join(f"{p['name']} {p['cpu_share']:.2%} {p['pss_mib']} MiB" for p in row["processes"])
            table.add_row(row["way"], f"{row['cpu_share']:.2%}", f"{row['pss_mib']} MiB", of_it)
        out.print(table)
    _verdicts(result["verdicts"], out)


def span(values: Sequence[float] | None) -> str:
    """Write median, least and most."""
    return "-" if not values else f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"


def _world(row: Mapping[str, Any]) -> str:
    if row["least_world"] is None:
        return "-"
    lost = row["bystanders_lost"]
    return f"{row['least_world']} of {row['ranks']}" + (f", {lost} bystander{'s' * (lost > 1)} lost" if lost else "")


def _endings(row: Mapping[str, Any]) -> str:
    told = "; ".join(f"{what} ({count})" if count > 1 else what for what, count in row["outcomes"].items())
    left = row["left_behind"]
    return told + (f"; {left} process{'es' * (left > 1)} left behind" if left else "")


def controlplane(result: Mapping[str, Any], out: Console) -> None:
    """Print the control plane at each size, by part, beside the barrier."""
    table = _table("From the fault's fact to the next roster at every agent, seconds: median (least to most)",
                   "ranks", "nodes", "whole", "of it", "bytes a rank", "NVRx: whole", "of it the barrier")  # fmt: skip
    for row in result["rows"]:
        table.add_row(str(row["ranks"]), str(row["nodes"]), *_ours(row), *_theirs(row))
    out.print(table)
    for name, exponent in result["growth"].items():
        if exponent is not None:
            out.print(f"{name} grows as ranks to the power of {exponent:.2f} (1 is linear)")
    out.print(result["barrier_by"])
    _verdicts(result["verdicts"], out)


def weaknesses(result: Mapping[str, Any], out: Console) -> None:
    """Print the page as it would be written."""
    out.print(page(result), markup=False, soft_wrap=True)


PRINTERS: Mapping[str, Callable[[Mapping[str, Any], Console], None]] = {
    "inprocess": inprocess,
    "injob": injob,
    "controlplane": controlplane,
    "weaknesses": weaknesses,
    "checkpoint": checkpoint_show.print_rows,
}


def _ours(row: Mapping[str, Any]) -> list[str]:
    ours = row["ours"]
    if not ours:
        return ["no end", "-", "-"]
    parts = [f"{name} {ours['parts_s'][name]:.3f}" for name in _PARTS] + [f"an agent's own {ours['agent_s']:.3f}"]
    return [span(ours["whole_s"]), ", ".join(parts), f"{ours['bytes'] / row['ranks']:.0f}"]


def _theirs(row: Mapping[str, Any]) -> list[str]:
    theirs = row.get("barrier", ...)
    if not theirs or theirs is ...:
        return ["-" if theirs is ... else "no end", "-"]
    return [span(theirs["whole_s"]), f"{theirs['parts_s']['barrier']:.3f}"]


def _verdicts(verdicts: Sequence[Mapping[str, Any]], out: Console) -> None:
    for said in verdicts:
        mark = {True: "[green]kept[/]", False: "[red]missed[/]", None: "-"}[said["budget_kept"]]
        times = said.get("times_faster")
        faster = f"; {times:.1f} times faster than NVRx" if times else ""
        what = (
            f"{name_of(said)}, {said['fault']}, " if "impl" in said else f"{said['what']}, " if "what" in said else ""
        )
        out.print(f"budget {mark}: {what}{said['ranks']} ranks: {said['budget']}{faster}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
