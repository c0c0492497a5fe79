"""The peer tier as it rides on the agent of each node: copies of snapshots on other nodes, and what is fetched back.

    node of rank 0                      every node                                  its ranks
      placement: who keeps whom ──────▶  places for what it is to keep
      intent: step 120 ───────────────▶  passed on ──────────────────────────────▶  step 120 is done: snapshot, held
      ◀─────────────────────── staged ───────────────────────────────────────────  staged
      all have staged: go ────────────▶  offers each keeper its ranks' snapshots
                                         ◀── a ticket ── keeper                     (from here on porters: porter.py)
      ◀──────────────────────── kept ──  received, hashed, compared
      all are kept: it counts ────────▶  what is older may be written over          the buffer before it is free again

It decides nothing itself: which step (core/intents.py), whose copies where (core/placement.py), how far a save is
(core/peer_save.py), what a generation begins from (core/copies.py, asked by node_shelf.py).

Rule 1: nothing that happens to a copy stops training, or shows in a job's exit status: every end of a save is an event,
and the first of several failures a notice.
Rule 2: no copy of the save that counted last is written over before a newer one counts: with every order the leader
says which one that is, so no order can overtake that knowledge.
So it is with a rank's own part of it: its buffer stays as it is, for of a node that goes others have no other step.
Rule 3: a save never waits in a rank: what cannot be had now is left out in choosing the next intent.
Rule 4: copies rest for as long as they took: no more than half of a network is theirs.
Rule 5: what comes from another node may be anything; what cannot be read is told of, and changes nothing.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from everstep.checkpoint import memory
from everstep.checkpoint.carrier import Carrier, End
from everstep.checkpoint.core.budget import Memory
from everstep.checkpoint.core.copies import Copy, Place, Version, version_of
from everstep.checkpoint.core.plan import Plan
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.fetching import Fetching
from everstep.checkpoint.keeping import Keeping
from everstep.checkpoint.lending import Fetched
from everstep.checkpoint.node_shelf import NodeShelf
from everstep.checkpoint.peer_leader import Leader
from everstep.checkpoint.replicas import Replicas
from everstep.checkpoint.segments import Segment
from everstep.checkpoint.sending import Sending
from everstep.checkpoint.source import Source
from everstep.checkpoint.tier_settings import PEER
from everstep.errors import ProtocolError
from everstep.events import Notice
from everstep.recovery.api import Child, Host, Message, NodeHost
from everstep.recovery.core.words import Roster

SLICE = 64 << 20
COPY_BUFFERS = 2
"""Of each rank, beside those that rotate: one that is being sent, one of the save that counts."""


class Peer:
    """Companion `peer` of each node, after the shelf's; `recovery.api.NodeCompanion` and `node_shelf.Lender`.

    `holds`: this tier's share of the shelf. `interval` in steps, 0: no copies are kept, and memory that was left on
    another node is fetched all the same. `domain`: the label of what fails together with this node, else its name.
    """

    prefix = PEER

    def __init__(
        self,
        shelf: NodeShelf,
        holds: Source,
        *,
        interval: int = 1,
        copies: int = 1,
        domain: str = "",
        cap_bytes: int | None = None,
        look: Callable[[], Memory] = memory.read,
    ) -> None:
        self._shelf, self._holds = shelf, holds
        self._interval, self._copies, self._domain = interval, copies, domain
        self.kept = Replicas(look, cap_bytes)
        self._nodes: Mapping[str, str] = {}
        self._domains: dict[str, str] = {}  # of nodes that can be reached
        self._placement: dict[int, tuple[str, ...]] = {}  # of what concerns this node
        self._sizes: dict[int, int] = {}
        self._without = ""
        self._own: deque[Message] = deque()
        self._saying = False
        shelf.lender = self
        shelf.planned.append(self._planned)
        shelf.sized = self._sized

    def start(self, host: Host) -> None:
        """See `Companion.start`; the host of an agent is a `NodeHost`."""
        given: NodeHost = host  # type: ignore[assignment]
        self._host = given
        self._carrier = Carrier(host, self._opened, self._porter_lost)
        self._fetching = Fetching(self._carrier, self._say)
        self._sending = Sending(given, self._carrier, self._say, self._shelf, self._holds)
        self._keeping = Keeping(given, self._carrier, self._say, self._shelf, self.kept, self._sending.staged)
        self._leader = Leader(host, self._say, self._interval, self._copies)

    # other nodes

    def _say(self, node: str, message: Message) -> None:
        """Tell a node; what we tell ourselves is heard when all that is being done now is done."""
        if node != self._host.node:
            self._host.tell(node, message)
            return
        self._own.append(message)
        if not self._saying:
            self._hear_own()

    def _hear_own(self) -> None:
        self._saying = True
        try:
            while self._own:
                self._heard(self._host.node, self._own.popleft())
        finally:
            self._saying = False

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """See `NodeCompanion.on_nodes`."""
        self._nodes = dict(nodes)
        for node in self._domains.keys() - nodes.keys():
            del self._domains[node]
        self._fetching.on_nodes(nodes)
        if len(nodes) > 1:
            self._carrier.begin(nodes[self._host.node])
        self._tell_here()
        if self._leader.leads:
            self._leader.on_domains(dict(self._domains))

    def _opened(self) -> None:
        """Our porter can be reached."""
        self._tell_here()
        self._fetching.ask()

    def _tell_here(self) -> None:
        if self._carrier.ready:
            for node in self._nodes:
                self._say(node, {"kind": "peer.here", "domain": self._domain or self._host.node})

    def _porter_lost(self, text: str) -> None:
        self._host.emit(Notice(text=text, level="warning"))
        if self._carrier.given_up:
            self._fetching.ask()
            for node in self._nodes:
                self._say(node, {"kind": "peer.not_here"})

    def on_node_message(self, node: str, message: Message) -> None:
        """See `NodeCompanion.on_node_message`."""
        try:
            self._heard(node, message)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            text = f"node {node} said {message.get('kind')!r} in a form that is unknown here ({error!r})"
            self._host.emit(Notice(text=text, level="error"))

    def _heard(self, node: str, message: Message) -> None:
        keeping, sending = self._keeping, self._sending
        hear: Mapping[str, Callable[[str, Message], None]] = {
            "here": self._on_here, "not_here": self._on_not_here, "placed": self._on_placed, "keep": keeping.on_keep,
            "ready": self._on_ready, "no": self._on_no, "intent": sending.on_intent, "staged": self._on_staged,
            "late": self._on_late, "go": self._on_go, "offer": keeping.on_offer, "come": sending.on_come,
            "declined": sending.on_declined, "kept": self._on_kept, "refused": self._on_refused, "done": self._on_done,
            "fetch": self._on_fetch, "unfetched": self._on_unfetched,
        }  # fmt: skip
        handler = hear.get(str(message["kind"]).partition(".")[2])
        if handler is not None:
            handler(node, message)

    def _on_here(self, node: str, message: Message) -> None:
        if node in self._nodes:
            self._domains[node] = str(message["domain"])
            if self._leader.leads:
                self._leader.on_domains(dict(self._domains))

    def _on_not_here(self, node: str, message: Message) -> None:
        del message
        self._domains.pop(node, None)
        if self._leader.leads:
            self._leader.on_domains(dict(self._domains))

    # a generation

    def on_stopped(self, generation: int) -> None:
        """See `Companion.on_stopped`: what was begun is given up; what porters read is held till they are done."""
        del generation
        self._leader.stop()
        self._sending.give_up()
        self._keeping.give_up()

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """See `Companion.on_roster`: the shelf says when the plan is known."""
        del roster
        return {}

    def _planned(self, plan: Plan) -> None:
        """What the generation begins from is known: what it leaves behind is void, and copies are kept anew."""
        branches = self._shelf.branches
        self._sizes.clear()
        self._keeping.begin(branches, self._shelf.counted)
        self._sending.pin()
        if self._shelf.leader != self._host.node or not self._shelf.several:
            return
        present = branches[-1]
        lineage = (present.epoch, present.generation)

        before, newest = self._shelf.keepers, self._shelf.newest_here
        self._leader.begin(
            lineage, self._shelf.homes, dict(self._domains), before, plan.parent, self._shelf.counted, newest
        )

    def _present(self, message: Message) -> bool:
        """True where it is about the generation that we are in."""
        return list(message["roster"]) == self._lineage()

    def _lineage(self) -> list[int]:
        branches = self._shelf.branches
        return [branches[-1].epoch, branches[-1].generation] if branches else []

    # places

    def _on_placed(self, node: str, message: Message) -> None:
        placement = {int(rank): tuple(map(str, keepers)) for rank, keepers in message["placement"].items()}
        if node != self._shelf.leader or not self._present(message):
            return
        self._placement = placement
        for rank, needed in self._sizes.items():
            self._announce(rank, needed)

    def _sized(self, rank: int, needed: int) -> None:
        """A rank here has buffers of this size."""
        self._sending.pin_late(rank)
        if self._sizes.get(rank) != needed:
            self._sizes[rank] = needed
            self._announce(rank, needed)

    def _announce(self, rank: int, needed: int) -> None:
        if self._without:
            self._say(self._shelf.leader, {"kind": "peer.no", "roster": self._lineage(), "text": self._without})
            return
        for keeper in self._placement.get(rank, ()):
            self._say(keeper, {"kind": "peer.keep", "roster": self._lineage(), "rank": rank, "bytes": needed})

    def _on_ready(self, node: str, message: Message) -> None:
        if self._leader.leads and self._present(message):
            self._leader.ready(node, int(message["rank"]))

    def _on_no(self, node: str, message: Message) -> None:
        if self._leader.leads and self._present(message):
            self._leader.unready(node, str(message["text"]))

    # a save

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_message`: `staged` and `late`."""
        del fds  # none come
        self._sending.on_message(rank, message)

    def _on_go(self, node: str, message: Message) -> None:
        self._sending.on_go(node, message, self._placement, self._sizes)

    def _on_done(self, node: str, message: Message) -> None:
        token, counted, committed = str(message["save"]), version_of(message["counted"]), bool(message["committed"])
        if node != self._shelf.leader:
            return
        self._sending.ended(token, committed=committed)
        if committed:
            self._keeping.counts(counted, [r for r, nodes in self._placement.items() if self._host.node in nodes])
        self._keeping.give_up(token)

    def _on_staged(self, node: str, message: Message) -> None:
        rank = int(message["rank"])
        if self._shelf.homes.get(rank) == node:
            self._leader.staged(str(message["save"]), rank)

    def _on_late(self, node: str, message: Message) -> None:
        del node
        self._leader.late(str(message["save"]), int(message["rank"]), int(message["step"]))

    def _on_kept(self, node: str, message: Message) -> None:
        self._leader.kept(str(message["save"]), node, int(message["rank"]), int(message["bytes"]))

    def _on_refused(self, node: str, message: Message) -> None:
        del node
        self._leader.refused(str(message["save"]), int(message["rank"]), str(message["text"]))

    # what a generation begins from: `node_shelf.Lender`

    @property
    def bytes(self) -> int:
        """See `Lender.bytes`."""
        return self.kept.bytes + self._fetching.bytes

    def replicas(self) -> Sequence[Copy]:
        """See `Lender.replicas`. What counts is told with it: nothing comes to count from here on."""
        self._leader.stop()
        return self._keeping.told()

    @property
    def counted(self) -> Version | None:
        """See `Lender.counted`."""
        return self._keeping.counted

    def do_without(self, why: str) -> bool:
        """See `Lender.do_without`."""
        self._without = why
        return True

    def take(self, place: Place) -> Segment | None:
        """See `Lender.take`."""
        return self.kept.take(place)

    def fetch(self, copy: Copy, done: Fetched) -> None:
        """See `Lender.fetch`."""
        if copy.node not in self._nodes:
            done(f"node {copy.node} is gone")
            return
        self._fetching.fetch(copy, done)
        self._host.later(0.0)

    def shed(self) -> bool:
        """See `Lender.shed`."""
        return self._keeping.shed("its memory is needed by the ranks that stand there")

    def _on_fetch(self, node: str, message: Message) -> None:
        place = Place(*message["place"])
        secret, host, port = message["ticket"]
        transfer = str(message["transfer"])

        def done(end: End) -> None:
            if end.why:
                told = {"text": end.why, "again": end.again, "transfer": transfer}
                self._say(node, {"kind": "peer.unfetched", "place": list(place), **told})

        fd = self._lying_here(place)
        if fd is None:
            done(End("it is not there any more"))
        else:
            self._carrier.send(fd, place, (str(secret), str(host), int(port)), done)

    def _lying_here(self, place: Place) -> int | None:
        if place.replica:
            segment = self.kept.find(place)
            return self._shelf.adopted(place) if segment is None else segment.fd
        try:
            header = self._shelf.header(place.rank, place.number)
        except ProtocolError:
            return None  # it has been let go: whoever asks has not heard of the next generation yet
        matches = isinstance(header, Header) and (header.step, header.epoch, header.generation) == place.version
        return self._shelf.fd(place.rank, place.number) if matches else None

    def _on_unfetched(self, node: str, message: Message) -> None:
        end = End(str(message["text"]), again=bool(message["again"]))
        self._fetching.unfetched(node, Place(*message["place"]), str(message["transfer"]), end)

    # the agent

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """See `Companion.on_child_message`."""
        del fds  # none come
        self._carrier.on_message(child, message)

    def on_child_exit(self, child: Child, status: int) -> None:
        """See `Companion.on_child_exit`."""
        self._carrier.on_exit(child, status)

    def on_tick(self, now: float) -> None:
        """See `Companion.on_tick`."""
        self._carrier.on_tick(now)
        self._keeping.allocate()
        if not self._fetching.allocate(SLICE):
            self._host.later(0.0)
        self._leader.on_tick(now)

    def drained(self, completed: bool) -> bool:
        """See `Companion.drained`: a copy in memory outlives no job; nobody waits for one."""
        del completed
        return True

    def problems(self) -> Sequence[str]:
        """See `Companion.problems`: see rule 1."""
        return ()

    def close(self) -> None:
        """See `Companion.close`."""
        self._carrier.close()
        self._fetching.close()
        self._keeping.close()
