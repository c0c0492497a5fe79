"""What a caller may ask of a world without an agent; rank 0's count for all."""

from dataclasses import asdict, dataclass
from typing import Any

from everstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds are floats. The same on every rank; where they differ, rank 0's count."""

    max_restarts: int | None = None  # None: a fault after progress is free
    same_step_limit: int = 3  # faults alike without progress that end the job
    patience: int = 10  # faults of any kind without progress that end it
    min_world_size: int | None = None  # survivors of a death go on while they are so many; None: the job ends
    soft_s: float | None = None  # silence inside steps; None: learned
    hard_s: float | None = 90.0  # an interpreter that does not run is ended; None: never
    first_s: float | None = None  # set-up and first step; None: learned
    automatic: bool = False  # `soft_s` is about an interpreter that does not run, as NVRx's is, until `ping` was called
    stop_deadline_s: float = 10.0  # to leave the function
    start_deadline_s: float = 300.0  # for all ranks to come

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, value in asdict(self).items():
            if value is not None and name != "automatic" and value < (0 if name == "max_restarts" else 1e-3):
                raise UsageError(
                    f"Settings({name}={value!r}): give a number above 0, or None where that is the default"
                )

    def to_json(self) -> dict[str, Any]:
        """As the hub is told."""
        return asdict(self)
