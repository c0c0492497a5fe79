"""The disk tier of a plain loop whose ranks stand on several hosts: decided in one place, written where each rank is.

What is saved when is decided as on one host (ondemand.py), of all ranks at once; here is what distance adds.

Rule 1: a writer of another host is told which buffer it reads, never given one; its fragment comes over the line.
Rule 2: writers of the leading host alone merge: there are the fragments. They wait until they see what others wrote.
Rule 3: a host that is gone ends the save in which it still had to write; one that has all its parts is published.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from everstep.checkpoint.core import commit
from everstep.checkpoint.keeper_far import Far
from everstep.checkpoint.ondemand import OnDemand

VISIBLE_S = 90.0
"""How long a network file system may take until what one host has written is there for another (nfs(5): up to 60 s)."""


class FarOnDemand(OnDemand):
    """Companion of one directory that all hosts share. `far`: the other hosts."""

    def __init__(self, *arguments: Any, far: Far, visible_s: float = VISIBLE_S, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._far, self._visible_s = far, visible_s

    def lost(self, ranks: Sequence[int], why: str) -> None:
        """The host of these ranks is gone, with their writers and all that they left; `away` comes next."""
        self._writers.leave(ranks)
        save = self._save
        if save is not None:  # what they have staged is gone with it, and what they have written is not
            self._hear(save.token, commit.Stopped(why))
            for rank in ranks:
                self._hear(save.token, commit.WriterLost(rank, why))
        self._host.recheck()

    def _open(self, step: int, epoch: int, generation: int) -> commit.Save:
        save = self._save = replace(super()._open(step, epoch, generation), mergers=self._far.ours)
        return save

    def _order(self, rank: int, save: commit.Save) -> None:
        if self._far.at(rank) is None:
            super()._order(rank, save)
        else:
            self._writers.write(rank, save.token, None, save.world_size, self._buffers[rank])

    def _do(self, save: commit.Save, command: commit.Command) -> None:
        if isinstance(command, commit.Merge):
            metrics = self.inventory.metrics.get(save.step, {})
            self._writers.merge(command.rank, save.token, metrics, self._visible_s)
        else:
            super()._do(save, command)
