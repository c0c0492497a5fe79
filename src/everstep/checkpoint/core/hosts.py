"""On which hosts the ranks of a plain loop stand, and when one of those hosts is given up. Pure.

A host is what shares a kernel, a network namespace and a process namespace: within one, ranks reach their keeper over a
local socket and it can watch their processes. Two containers of one machine that share neither are two hosts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.ranks import brief

BEAT_S = 2.0
"""How often the keepers of two hosts show that they live."""
LOST_S = 30.0
"""So long a host may say nothing: no training waits for it, and a busy machine is not a dead one."""
JUMP_S = 5.0
"""Who looks later than this has not run itself: nothing is known of the others' silence meanwhile."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """`names`: as people know them, that of rank 0 first, which leads. `home`: of each rank the number of its host."""

    names: tuple[str, ...]
    home: Mapping[int, int]

    @property
    def several(self) -> bool:
        """True where there is more than one."""
        return len(self.names) > 1

    def ranks(self, host: int) -> tuple[int, ...]:
        """The ranks of one, lowest first: the first of them starts its keeper."""
        return tuple(sorted(rank for rank, one in self.home.items() if one == host))

    def told(self, host: int) -> str:
        """Name a host, with the ranks that stand there."""
        return f"{self.names[host]} (rank {brief(self.ranks(host))})"

    def to_json(self) -> dict[str, object]:
        """Return it as plain values."""
        return {"names": list(self.names), "home": [self.home[rank] for rank in range(len(self.home))]}

    @classmethod
    def from_json(cls, told: Mapping[str, list[object]]) -> "Hosts":
        """Read what `to_json` wrote."""
        return cls(tuple(map(str, told["names"])), {rank: int(str(host)) for rank, host in enumerate(told["home"])})


def arrange(identities: Mapping[int, str]) -> Hosts:
    """Say who stands together: ranks of one identity, whose first word is the host's name.

    The ranks are those of the world, from 0 on. Hosts whose names are equal are numbered.
    """
    found = list(dict.fromkeys(identities[rank] for rank in sorted(identities)))
    names = [one.split()[0] if one.split() else "?" for one in found]
    called = [f"{name}#{names[:n].count(name) + 1}" if names.count(name) > 1 else name for n, name in enumerate(names)]
    return Hosts(tuple(called), {rank: found.index(one) for rank, one in identities.items()})


@dataclass(frozen=True, slots=True)
class Silence:
    """When another host was heard, and when that was looked at, by our own monotonic clock."""

    heard_s: float
    looked_s: float

    def heard(self, now: float) -> "Silence":
        """It has said something."""
        return Silence(now, self.looked_s)

    def look(self, now: float) -> tuple["Silence", bool]:
        """To be called every `BEAT_S`; True where the other is given up. A time in which we did not run is not its."""
        if now - self.looked_s > BEAT_S + JUMP_S:
            return Silence(now, now), False
        return Silence(self.heard_s, now), now - self.heard_s >= LOST_S
