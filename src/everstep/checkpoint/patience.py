"""How long the end of a job waits for storage: as long as it takes something, and a grace time beyond.

A slow disk is waited for, however slow; one that has taken nothing for the grace time is not, and the exit status says
so (EXPERIMENTS C10). What shows that it takes something are the writers' messages: they send signs within a write.
"""

GRACE_S = 15.0
SIGNS = 4
"""Signs of life of a write within the grace time: one or two that are late on a busy machine are not missed."""


class Patience:
    """Of one tier. Times are the agent's monotonic clock."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._moved_s = 0.0
        self._ending = False
        self.gave_up = False

    @property
    def sign_s(self) -> float:
        """How often a writer is to show a sign."""
        return self.grace_s / SIGNS

    def moved(self, now: float) -> None:
        """The storage has taken something, or has just been asked to."""
        self._moved_s = now

    def silent_s(self, now: float) -> float:
        """For how long it has taken nothing."""
        return now - self._moved_s

    @property
    def ending(self) -> bool:
        """True while the end waits."""
        return self._ending

    def begin_again(self) -> None:
        """The end was put off: a generation begins."""
        self._ending = self.gave_up = False

    def left_s(self, now: float) -> float:
        """How long the end waits yet, unless the storage moves; 0 when it has waited enough."""
        if not self._ending:
            self._ending = True
            self._moved_s = now
        left = max(0.0, self.grace_s - self.silent_s(now))
        self.gave_up = left <= 0.0
        return left

    def told(self, what: str, directory: str) -> str:
        """Say why it is not waited for any longer."""
        return (
            f"{what}: the storage of {directory} has taken nothing for {self.grace_s:g} s at the job's end; it is "
            "stuck, or slower than that: --grace is how long it is waited for"
        )
