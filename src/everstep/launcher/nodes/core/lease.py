"""For how long an agent may go on without a word from the others: a lease that only an acknowledgement renews.

Rule 1: a lease runs from the moment at which the sign of life was sent that has been acknowledged, never from the
        moment at which the answer came. The hub has heard that sign no earlier than it was sent, so it waits for
        longer, on whichever way words are lost (EXPERIMENTS P6). Each side looks at its own monotonic clock alone.
Rule 2: whoever is without a lease has no living worker by `GIVEN_AWAY_S`, when the hub gives its ranks away.
Rule 3: a lease that ran out while we ourselves did not run (the job was stopped, the machine slept or was moved) may
        have been of others that did not run either: the workers are stopped, and wait for an answer (`ON_HOLD`). While
        they are stopped nothing is written, however long it takes.
"""

import enum
from dataclasses import dataclass

BEAT_S = 1.0
SUSPECTED_S = 3.0
LEASE_S = 6.0
"""An agent's own: then it ends its workers."""
GIVEN_AWAY_S = 10.0
"""The hub's: then a silent node is gone, and its ranks are others'."""
JUMP_S = 2.0
"""A longer gap between two looks of our own: we did not run."""
HOLD_S = 10.0


class Standing(enum.Enum):
    """What an agent may do."""

    GOOD = "good"
    ON_HOLD = "on hold"  # workers stand still until it is known
    CUT_OFF = "cut off"


@dataclass
class Lease:
    """An agent's side. `looked_s`: when `look` was called last."""

    sent_s: float
    looked_s: float
    held_s: float | None = None

    def acknowledged(self, sent_s: float) -> None:
        """The hub has heard what we sent at `sent_s`."""
        self.sent_s = max(self.sent_s, sent_s)

    def look(self, now: float) -> Standing:
        """To be called about five times a second, after what has come was read."""
        gap, self.looked_s = now - self.looked_s, now
        if now - self.sent_s <= LEASE_S:
            self.held_s = None
            return Standing.GOOD
        if self.held_s is None and gap > JUMP_S:
            self.held_s = now
        if self.held_s is not None and now - self.held_s <= HOLD_S:
            return Standing.ON_HOLD
        return Standing.CUT_OFF


@dataclass
class Silence:
    """The hub's side: who has been silent for how long. Time in which the hub did not run is nobody's silence."""

    heard_s: dict[int, float]
    suspected: set[int]
    looked_s: float | None = None

    @classmethod
    def of_nobody(cls) -> "Silence":
        """Nobody is here yet."""
        return cls({}, set())

    def heard(self, who: int, now: float) -> bool:
        """Any sign of life; True where it was suspected."""
        self.heard_s[who] = now
        known, self.suspected = who in self.suspected, self.suspected - {who}
        return known

    def forget(self, who: int) -> None:
        """It is gone."""
        self.heard_s.pop(who, None)
        self.suspected.discard(who)

    def look(self, now: float) -> tuple[list[int], list[int]]:
        """Return who is suspected from now on, and whose ranks may be given away."""
        before, self.looked_s = self.looked_s, now
        if before is None or now - before > JUMP_S:
            self.heard_s = dict.fromkeys(self.heard_s, now)
        silent = {who: now - heard for who, heard in self.heard_s.items()}
        new = [who for who, silent_s in silent.items() if silent_s > SUSPECTED_S and who not in self.suspected]
        self.suspected |= set(new)
        return new, [who for who, silent_s in silent.items() if silent_s > GIVEN_AWAY_S]
