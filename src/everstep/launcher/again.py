"""A run folder that is used again: by the same job, or not at all.

Rule 1: a run folder holds one job: another script, or another world size, is refused before a word is written.
Rule 2: a job may be taken up with other arguments (more steps), from a moved copy of its script, and after an edit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from everstep.errors import LedgerError, UsageError
from everstep.events import Record, RunStarted, Stamp
from everstep.launcher.config import LaunchConfig


@dataclass(frozen=True, slots=True)
class Job:
    """What tells one job from another."""

    script: str  # absolute path; a module's or a program's name
    arguments: tuple[str, ...]
    world_size: int

    @classmethod
    def of(cls, config: LaunchConfig) -> Self:
        """Return what the command line asks for."""
        script = config.script if config.module or config.no_python else str(Path(config.script).resolve())
        return cls(script, config.arguments, config.most_ranks)

    def check(self, run_dir: Path) -> list[str]:
        """Compare with the last job in `run_dir`; return what an operator should know. UsageError for another job."""
        last = last_started(run_dir)
        if last is None:
            return []
        if last.world_size != self.world_size:
            raise _refusal(run_dir, f"{last.world_size} ranks", f"{self.world_size}")
        if last.script and not _same(last.script, self.script):
            raise _refusal(run_dir, last.script, self.script)
        if last.script and last.arguments != self.arguments:
            before, now = (" ".join(words) or "none" for words in (last.arguments, self.arguments))
            return [f"the run folder's job goes on with other arguments: {now} (before: {before})"]
        return []


def last_started(run_dir: Path) -> RunStarted | None:
    """Return the newest RunStarted in a run folder; None where there is none that can be read.

    Within one boot monotonic time decides, for the time of day may have been set back since; between boots, the time
    of day of each boot's last.
    """
    last: dict[str, tuple[Stamp, RunStarted]] = {}
    for path in (run_dir / "events").glob("agent-*.jsonl"):
        with path.open(errors="replace") as lines:
            found = [one for line in lines if '"RunStarted"' in line and (one := _read(line)) is not None]
        for stamp, event in found:
            known = last.get(stamp.boot_id)
            if known is None or (stamp.mono_s, stamp.wall_s) > (known[0].mono_s, known[0].wall_s):
                last[stamp.boot_id] = stamp, event
    return max(last.values(), key=lambda one: one[0].wall_s)[1] if last else None


def _read(line: str) -> tuple[Stamp, RunStarted] | None:
    try:
        record = Record.from_json(line)
    except LedgerError:  # torn, or another version's: the report tells of it
        return None
    return (record.stamp, record.event) if isinstance(record.event, RunStarted) else None


def _same(before: str, now: str) -> bool:
    """The same path, or a copy of that name elsewhere; where the old one is gone its name must do."""
    if before == now:
        return True
    if Path(before).name != Path(now).name:
        return False
    try:
        return Path(before).read_bytes() == Path(now).read_bytes()
    except OSError:
        return not Path(before).exists()


def _refusal(run_dir: Path, before: str, now: str) -> UsageError:
    return UsageError(
        f"the run folder {run_dir} holds a job of {before}, this one is of {now}: their records would be told as one. "
        "Name another with --run-dir, or leave it out for a new one."
    )
