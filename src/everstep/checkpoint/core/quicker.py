"""Which of two ways to do one thing is the quicker one, learned from what each took."""

import statistics

FIRST, SECOND = 0, 1
KEPT = 3  # times of each way: the median of three is not moved by one that was disturbed
AGAIN = 100  # turns after which the slower way is tried once more: what else the machine does may have changed


class Quicker:
    """Each way is tried `KEPT` times in turn, then the one of the lower median is taken. One thread."""

    def __init__(self) -> None:
        self._took: tuple[list[float], list[float]] = [], []
        self._turns = 0  # since the way that is not taken was tried

    def choose(self) -> int:
        """Return the way to go now: FIRST or SECOND."""
        first, second = self._took
        if len(first) < KEPT or len(second) < KEPT:
            return FIRST if len(first) <= len(second) else SECOND
        better = FIRST if statistics.median(first) <= statistics.median(second) else SECOND
        return 1 - better if self._turns >= AGAIN else better

    def took(self, way: int, seconds: float) -> None:
        """Learn what one turn of a way took; any unit, as long as it is always the same."""
        first, second = self._took
        known = len(first) >= KEPT and len(second) >= KEPT
        self._turns = self._turns + 1 if known and self._turns < AGAIN else 0
        self._took[way].append(seconds)
        del self._took[way][:-KEPT]
