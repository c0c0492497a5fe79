"""One door to the environment: the only module that reads or writes `os.environ`.

Rule 1: an explicit argument beats the environment, which beats a default.
Rule 2: a missing RANK beside launcher variables is an error, never rank 0.
Rule 3: what a launcher said is read once, into a frozen object.
"""

import contextlib
import os
from collections.abc import Container, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.errors import ConfigurationError

_RANK_HINTS = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables by which a launcher shows itself; SLURM_PROCID counts when the step has more than one task."""


OF_A_RANK = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    }
)  # fmt: skip
"""Variables that a process has once it is a rank: whoever reads them earlier finds what is not so."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a launcher put this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launched: bool
    """False where no launcher's variable is set: a world of one."""


def snapshot() -> dict[str, str]:
    """Return a copy of the environment."""
    return dict(os.environ)


def get(name: str, default: str | None = None) -> str | None:
    """Return one variable, or `default` where it is unset or empty."""
    return os.environ.get(name) or default


def update(values: Mapping[str, str]) -> None:
    """Set variables of this process (the launcher and the restart protocol must)."""
    os.environ.update(values)


def replace(values: Mapping[str, str]) -> None:
    """Make `values` the whole environment of this process."""
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


@contextlib.contextmanager
def noting(names: Container[str], seen: list[str]) -> Generator[None]:
    """Have those of `names` that are asked for meanwhile, set or not, end up in `seen`. One thread."""
    kind = type(os.environ)
    plain = kind.__getitem__

    def read(self: Any, name: str) -> str:
        if name in names and name not in seen:
            seen.append(name)
        return plain(self, name)

    kind.__getitem__ = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__getitem__ = plain  # type: ignore[method-assign]


def remove(*names: str) -> None:
    """Unset variables of this process; names that are not set are ignored."""
    for name in names:
        os.environ.pop(name, None)


def _seen(environ: Mapping[str, str]) -> list[str]:
    found = [name for name in _RANK_HINTS if environ.get(name)]
    if environ.get("SLURM_PROCID") and int(environ.get("SLURM_NTASKS") or 1) > 1:
        found.append("SLURM_PROCID")
    return found


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None or text == "":
        if default is None:
            raise ConfigurationError(
                f"{name} is not set, but {', '.join(_seen(environ))} is. A launcher started this process without "
                "saying which rank it is. Start it with `everstep run` or torchrun, or export RANK and WORLD_SIZE."
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"{name}={text!r} is not a whole number; a launcher sets it to a rank or a count."
        ) from None


def placement(environ: Mapping[str, str] | None = None) -> Placement:
    """Read rank and world size as a launcher set them.

    Raises ConfigurationError where some launcher variable is set but RANK or WORLD_SIZE is not, and where they
    contradict one another.
    """
    env = os.environ if environ is None else environ
    if not _seen(env):
        return Placement(rank=0, world_size=1, local_rank=0, local_world_size=1, launched=False)
    rank, world = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise ConfigurationError(
            f"RANK={rank} is outside the world of WORLD_SIZE={world}; ranks run from 0 to {world - 1}."
        )
    local = _integer(env, "LOCAL_RANK", rank)
    return Placement(rank, world, local, _integer(env, "LOCAL_WORLD_SIZE", world), launched=True)
