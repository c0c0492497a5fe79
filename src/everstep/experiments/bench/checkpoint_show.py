"""The checkpoint benchmark's result as tables and as a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from everstep.experiments.core.checkpoints import LABELS

COLUMNS = (
    "every", "write / interval", "way to save", "efficiency", "blocked (in save)", "achieved interval",
    "newest durable, at most", "its budget", "write", "copy", "how it ended",
)  # fmt: skip


def print_rows(result: Mapping[str, Any], out: Console) -> None:
    """Print what each way cost at each interval, and what it was had for."""
    plan, disk = result["plan"], result["disk"]
    for name, pairs in result["versions"].items():
        out.print(f"{name}: " + ", ".join(f"{one} {version}" for one, version in pairs.items()))
    out.print(
        f"state {plan['state'] / 1e6:g} MB ({plan['device']}){_over(plan.get('ranks', 1))}, "
        f"step {plan['step_s']:g} s ({plan['work']}), "
        f"{disk['path']}: {disk['measured'] / 1e6:.1f} MB/s measured; "
        f"rounds: {plan['rounds']}"
    )
    table = Table(title="Checkpoint efficiency: 1 - time the loop was blocked by checkpoints / wall",
                  title_justify="left", box=None, padding=(0, 1))  # fmt: skip
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in result["rows"]:
        table.add_row(*cells(row))
    out.print(table)
    for row in result["rows"]:
        if row["whole"] is False:
            out.print(f"[red]not whole[/]: {LABELS[row['mode']]}, every {row['interval']}: {row['holds']}")
    for said in result["verdicts"]:
        mark = "[green]kept[/]" if said["budget_kept"] else "[red]missed[/]"
        out.print(f"budget {mark}: {LABELS[said['mode']]}, every {said['interval']}: {said['budget']}")


def _over(ranks: int) -> str:
    return f" over {ranks} ranks, of whom each row is the slowest" if ranks > 1 else ""


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return one line of the table."""
    named = [str(row["interval"])]
    left = f"; {row['left_behind']} left behind" if row["left_behind"] else ""
    if row["efficiency"] is None:
        return [*named, "-", LABELS[row["mode"]], *["-"] * (len(COLUMNS) - 4), row["outcome"] + left]
    blocked = f"{max(0.0, row['blocked_s']):.2f} of {row['wall_s']:.2f} s ({row['in_save_s']:.2f})"
    return [
        *named, f"{row['write_s'] / (row['interval'] * row['step_s']):.2f}", LABELS[row["mode"]], _efficiency(row),
        blocked, _achieved(row), _age(row), f"{row['age_budget_s']:.2f} s", f"{row['write_s']:.2f} s",
        f"{1000 * row['copy_s']:.1f} ms", row["outcome"] + ("" if row["whole"] else ", but not whole") + left,
    ]  # fmt: skip


def _efficiency(row: Mapping[str, Any]) -> str:
    each: Sequence[float] = row["efficiencies"]
    more = f" ({min(each):.1%} to {max(each):.1%})" if len(each) > 1 else ""
    return f"{row['efficiency']:.2%}{more}"


def _achieved(row: Mapping[str, Any]) -> str:
    return "-" if row["achieved"] is None else f"{row['achieved']:.0f} steps"


def _age(row: Mapping[str, Any]) -> str:
    return "none durable" if row["age_s"] is None else f"{row['age_steps']} steps, {row['age_s']:.2f} s"


def draw(figure: Any, result: Mapping[str, Any], title: str) -> None:
    """Draw efficiency, and the age of the newest durable checkpoint, over the interval."""
    rows = [row for row in result["rows"] if row["efficiency"] is not None]
    share, age = figure.subplots(2, 1, sharex=True)
    for number, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        mine = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row["interval"])
        ours = mode.startswith("everstep")
        style = {"color": f"C{number}", "lw": 2.5 if ours else 1.2, "ls": "-" if ours else "--", "marker": "o",
                 "label": LABELS[mode]}  # fmt: skip
        share.plot([r["interval"] for r in mine], [100 * r["efficiency"] for r in mine], **style)
        aged = [r for r in mine if r["age_s"] is not None]
        age.plot([r["interval"] for r in aged], [r["age_s"] for r in aged], **style)
    ours = [r for r in rows if r["mode"] == "everstep"] or rows
    age.plot(*_line([(r["interval"], r["age_budget_s"]) for r in ours]), color="k", ls=":", label="2 writes + interval")
    for axes in (share, age):
        axes.set_xscale("log")
        for row in ours[:1]:
            axes.axvline(row["write_s"] / row["step_s"], color="0.7", lw=1)
    share.annotate(" interval = write time", (ours[0]["write_s"] / ours[0]["step_s"], 3), color="0.4") if ours else None
    share.set_ylim(0, 102)
    share.set_ylabel("checkpoint efficiency, %")
    share.set_title(title)
    age.set_yscale("log")
    age.set_ylabel("newest durable checkpoint: greatest age, s")
    age.set_xlabel("interval asked for, steps")
    age.legend(fontsize=8)


def _line(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    ordered = sorted(points)
    return [x for x, _ in ordered], [y for _, y in ordered]
