"""What a job's holder found in the checkpoint directory at the start, as it is told to the agent.

The agent itself never touches the storage: it could wait for ever there. JSON with a version between the two.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1


@dataclass(frozen=True, slots=True)
class Known:
    """A checkpoint of the directory. `world_size` is None where no manifest can be trusted."""

    step: int
    complete: bool
    world_size: int | None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    changed_s: float = 0.0  # wall time of its last change
    unread: bool = False  # nothing is known to be wrong with it, and not all of it could be read


@dataclass(frozen=True, slots=True)
class Hurt:
    """Why a checkpoint is not whole."""

    step: int
    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Findings:
    """All of it. `wounds` are of those that are newer than the newest that was read in full and found whole."""

    told: tuple[str, ...]  # sentences for the operator, warnings with that word before them
    found: tuple[Known, ...]  # newest first
    wounds: tuple[Hurt, ...]
    series: str = ""  # the name of the training that these are of, where it was asked for
    unread: tuple[Hurt, ...] = ()  # of the newest that is not damaged, where it could not be read

    def to_json(self) -> bytes:
        """Return what `from_json` reads."""
        return json.dumps({"v": VERSION, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Findings":
        """Read what `to_json` wrote; ValueError for another version."""
        body: Mapping[str, Any] = json.loads(text)
        if body["v"] != VERSION:
            raise ValueError(f"findings of version {body['v']}, not {VERSION}")
        return cls(
            told=tuple(body["told"]),
            found=tuple(Known(**one) for one in body["found"]),
            wounds=tuple(Hurt(**one) for one in body["wounds"]),
            series=body["series"],
            unread=tuple(Hurt(**one) for one in body["unread"]),
        )
