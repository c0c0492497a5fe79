"""Why an iteration was interrupted, and by whom: NVRx's records."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Interruption(enum.Enum):
    """What happened."""

    EXCEPTION = enum.auto()
    BASE_EXCEPTION = enum.auto()
    SOFT_TIMEOUT = enum.auto()
    HARD_TIMEOUT = enum.auto()
    TERMINATED = enum.auto()
    UNRESPONSIVE = enum.auto()
    MONITOR_PROCESS_EXCEPTION = enum.auto()


@dataclass(frozen=True)
class InterruptionRecord:
    """One rank, and what happened to it. `str` writes it down, `from_str` reads it back."""

    rank: int
    interruption: Interruption

    def __str__(self) -> str:
        return f"{self.interruption.name}:{self.rank}"

    @classmethod
    def from_str(cls, string: str) -> "InterruptionRecord":
        """Read what `str` prints; ValueError for anything else."""
        name, colon, rank = string.partition(":")
        if not colon or name not in Interruption.__members__ or not rank.strip().isdigit():
            raise ValueError(f"{string!r} is not an interruption record; one reads EXCEPTION:3")
        return cls(int(rank), Interruption[name])


def format_interruption_records(records: Iterable[InterruptionRecord]) -> str:
    """Return records as one line, grouped by what happened."""
    groups: dict[Interruption, list[int]] = {}
    for record in records:
        groups.setdefault(record.interruption, []).append(record.rank)
    return ", ".join(f"{kind.name} on ranks {sorted(set(ranks))}" for kind, ranks in groups.items())
