"""The disk tier on several nodes, as it rides on each agent: node_words.py says who does what, coordinating.py how.

What a generation may begin from is what was told before its roster, in one node's words: never what a node finds in the
directory by itself (CL-05). What is whole every node knows from the coordinator.
"""

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import cast

from everstep.checkpoint.coordinating import Coordinating
from everstep.checkpoint.core import commit, names
from everstep.checkpoint.core.plan import Committed
from everstep.checkpoint.core.succession import Standing
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.storage.opening import is_url
from everstep.checkpoint.writers import Writers
from everstep.recovery.api import Child, Host, Message, NodeHost
from everstep.recovery.core.words import Roster

STRIDE = 1_000_000
"""Attempts of one coordinator: no successor gives a save a name that its predecessor may have given."""


class SharedDisk(Coordinating):
    """Companion `disk` of each node; `recovery.api.TellingCompanion`."""

    def close(self) -> None:
        """See `Companion.close`."""
        self._hold.over = self._first and self._done >= self._lineage[1] >= 0
        super().close()

    def start(self, host: Host) -> None:
        """See `Companion.start`. Who coordinates is not known yet."""
        self._host_given = host

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """See `NodeCompanion.on_nodes`. May raise the first time, as `start` may on one node."""
        before, self._nodes = self._nodes, tuple(nodes)
        gone = set(before) - set(nodes)
        if not before:
            self._begin()
            return
        self._early = [(node, message) for node, message in self._early if node not in gone]
        self._ask_nothing_of(set(nodes) - set(before))
        if before[0] in gone and self._first:
            self._succeed(before[0])
        elif self._leads:
            self._lost_nodes(gone)
        if before[:2] != self._nodes[:2]:
            for rank in self._writers.reported:
                if rank in self._buffers or rank in self._ordered:
                    self._post(rank)
        if before[0] in gone and not self._first:
            self._tell_node(self._nodes[0], "standing", **self._standing().to_json())
        self._settle_succession()
        self._settle_last()
        self._replay()

    def _ask_nothing_of(self, come: Set[str]) -> None:
        """Whoever comes while we ask has nothing to say of what was before it."""
        for node in come:
            if self._standings is not None:
                self._standings[node] = Standing("")
            if self._lasts is not None:
                self._lasts[node] = []

    def _succeed(self, before: str) -> None:
        """We are the next in line. Where it went before it could say under what name it held the directory: by ours."""
        told = self._told_job or str(self._words.get(before, {}).get("job", ""))
        if told:
            self._hold.go_on(told, self._host.run_dir)
        else:
            Disk.start(self, self._host)
        self._told_job = told or self._hold.job
        self._standings = {}

    def _begin(self) -> None:
        self._number = cast(NodeHost, self._host).ordinal
        self._attempts = self._number * STRIDE
        if self._first:
            super().start(self._host)
            self._stock_at = self._number, 0
            return
        self._writers_begun = Writers(self._host, self.directory, "", self._patience.sign_s)

    def _begin_writers(self, host: Host) -> None:
        """See `Disk._begin_writers`: those of our ranks, as soon as it is known which they are."""
        self._writers_begun = Writers(host, self.directory, self._hold.lock, self._patience.sign_s)

    # what all are told before a roster

    def telling(self) -> Message:
        """See `TellingCompanion.telling`."""
        job = self._job if self._first else self._told_job
        return {"job": job, "struck": sorted(self.inventory.struck), **self._stock()}

    def told(self, node: str, message: Message) -> None:
        """See `TellingCompanion.told`."""
        self._words[node] = message

    def committed(self) -> Sequence[Committed]:
        """See `Disk.committed`: as this node knows it; the memory tier takes one node's word for all."""
        return [replace(one, where={**one.where, "shared": True}) for one in super().committed()]

    def _strike(self, step: int, text: str) -> None:
        """Every node hears of it before the fault that it leads to, and so before the next plan."""
        if step not in self.inventory.struck:
            self._tell_all("struck", step=step)
        super()._strike(step, text)

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`."""
        self._homes = {member.rank: member.node for member in roster.members}
        words = self._words.get(self._nodes[0], {})
        for node in self._nodes:
            self.inventory.struck |= {int(step) for step in self._words.get(node, {}).get("struck", ())}
            if node in self._words:
                self._take_stock_of(self._words[node])
        if not self._first:
            self._told_job = str(words.get("job", ""))
            if not is_url(self.directory) and self._told_job:
                self._writers.use_lock(os.path.join(self.directory, names.owner(self._told_job)))
        self._writers.start(self._own or [-1])
        told = super().on_roster(roster)
        self._replay()
        return {rank: told[rank] for rank in self._own}

    # what ranks and writers here say

    def _said(self, rank: int, verb: str, message: Message) -> None:
        match verb:
            case "restored":
                self._report("restored", step=message["step"], total=message["total"])
            case "measured":
                super()._said(rank, verb, message)
                self._tell_all("measured", step=message["step"], metrics=dict(message["metrics"]))
            case _:
                super()._said(rank, verb, message)

    def _staged(self, rank: int, token: str, buffer: int, offer: int = 0) -> None:
        if token != self._token or rank in self._buffers:
            self._decline(rank, buffer, offer)
            return
        self._shelf.hold(rank, buffer, offer)
        self._buffers[rank] = buffer
        self._report("staged", save=token, rank=rank)

    def _late(self, rank: int, token: str, step: int) -> None:
        self._report("late", save=token, rank=rank, step=step)

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""
        rank, token, kind = self._writers.rank_of(child), message.get("save"), message["kind"]
        if rank is None or token is None or kind not in ("written", "refused", "moving") or token != self._token:
            super().on_child_message(child, message, fds)
            return
        self._patience.moved(self._host.clock.now())
        if kind == "written":
            self._writers.keep_fragment(rank, fds)
            self._post(rank)
            self._report("written", save=token, rank=rank, bytes=message["bytes"])
            return
        for fd in fds:
            os.close(fd)
        self._report(kind, save=token, rank=rank, text=message.get("text", ""))

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""
        rank = self._writers.rank_of(child)
        if rank is None:
            return
        text = self._writers.lost(rank, status)
        self._notice(text, "warning")
        merges = self._save is not None and self._save.phase is commit.Phase.MERGING
        if rank in self._ordered or (merges and rank in self._writers.ranks):
            self._report("lost", save=self._token, rank=rank, text=text)
        if self._writers.given_up:
            self._report("hopeless", text=text)
        self._host.recheck()

    # the end

    @property
    def outstanding(self) -> bool:
        """See `Saves.outstanding`."""
        asking = self._lasts is not None or self._standings is not None
        asking = asking or (self._save is not None and self._save.token == self._last)  # also until all have it in hand
        return asking or super().outstanding or (not self._first and bool(self._ordered))

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`: what became of saves is told by who coordinates."""
        return super().problems() if self._first else ()

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`. Where another node coordinates: when it has said that all is written."""
        if self._first:
            done = super().drained(completed)
            if done and self._done < self._lineage[1]:
                self._done = self._lineage[1]
                self._tell_all("done", generation=self._done)
            return done
        self._running = False
        waits = self.outstanding or (completed and self._done < self._lineage[1])
        return not waits or self._waited_enough()
