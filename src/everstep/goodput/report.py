"""From a run folder to its ledger, and from there to a page."""

from pathlib import Path

from everstep.goodput.core.accounting import Ledger, account
from everstep.goodput.core.figures import median_step_s
from everstep.goodput.log import Log, read_run


def load(folder: Path, *, twin: Path | None = None) -> tuple[Ledger, Log]:
    """Read a run folder and account for it. Raises UsageError or LedgerError where that cannot be done."""
    log = read_run(folder)
    step_s: float | None = None
    if twin is not None:
        other = account(read_run(twin).records)
        step_s = median_step_s(other.story, other.lanes)
    ledger = account(log.records, twin_step_s=step_s, unread=len(log.unread))
    if log.torn:
        ledger.notes.append(f"{log.torn} of {log.files} files end in a torn line, as a killed process leaves it")
    ledger.notes.extend(log.unread[:5])
    return ledger, log


def write_page(folder: Path, target: Path, *, twin: Path | None = None) -> Ledger:
    """Write the HTML page of a run and return its ledger; `everstep run` does it at its end."""
    ledger, _ = load(folder, twin=twin)
    draw(ledger, folder.resolve().name, target)
    return ledger


def draw(ledger: Ledger, name: str, target: Path) -> None:
    """Write a ledger's page; a reader sees the old one or the new one."""
    from everstep.goodput.page import render  # noqa: PLC0415 - Jinja2 is loaded for pages alone, not by the agent

    partial = target.with_name(target.name + ".part")
    partial.write_text(render(ledger, name), encoding="utf-8")
    partial.replace(target)
