"""What an operator asks about that is over when it is asked: the last faults, notices and saves, from the ledger.

Bounded, whatever the job emits: so many of each, and one of each kind of save.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from everstep.events import FaultNoticed, Notice, Record, TierEvent

MOST = 20
MOST_KINDS = 64


class Recent:
    """A telemetry sink. All calls come on the agent's one thread."""

    def __init__(self) -> None:
        self.fault_count: Counter[str] = Counter()
        self.failed_saves: Counter[str] = Counter()
        self._faults: deque[Record] = deque(maxlen=MOST)
        self._notices: deque[Record] = deque(maxlen=MOST)
        self._tiers: dict[tuple[str, str], Record] = {}

    def write(self, record: Record) -> None:
        """See `telemetry.Sink.write`."""
        event = record.event
        if isinstance(event, FaultNoticed):
            self._faults.append(record)
            self.fault_count[event.kind] += 1
        elif isinstance(event, Notice):
            self._notices.append(record)
        elif isinstance(event, TierEvent):
            self._save(event, record)

    def _save(self, event: TierEvent, record: Record) -> None:
        key = event.tier, event.what
        if key in self._tiers or len(self._tiers) < MOST_KINDS:
            self._tiers[key] = record
        if event.what in ("failed", "damaged"):
            self.failed_saves[event.tier] += 1

    def faults(self, now: float) -> list[Mapping[str, Any]]:
        """Return the last faults, the newest last; `age_s` counts from the record."""
        found = [(record, record.event) for record in self._faults]
        return [
            {"generation": event.number, "kind": event.kind, "rank": event.injured_rank, "step": event.step,
             "noticed_by": event.noticed_by, "text": event.text[:500], "age_s": now - record.stamp.mono_s}
            for record, event in found if isinstance(event, FaultNoticed)
        ]  # fmt: skip

    def notices(self, now: float) -> list[Mapping[str, Any]]:
        """Return the last notices, the newest last."""
        found = [(record, record.event) for record in self._notices]
        return [
            {"level": event.level, "text": event.text[:500], "age_s": now - record.stamp.mono_s}
            for record, event in found
            if isinstance(event, Notice)
        ]

    def tiers(self, now: float) -> list[Mapping[str, Any]]:
        """Return of each tier the last save that came to each end."""
        found = [(record, record.event) for _, record in sorted(self._tiers.items())]
        return [
            {"tier": event.tier, "what": event.what, "step": event.step, "bytes": event.bytes,
             "seconds": event.seconds, "text": event.text[:500], "age_s": now - record.stamp.mono_s}
            for record, event in found if isinstance(event, TierEvent)
        ]  # fmt: skip
