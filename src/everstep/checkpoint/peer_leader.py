"""The part of the peer tier that one node does for all, that of rank 0: placement, intents, and when a save counts.

Rule 1: it begins anew with each roster, from what the nodes tell it: nothing but they need to remember anything.
Rule 2: no intent before every rank has a keeper, and every place that is wanted is there: what counts is whole without
any one node.
Rule 3: what counted last is agreed upon with the plan (core/copies.py), and told with every order.
"""

from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.core import intents
from everstep.checkpoint.core import peer_save as saves
from everstep.checkpoint.core.copies import Version
from everstep.checkpoint.core.placement import NOWHERE, Placement, place
from everstep.checkpoint.tier_settings import PEER
from everstep.events import Notice, TierEvent
from everstep.recovery.api import Host, Message

REST_FROM_S = 0.25
"""A save that took longer is followed by a rest as long: no more than half of a network is ours."""
ASK_AGAIN_S = 2.0
STUCK_S = 60.0

Say = Callable[[str, Message], None]
Lineage = tuple[int, int]


class Leader:
    """Does nothing until `begin`, and after `stop`."""

    def __init__(self, host: Host, say: Say, interval: int, copies: int) -> None:
        self._host, self._say = host, say
        self._interval, self._copies = interval, copies
        self._plan = intents.Plan(max(1, interval))
        self._lineage: Lineage | None = None
        self._homes: Mapping[int, str] = {}
        self._domains: Mapping[str, str] = {}
        self.placement: Placement = NOWHERE
        self._ready: set[tuple[int, str]] = set()
        self._off = ""
        self._save: saves.Save | None = None
        self._count = 0
        self._asked_s = 0.0
        self._rest_s = self._again_s = self._moved_s = 0.0
        self._counted: Version | None = None
        self._told: set[str] = set()
        self._failing = False
        self._newest: Callable[[], int] = lambda: 0

    @property
    def leads(self) -> bool:
        """True where this node is it."""
        return self._lineage is not None

    def begin(
        self,
        lineage: Lineage,
        homes: Mapping[int, str],
        domains: Mapping[str, str],
        before: Placement,
        parent: int,
        counted: Version | None,
        newest: Callable[[], int],
    ) -> None:
        """A generation begins after step `parent`; `newest` says how far the ranks here are known to be."""
        self.stop()
        self._lineage, self._homes, self._newest = lineage, dict(homes), newest
        self._plan = intents.rewind(self._plan, max(0, parent))
        self._off, self._counted, self.placement = "", counted, before
        self._place(domains)

    def stop(self, text: str = "the generation has ended") -> None:
        """The generation, or our part in it, has ended."""
        self._lineage = None
        if self._save is not None:
            self._hear(self._save.token, saves.Stopped(text))

    def on_domains(self, domains: Mapping[str, str]) -> None:
        """Other nodes are here, or can be reached, than before."""
        if self._lineage is None or domains == self._domains:
            return
        self._place(domains)  # first: what ends makes room for the next, which is for these nodes
        if self._save is not None:
            self._hear(self._save.token, saves.Stopped("other nodes are here than when it was begun"))

    def _place(self, domains: Mapping[str, str]) -> None:
        assert self._lineage is not None, "begun"
        self._domains = dict(domains)
        self._ready.clear()
        copies = self._copies if self._interval else 0
        self.placement = place(self._homes, self._domains, copies, self.placement)
        self._again_s = self._host.clock.now()
        if copies and len(domains) > 1:
            self._tell_once(
                f"snapshots are copied to {copies} other node{'s' if copies > 1 else ''}, every {self._interval} "
                "steps or as often as the network allows: what a node takes with it, others have"
            )
        elif copies and len(set(self._homes.values())) <= len(domains):
            self._tell_once("nobody is there to keep copies of snapshots: this node is the only one that is reached")
        self._tell_placement()

    def _tell_placement(self) -> None:
        assert self._lineage is not None, "begun"
        for node in sorted({*self._homes.values(), *self._domains}):
            placed = {str(rank): list(keepers) for rank, keepers in self.placement.items()
                      if self._homes[rank] == node or node in keepers}  # fmt: skip
            self._say(node, {"kind": "peer.placed", "roster": list(self._lineage), "placement": placed})

    def on_tick(self, now: float) -> None:
        """What may have been lost on its way is said again; what comes to no end is given up."""
        if self._lineage is None:
            return
        if now - self._again_s >= ASK_AGAIN_S:
            self._again_s = now
            save = self._save
            if save is None and not self._off and not self._pairs <= self._ready:
                self._tell_placement()
            elif save is not None and save.phase is saves.Phase.ASKED:
                self._tell_intent(save)
            elif save is not None and now - self._moved_s > STUCK_S:
                self._hear(save.token, saves.Stopped(f"nothing has arrived for {STUCK_S:.0f} s"))
        self.next()

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._host.emit(Notice(text=text))

    @property
    def _pairs(self) -> saves.Wanted:
        return frozenset((rank, node) for rank, nodes in self.placement.items() for node in nodes)

    # what nodes say

    def ready(self, node: str, rank: int) -> None:
        """A keeper has places for a rank."""
        self._ready.add((rank, node))
        self.next()

    def unready(self, node: str, text: str) -> None:
        """A keeper has no memory: no copies for as long as that is so; half of them would be none."""
        self._ready = {pair for pair in self._ready if pair[1] != node}
        if self._off != text:
            self._off = text
            self._host.emit(
                Notice(
                    level="warning",
                    text=f"no copies of snapshots are kept: node {node}: {text}. Training goes on; the loss of a node "
                    "costs what slower tiers have not",
                )
            )
        if self._save is not None:
            self._hear(self._save.token, saves.Stopped(text))

    def staged(self, token: str, rank: int) -> None:
        """A rank holds the step."""
        self._hear(token, saves.Staged(rank))

    def late(self, token: str, rank: int, step: int) -> None:
        """A rank was past it. Of all that say so of one intent the first makes the lead grow."""
        current = self._save is not None and self._save.token == token
        self._plan = (intents.late if current else intents.saw)(self._plan, step)
        self._hear(token, saves.Late(rank, step))

    def kept(self, token: str, node: str, rank: int, size: int) -> None:
        """A keeper has a copy."""
        self._hear(token, saves.Kept(rank, node, size))

    def refused(self, token: str, rank: int, text: str) -> None:
        """A copy could not be sent, or not be received."""
        self._hear(token, saves.Refused(rank, text))

    # one save

    def next(self) -> None:
        """Choose the next intent, where nothing stands against it."""
        if self._lineage is None or self._save is not None or not self._interval:
            return
        pairs = self._pairs
        if not pairs or not pairs <= self._ready or not all(self.placement.values()):
            return
        now = self._host.clock.now()
        if now < self._rest_s:
            self._host.later(self._rest_s - now)
            return
        self._plan, choice = intents.choose(intents.saw(self._plan, self._newest()))
        for step in choice.left_out:
            self._host.emit(TierEvent(tier=PEER, what="coalesced", step=step, text=choice.reason))
        self._host.emit(TierEvent(tier=PEER, what="planned", step=choice.step, text=choice.reason))
        self._count += 1
        token = f"{self._lineage[0]}.{self._lineage[1]}.{self._count}"
        self._save = saves.Save(token, choice.step, frozenset(self._homes), pairs)
        self._tell_intent(self._save)

    def _hear(self, token: str, event: saves.Event) -> None:
        before = self._save
        if before is None or before.token != token:
            return
        self._save = saves.hear(before, event)
        self._moved_s = self._host.clock.now()
        if before.phase is saves.Phase.ASKED and self._save.phase is saves.Phase.SENDING:
            self._asked_s = self._host.clock.now()
            self._plan = intents.saw(self._plan, before.step)
            self._host.emit(TierEvent(tier=PEER, what="taken", step=before.step))
            assert self._lineage is not None, "a save belongs to a generation"
            body = {"kind": "peer.go", "save": token, "step": before.step, "lineage": list(self._lineage)}
            self._tell_homes({**body, "counted": self._counted})
        if self._save.ended:
            self._end(self._save)

    def _end(self, save: saves.Save) -> None:
        self._save = None
        seconds = self._host.clock.now() - self._asked_s
        what = {saves.Phase.COMMITTED: "committed", saves.Phase.VOID: "skipped"}.get(save.phase, "failed")
        taken = save.phase is not saves.Phase.VOID
        lasted = seconds if taken else 0.0
        self._host.emit(
            TierEvent(tier=PEER, what=what, step=save.step, bytes=save.bytes, seconds=lasted, text=save.text)
        )
        if save.phase is saves.Phase.COMMITTED:
            assert self._lineage is not None, "a save belongs to a generation"
            self._counted = (save.step, *self._lineage)
            self._failing = False
        elif save.phase is saves.Phase.FAILED and not self._failing:
            self._failing = True
            text = f"the copies of step {save.step} on other nodes are not whole: {save.text}. Training goes on"
            self._host.emit(Notice(text=text, level="warning"))
        if taken and seconds > REST_FROM_S:
            self._rest_s = self._host.clock.now() + seconds
        done: dict[str, Any] = {"kind": "peer.done", "save": save.token, "counted": self._counted}
        for node in {*self._homes.values(), *self._domains}:
            self._say(node, {**done, "committed": save.phase is saves.Phase.COMMITTED})
        self.next()

    def _tell_intent(self, save: saves.Save) -> None:
        assert self._lineage is not None, "a save belongs to a generation"
        body = {"kind": "peer.intent", "save": save.token, "step": save.step, "lineage": list(self._lineage)}
        self._tell_homes({**body, "counted": self._counted})

    def _tell_homes(self, message: Message) -> None:
        for node in sorted(set(self._homes.values())):
            self._say(node, message)
