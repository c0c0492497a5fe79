"""One generation, as the agent or the watcher tells a rank of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Assignment:
    """One generation, as this rank was told of it."""

    generation: int
    epoch: int
    rank: int
    world_size: int
    store: tuple[str, int]
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    master: tuple[str, int] | None = None  # what the script shall find as MASTER_ADDR and MASTER_PORT; None: the store
    local: tuple[int, int] | None = None  # rank and number of ranks on this node, where an agent gives them
    group: tuple[int, int] | None = None  # the same of nodes

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> "Assignment":
        """Take it from the agent's message."""
        host, port = message["store"]
        master, local, group = message.get("master"), message.get("local"), message.get("group")
        return cls(
            message["generation"], message["epoch"], message["rank"], message["world_size"], (host, port),
            message["companions"], None if master is None else (master[0], master[1]),
            None if local is None else (local[0], local[1]), None if group is None else (group[0], group[1]),
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return what changes in a script's environment from one generation to the next, as a launcher names it."""
        rank, size = str(self.rank), str(self.world_size)
        host, port = self.master or self.store
        found = {
            "RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": host, "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(self.generation),
        }  # fmt: skip
        if self.local is not None:
            found |= {"LOCAL_RANK": str(self.local[0]), "LOCAL_WORLD_SIZE": str(self.local[1])}
            found |= {"ROLE_RANK": rank, "ROLE_WORLD_SIZE": size}
        if self.group is not None:
            found |= {"GROUP_RANK": str(self.group[0]), "GROUP_WORLD_SIZE": str(self.group[1])}
        return found
