"""Which save of its world a call of `save` is: ranks that make the same calls give them the same numbers.

A call that is due counts on every rank, also on one where it raised before anything was taken: what an earlier save
came to is heard by each rank in its own time, and a caller may go on without calling again.
"""


class Numbering:
    """Numbers from 1. One thread."""

    def __init__(self) -> None:
        self.last = 0
        """The number that was given last."""
        self._passed: int | None = None  # the step of a call that has its number, and has taken nothing

    def give(self, step: int) -> int:
        """Return the number of the save of `step`: its own, where an earlier call for that step took nothing."""
        if self._passed != step:
            self.last += 1
        self._passed = None
        return self.last

    def pass_over(self, step: int) -> None:
        """The call for `step` took nothing: it has its number all the same, and keeps it if it is made again."""
        self.give(step)
        self._passed = step

    def rewound(self) -> None:
        """Steps begin anew after a restore: a step that comes again is another save."""
        self._passed = None
