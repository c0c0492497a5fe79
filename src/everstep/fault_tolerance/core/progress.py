"""Whether restarts still lead anywhere, by the iteration that the script notes in a file. Pure.

Rule 1: a cycle has made progress when the file's iteration is at least `least` above what it was at the cycle's start.
Rule 2: a file that is not there, or cannot be read, says nothing: the cycle is not counted.
Rule 3: `most` cycles in a row without progress end the job; 0 or less: never.

The same rules as NVRx's progress tracker (HEAD, `fault_tolerance/progress_tracker.py`).
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Track:
    """What is known after some cycles."""

    least: int = 1
    most: int = 3
    iteration: int | None = None  # at the start of the present cycle
    idle: int = 0  # cycles without progress, in a row


def begun(track: Track, iteration: int | None) -> Track:
    """The job begins at this iteration; None: nobody knows."""
    return replace(track, iteration=iteration)


def ended(track: Track, iteration: int | None) -> tuple[Track, str | None]:
    """A cycle has ended at this iteration; return what is known now, and why the job is to end, or None."""
    if iteration is None or track.most <= 0:
        return track, None
    gained = iteration - (track.iteration or 0)
    idle = 0 if gained >= track.least else track.idle + 1
    known = replace(track, iteration=iteration, idle=idle)
    if idle < track.most:
        return known, None
    times = "start" if idle == 1 else f"{idle} starts in a row"
    return known, (
        f"{times} made no progress: iteration {iteration} is what the last one began with, {track.least} more are "
        "expected. It is not to be started again as it is: look at the first fault, and at what each start does."
    )
