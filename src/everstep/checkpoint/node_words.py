"""What the nodes of a job say to one another about checkpoints: who coordinates, and what every node does for it.

The coordinator is the first node that is here. It does what disk.py does on one node: chooses the steps, hears who has
staged and written, merges, publishes, retires. What it learns comes over the control plane alone; no directory is
listed (EXPERIMENTS C3). Its successor is the next node. Every fragment goes to both, so that one of them going leaves
the other able to merge: the same bytes, whoever does (C5).

    node ─▶ coordinator   staged, late, written, refused, lost, hopeless, moving, restored, standing, sealed
    node ─▶ both          fragment {save, rank, part …}         all ─▶ all  measured {step, metrics}, struck {step}
    coordinator ─▶ node   say {message} (to its ranks), write, release, discard, ended {save, phase, stock},
                          last (what of the last step is there?), take {save, rank, buffer}, done

Rule 1: a word that does not fit who coordinates, as this node knows it, waits until it does: nodes hear of a loss one
after the other. What a node said that is gone counts no more.
Rule 2: a successor first hears from every node that is left how the save stands there, and then decides
(core/succession.py).
Rule 3: what a generation may begin from is what was told before its roster: never what a node finds in the directory by
itself (CL-05).
Rule 4: what is whole is told with a number that grows: words that were overtaken make nobody forget a checkpoint.
"""

import os
from typing import Any, cast

from everstep.checkpoint.core import commit, names, retention
from everstep.checkpoint.core.parcels import Parcels, cut
from everstep.checkpoint.core.plan import Sealed
from everstep.checkpoint.core.succession import Standing
from everstep.checkpoint.disk import Disk
from everstep.checkpoint.holder import Hold
from everstep.checkpoint.patience import GRACE_S
from everstep.checkpoint.source import Source
from everstep.recovery.api import Message, NodeHost

VISIBLE_S = 90.0
"""How long a network file system may take until what one node has written is there for another (nfs(5): up to 60 s)."""
REPORTS = frozenset(
    {"staged", "late", "written", "refused", "lost", "hopeless", "moving", "restored", "standing", "sealed"}
)
ORDERS = frozenset({"say", "write", "release", "discard", "ended", "last", "take", "done"})
EARLY = 4096


class NodeWords(Disk):
    """The part of the disk tier that every node has."""

    def __init__(
        self,
        directory: str,
        interval: int,
        shelf: Source,
        keep: retention.Keep | int | None = retention.DEFAULT_KEEP,
        *,
        hold: Hold | None = None,
        grace_s: float = GRACE_S,
        visible_s: float = VISIBLE_S,
    ) -> None:
        super().__init__(directory, interval, shelf, keep, hold=hold, grace_s=grace_s)
        self._visible_s = visible_s
        self._lineage = (-1, -1)  # no roster has been entered
        self._nodes: tuple[str, ...] = ()  # that are here, the coordinator first
        self._homes: dict[int, str] = {}  # on which node a rank stands in the present roster
        self._places: dict[int, str] = {}  # on which node a rank's snapshot lies, of the open save
        self._number = 0  # of this node among all that ever came to the job
        self._token, self._world = "", 0  # of the save that is open as far as this node knows
        self._ended_as = ("", "")
        self._ordered: set[int] = set()  # ranks here whose writers were asked
        self._parcels = Parcels()
        self._early: list[tuple[str, Message]] = []
        self._words: dict[str, Message] = {}
        self._told_job = ""
        self._standings: dict[str, Standing] | None = None  # while we succeed a coordinator
        self._lasts: dict[str, list[Sealed]] | None = None  # while we ask what of the last step is there
        self._hopeless = ""
        self._stock_at = (-1, 0)  # the number of who coordinated, and how often what is whole had changed with it
        self._done = -1  # the generation of which the coordinator has said that all is written

    # who is here

    @property
    def _me(self) -> str:
        return cast(NodeHost, self._host).node

    @property
    def _leads(self) -> bool:
        """True where this node coordinates, and has come to know how things stand."""
        return self._first and self._standings is None

    @property
    def _first(self) -> bool:
        return bool(self._nodes) and self._nodes[0] == self._me

    @property
    def _job(self) -> str:
        return self._told_job or self._hold.job

    @property
    def _own(self) -> list[int]:
        return [rank for rank, node in self._homes.items() if node == self._me]

    # words between nodes

    def on_node_message(self, node: str, message: Message) -> None:
        """See `NodeCompanion.on_node_message`."""
        verb = str(message["kind"]).partition(".")[2]
        if node not in self._nodes:
            return
        if verb == "fragment":
            self._take_parcel(node, message)
        elif verb == "measured":
            self.inventory.metrics[int(message["step"])] = dict(message["metrics"])
        elif verb == "struck":
            self.inventory.struck.add(int(message["step"]))
        elif not self._fits(node, verb, message):
            self._early = [*self._early, (node, message)][-EARLY:]
        elif verb in REPORTS:
            self._reported(node, verb, message)
        elif verb in ORDERS:
            self._obey(verb, message)

    def _fits(self, node: str, verb: str, message: Message) -> bool:
        """Whether it can be understood now (rule 1)."""
        if verb in REPORTS:
            return self._leads or (self._first and verb == "standing")
        if node != self._nodes[0]:
            return False
        said = message.get("message") or {}
        staging = names.staging_of(str(said.get("save"))) if str(said.get("kind")).endswith(".intent") else None
        return staging is None or (staging.epoch, staging.generation) <= self._lineage

    def _replay(self) -> None:
        early, self._early = self._early, []
        for node, message in early:
            self.on_node_message(node, message)

    def _tell_node(self, node: str, verb: str, **body: Any) -> None:
        cast(NodeHost, self._host).tell(node, {"kind": f"{self.prefix}.{verb}", **body})

    def _tell_all(self, verb: str, **body: Any) -> None:
        for node in self._nodes:
            if node != self._me:
                self._tell_node(node, verb, **body)

    def _report(self, verb: str, **body: Any) -> None:
        """Tell the coordinator, which may be us."""
        if self._first:
            self.on_node_message(self._me, {"kind": f"{self.prefix}.{verb}", **body})
        elif self._nodes:
            self._tell_node(self._nodes[0], verb, **body)

    def _tell(self, message: Message) -> None:
        if str(message["kind"]).endswith(".intent") and self._save is not None:
            message = {**message, "world_size": self._save.world_size}
        super()._tell(message)
        self._tell_all("say", message=dict(message))

    def _post(self, rank: int) -> None:
        """A fragment goes to the coordinator and to the next in line, in parts."""
        content = self._writers.fragment(rank)
        for node in self._nodes[:2]:
            if node != self._me and content is not None:
                for part in cut(content):
                    self._tell_node(node, "fragment", save=self._token, rank=rank, **part)

    def _take_parcel(self, node: str, message: Message) -> None:
        rank, token = int(message["rank"]), str(message["save"])
        content = self._parcels.take((node, token, rank), message)
        if content is not None and token == self._token and 0 <= rank < self._world:
            fd = os.memfd_create("everstep-fragment", os.MFD_CLOEXEC)
            os.write(fd, content)
            self._writers.keep_fragment(rank, [fd])

    def _reported(self, node: str, verb: str, message: Message) -> None:
        """A node reports something; heard by who coordinates."""

    # a save as it stands here

    def _know(self, token: str, world_size: int) -> None:
        """A save is open."""
        self._token, self._world = token, world_size
        self._ordered.clear()
        self._writers.forget_fragments()
        self._parcels.forget()

    def _forget(self, token: str, phase: str) -> None:
        """The save has come to its end: nothing of it is held any more."""
        for rank in list(self._buffers):
            self._let_go(rank)
        self._writers.forget_fragments()
        self._parcels.forget()
        self._ordered.clear()
        self._ended_as, self._token = (token, phase), ""

    def _write(self, rank: int, token: str, world_size: int) -> None:
        if rank in self._buffers and rank not in self._ordered:
            self._ordered.add(rank)
            self._writers.start([rank])
            self._writers.write(rank, token, self._shelf.fd(rank, self._buffers[rank]), world_size)

    def _let_go(self, rank: int) -> None:
        buffer = self._buffers.pop(rank, None)
        if buffer is not None:
            self._shelf.release(rank, buffer)

    def _standing(self) -> Standing:
        return Standing(self._token, self._world, frozenset(self._buffers) | self._ordered, self._ended_as)

    # what every other node obeys

    def _obey(self, verb: str, message: Message) -> None:
        token, rank = str(message.get("save", "")), int(message.get("rank", -1))
        match verb:
            case "write" if token == self._token:
                self._write(rank, token, int(message["world_size"]))
            case "release" if token == self._token:
                self._let_go(rank)
            case "take":
                self._know_if_new(token, int(message["world_size"]))
                self._staged(rank, token, int(message["buffer"]))
            case "discard":
                self._writers.discard(token)
                if token == self._token:
                    self._forget(token, commit.Phase.FAILED.value)
            case "ended":
                self._hear_of_the_end(token, message)
            case _:
                self._obey_aside(verb, message)

    def _obey_aside(self, verb: str, message: Message) -> None:
        match verb:
            case "say":
                self._hand_on(message["message"])
            case "last":
                self._report("sealed", rows=[list(_row(one)) for one in self._shelf.sealed_here()])
            case "done":
                self._done = int(message["generation"])
                self._host.recheck()
            case _:
                return

    def _hear_of_the_end(self, token: str, message: Message) -> None:
        self._condemned = list(map(int, message["condemned"]))
        self._take_stock_of(message)
        if token == self._token or (not self._token and token == self._ended_as[0]):
            self._forget(token, str(message["phase"]))
        self._host.recheck()

    def _know_if_new(self, token: str, world_size: int) -> None:
        if token != self._token:
            self._know(token, world_size)

    def _hand_on(self, said: Message) -> None:
        """What the coordinator says to all ranks."""
        if str(said["kind"]).endswith(".intent"):
            self._know(str(said["save"]), int(said["world_size"]))
        for rank in self._own:
            self._host.send(rank, said)

    def _stock(self) -> dict[str, Any]:
        """Step, size of its world and metrics of each that is whole, as they are told."""
        known = self.inventory
        rows = [[step, known.sizes.get(step), dict(known.metrics.get(step, {}))] for step in sorted(known.complete)]
        return {"complete": rows, "stock": list(self._stock_at)}

    def _take_stock_of(self, told: Message) -> None:
        """Know what is whole as somebody has told it, unless we know better (rule 4)."""
        number, count = map(int, told["stock"])
        if (number, count) <= self._stock_at:
            return
        self._stock_at = number, count
        known, rows = self.inventory, told["complete"]
        known.complete = {int(step) for step, _, _ in rows}
        for step, size, metrics in rows:
            known.sizes[int(step)], known.metrics[int(step)] = int(size), dict(metrics)


def _row(one: Sealed) -> tuple[int, ...]:
    return (one.rank, one.buffer, one.step, one.epoch, one.generation, one.parent, one.world_size)
