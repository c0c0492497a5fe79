"""Which executions of a step are part of the final state.

A step done in one generation stands exactly if every later generation began from a state that contains it. So each
generation has a floor: the lowest step that any later one was restored to. This is the only rule of rollback here; a
restore to an older state than the last one (EXPERIMENTS, a damaged checkpoint) needs no other.
"""

from collections.abc import Sequence

from everstep.goodput.core.story import Generation


def floors(generations: Sequence[Generation]) -> list[int | None]:
    """Return each generation's floor; None where no later one exists."""
    found: list[int | None] = []
    lowest: int | None = None
    for generation in reversed(generations):
        found.append(lowest)
        lowest = generation.restore_step if lowest is None else min(lowest, generation.restore_step)
    return found[::-1]


def stood(step: int, floor: int | None) -> bool:
    """Whether an execution of `step` stands, given its generation's floor."""
    return floor is None or step <= floor
