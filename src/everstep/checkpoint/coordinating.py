"""The coordinator's part of the disk tier on several nodes: hears who has staged and written, merges, retires.

Rule 1: a successor first hears from every node that is left how the save stands there (core/succession.py).
Rule 2: only writers of this node merge: here are the fragments.
"""

from collections.abc import Mapping
from dataclasses import replace

from everstep.checkpoint.core import commit, names, succession
from everstep.checkpoint.core.final import newest_common
from everstep.checkpoint.core.plan import Sealed
from everstep.checkpoint.core.succession import Standing
from everstep.checkpoint.node_words import NodeWords
from everstep.recovery.api import Message


class Coordinating(NodeWords):
    """What a node does while it is the first that is here."""

    def _reported(self, node: str, verb: str, message: Message) -> None:
        token, rank = message.get("save"), int(message.get("rank", -1))
        if verb == "staged":
            self._places[rank] = node
            self._hear(token, commit.Staged(rank))
        elif verb == "late":
            super()._late(rank, str(token), int(message["step"]))
        elif verb == "written" and rank in self._writers.reported:
            self._hear(token, commit.Written(rank, int(message["bytes"])))
        elif verb == "written":
            self._hear(token, commit.Refused(rank, f"what {node} reported of its shard did not come whole"))
        elif verb == "refused":
            self._hear(token, commit.Refused(rank, str(message["text"])))
        elif verb == "lost":
            self._hear(token, commit.WriterLost(rank, str(message["text"])))
        else:
            self._reported_aside(node, verb, message)

    def _reported_aside(self, node: str, verb: str, message: Message) -> None:
        match verb:
            case "moving":
                self._patience.moved(self._host.clock.now())
            case "hopeless":
                self._hopeless = str(message["text"])
                if self._hopeless not in self._problems:
                    self._problems.append(self._hopeless)
                if self._save is not None:
                    self._hear(self._save.token, commit.Stopped(self._hopeless))
            case "restored":
                self._continue(int(message["step"]), int(message["total"]))
            case "standing" if self._standings is not None:
                self._standings[node] = Standing.from_json(message)
                self._settle_succession()
            case "sealed" if self._lasts is not None:
                self._lasts[node] = [Sealed(*map(int, row)) for row in message["rows"]]
                self._settle_last()
            case _:
                return

    def _open(self, step: int, epoch: int, generation: int) -> commit.Save:
        save = super()._open(step, epoch, generation)
        able = self._writers.ranks
        self._save = replace(save, merger=able[0], mergers=able)
        self._know(save.token, save.world_size)
        self._places = dict(self._homes)
        return self._save

    def _do(self, save: commit.Save, command: commit.Command) -> None:
        match command:
            case commit.Write(rank) if self._places.get(rank) != self._me:
                self._tell_node(self._places[rank], "write", save=save.token, rank=rank, world_size=save.world_size)
            case commit.Write(rank):
                self._write(rank, save.token, save.world_size)
            case commit.Release(rank) if self._places.get(rank) != self._me:
                self._tell_node(self._places.get(rank, ""), "release", save=save.token, rank=rank)
            case commit.Release(rank):
                self._let_go(rank)
            case commit.Merge(rank):
                metrics = self.inventory.metrics.get(save.step, {})
                self._writers.merge(rank, save.token, metrics, self._visible_s)
            case commit.Discard():
                self._tell_all("discard", save=save.token)
                super()._do(save, command)
            case _:
                super()._do(save, command)

    def _ended(self, save: commit.Save) -> None:
        self._stock_at = self._number, self._stock_at[1] + 1
        self._forget(save.token, save.phase.value)
        self._tell_all("ended", save=save.token, phase=save.phase.value, condemned=self._condemned, **self._stock())

    def _next(self) -> None:
        if self._leads and not self._hopeless:
            super()._next()

    def _lost_nodes(self, gone: set[str]) -> None:
        """Ranks whose node went will stage and write no more."""
        save = self._save
        lost = sorted(rank for rank, node in self._places.items() if node in gone) if save is not None else []
        for rank in lost:
            assert save is not None
            text = f"{self._places[rank]} is gone"
            if self._save is not None and self._save.phase is commit.Phase.ASKED:
                self._hear(save.token, commit.Stopped(text))
            elif rank != save.merger:
                self._hear(save.token, commit.WriterLost(rank, text))

    # its predecessor is gone

    def _settle_succession(self) -> None:
        """When all that are left have said how the save stands with them, decide."""
        if self._standings is None or set(self._nodes) - set(self._standings) - {self._me}:
            return
        standings = {**self._standings, self._me: self._standing()}
        self._standings = None
        tokens = {one.save: one.world_size for one in standings.values() if one.save}
        ended = dict(one.ended for one in standings.values())
        for token, world_size in sorted(tokens.items(), key=lambda one: (one[0] not in ended, one)):
            if token in ended:  # told before another save is begun, whose name would be known there instead
                self._tell_all("ended", save=token, phase=ended[token], condemned=self._condemned, **self._stock())
                if token == self._token:
                    self._forget(token, ended[token])
            else:
                self._resume(token, world_size, standings)
        self._replay()
        self._next()
        self._host.recheck()

    def _resume(self, token: str, world_size: int, standings: Mapping[str, Standing]) -> None:
        staging = names.staging_of(token)
        if staging is None:
            return
        self._know_if_new(token, world_size)
        self._places = {rank: node for node, one in standings.items() if one.save == token for rank in one.staged}
        able = self._writers.ranks
        reported = {rank: len(self._writers.fragment(rank) or b"") for rank in self._writers.reported}
        blank = commit.Save(token, staging.step, world_size, merger=able[0], mergers=able)
        save = self._save = succession.resume(blank, standings.values(), reported, self._places.keys())
        self._asked_s = self._host.clock.now()
        self._notice(
            f"{self._me} coordinates the checkpoints from here on; that of step {save.step} is {_TAKEN_UP[save.phase]}",
            "info",
        )
        for command in _follows(save, self._places):
            self._do(save, command)
        if save.ended:
            self._end(save, 0)

    # the last step

    def _save_last(self) -> None:
        """Ask every node what it holds of the last step."""
        self._lasts = {self._me: list(self._shelf.sealed_here())}
        self._tell_all("last")
        self._settle_last()

    def _settle_last(self) -> None:
        if self._lasts is None or set(self._nodes) - set(self._lasts):
            return
        told, self._lasts = self._lasts, None
        found = [(node, one) for node, held in told.items() for one in held if self._homes.get(one.rank) == node]
        whole = newest_common(self._host.world_size, [one for _, one in found], *self._lineage, self._shelf.plan)
        if whole and whole[0].step not in self.inventory.complete and not self._writers.given_up and self._save is None:
            save = self._open(whole[0].step, whole[0].epoch, whole[0].generation)
            self._last = save.token
            for one in whole:
                home = self._homes[one.rank]
                if home == self._me:
                    self._staged(one.rank, save.token, one.buffer)
                else:
                    body = {"rank": one.rank, "buffer": one.buffer, "world_size": save.world_size}
                    self._tell_node(home, "take", save=save.token, **body)
        self._host.recheck()


_TAKEN_UP = {
    commit.Phase.MERGING: "merged again",
    commit.Phase.WRITING: "written on",
    commit.Phase.VOID: "void",
    commit.Phase.FAILED: "given up",
    commit.Phase.COMMITTED: "whole",
    commit.Phase.ASKED: "asked for",
}


def _follows(save: commit.Save, places: Mapping[int, str]) -> list[commit.Command]:
    """What is to be done with a save that was taken up, as it stands."""
    held = [commit.Release(rank) for rank in sorted(places)]
    match save.phase:
        case commit.Phase.MERGING:
            return [*held, commit.Merge(save.merger)]
        case commit.Phase.WRITING:
            done = [commit.Release(rank) for rank in sorted(places.keys() & save.written.keys())]
            return [*done, *(commit.Write(rank) for rank in range(save.world_size) if rank not in save.written)]
        case commit.Phase.VOID:
            return [commit.Withdraw(), *held]
        case commit.Phase.FAILED:
            return [*held, commit.Discard()]
        case _:
            return []
