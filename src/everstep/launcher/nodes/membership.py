"""One agent among those of other nodes: its facts go through the hub, and come back in the order that all hear.

Rule 1: a fact counts when it comes back, so all agents step the same machine with the same facts in the same order.
Rule 2: each agent acts on the processes of its own node alone.
Rule 3: cut off from the hub, by its end or by a lease that nobody has acknowledged (`core.lease`), an agent ends its
        workers at once: the others give their ranks away (EXPERIMENTS P6).
Rule 4: the store of process groups is kept by the first node that is here.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from everstep.errors import ExitCode
from everstep.launcher.nodes.api import Address
from everstep.launcher.nodes.core.lease import BEAT_S, JUMP_S, LEASE_S, Lease, Standing
from everstep.launcher.nodes.joining import Joined
from everstep.launcher.peers.core import facts
from everstep.process.loop import Loop
from everstep.recovery.api import Message
from everstep.recovery.core import words


class Agent(Protocol):
    """As much of an agent as is called here."""

    def hear(self, event: words.Event) -> None:
        """A fact has come back in the one order of all."""
        ...

    def from_node(self, node: str, prefix: str, message: Mapping[str, Any]) -> None:
        """The companion `prefix` on `node` tells this."""
        ...

    def nodes_changed(self, gone: str, why: str) -> None:
        """`present` is without a node that was here."""
        ...

    def welcomed(self, generation: int) -> None:
        """The job runs in `generation`, whose roster is heard next; `present` is who is here."""
        ...

    def node_leaves(self, node: str) -> None:
        """A node wishes to be left out."""
        ...

    def node_came(self, node: str, who: str) -> None:
        """`present` has one more."""
        ...

    def told(self, node: str, message: Mapping[str, Message]) -> None:
        """What the companions of a node keep of the last generation, by their prefixes."""
        ...

    def all_drained(self, generation: int) -> None:
        """Nothing intended is outstanding on any node."""
        ...

    def asked_to_look(self, rank: int) -> None:
        """A rank of ours is to be asked whether it hears us."""
        ...

    def convicted(self, rank: int, action: str, text: str) -> None:
        """A rank of ours is called the cause of a hang of the world."""
        ...

    def hold(self, *, on: bool) -> None:
        """Have all workers stand still until it is known whether they still have their ranks; or go on."""
        ...

    def cut(self, code: int, text: str) -> None:
        """This agent has no connection to the others any more."""
        ...

    def notice(self, text: str, level: str = "info") -> None:
        """Write a sentence to the ledger."""
        ...


class Membership:
    """Implements `nodes.api.Nodes`, and more that only a job of several nodes needs."""

    def __init__(self, loop: Loop, joined: Joined, linger: Callable[[], None] = lambda: None) -> None:
        """`linger` is called when our part is done."""
        self._linger = linger
        self._loop, self._clock = loop, loop.clock
        self.name, self.present = joined.name, dict(joined.present)
        self.number = joined.ordinal
        """How many nodes had come before this one, of all that ever did."""
        self.waits = joined.late
        """What is to be known of the job, which runs, has not come yet."""
        self._arrival = joined.stream
        self._agent: Agent | None = None
        self._lease = Lease(self._clock.now(), self._clock.now())
        self._standing = Standing.GOOD
        self.over = False
        """Nothing is said or heard any more: we have left, or are cut off."""
        self._stores: dict[int, Address] = {}
        self._drained: defaultdict[int, set[str]] = defaultdict(set)
        self.problems: dict[str, list[str]] = {}
        """What went wrong on other nodes and must show in the exit status, by node."""
        self._pulse()

    def begin(self, agent: Agent) -> None:
        """Serve `agent` from here on: what has come meanwhile first."""
        self._agent = agent
        self._arrival.on_message, self._arrival.on_end = self._heard, self._ended
        self._lease.sent_s = self._lease.looked_s = self._clock.now()
        self._beat()
        if self.waits:
            self._send({"kind": "ready"})
        said, self._arrival.said = self._arrival.said, []
        for message in said:
            self._heard(message)
        if self._arrival.ended:
            self._ended()

    # -- what the agent says ---------------------------------------------------------------------------------------

    def say(self, event: words.Event) -> None:
        """See `Nodes.say`."""
        key = None
        if isinstance(event, words.Published):
            key = f"roster/{event.roster.generation}"
        elif isinstance(event, words.EndRequested):
            key = "end"
        self._fact(facts.encode(event), key)

    def tell(self, node: str, prefix: str, message: Message) -> None:
        """See `Nodes.tell`."""
        self._send({"kind": "tell", "to": node, "prefix": prefix, "message": dict(message)})

    def keeps(self, generation: int, told: Mapping[str, Message]) -> None:
        """Nobody here is in an earlier generation any more: what our companions tell, before `generation` begins."""
        self._fact({"is": "kept", "generation": generation, "node": self.name, "told": dict(told)})

    def drained(self, generation: int, problems: Sequence[str]) -> None:
        """Nothing intended is outstanding here."""
        self._fact({"is": "drained", "generation": generation, "node": self.name, "problems": list(problems)})

    def leaves(self) -> None:
        """This node had better be left out."""
        self._fact({"is": "leaves", "node": self.name})

    def serves(self, address: Address | None) -> None:
        """Our store serves there; None: it does not any more."""
        self._fact({"is": "store", "address": None if address is None else list(address)})

    def views(self, generation: int, views: Sequence[Mapping[str, Any]], lessons: Sequence[Any]) -> None:
        """What our ranks look like, for the judge of all."""
        told = {"generation": generation, "views": list(views), "lessons": list(lessons)}
        self._send({"kind": "views", **told})

    def limits(self, limits: Mapping[str, Any]) -> None:
        """The limits of hangs are these."""
        self._send({"kind": "limits", "limits": dict(limits)})

    def store_of(self, generation: int) -> Address:
        """Where the members of a published roster meet."""
        found = self._stores[generation]
        self._stores = {g: address for g, address in self._stores.items() if g >= generation}
        return found

    @property
    def keeps_store(self) -> bool:
        """We are the first of those that are here."""
        return next(iter(self.present), "") == self.name

    def ends_early(self, event: words.EndRequested) -> None:
        """The end is asked for before we have begun. A job that runs already, where we wait to come in, goes on."""
        if not self.waits:
            self.say(event)
            self.leave()

    def leave(self) -> None:
        """Our part is done."""
        if not self.over:
            self._send({"kind": "bye"})
        self.over = True
        self._arrival.stream.close()
        self._linger()

    def _fact(self, fact: Mapping[str, Any], key: str | None = None) -> None:
        self._send({"kind": "fact", "fact": fact, "key": key})

    def _send(self, message: Mapping[str, Any]) -> None:
        if not self.over:
            self._arrival.stream.send(message)

    # -- what the hub says -----------------------------------------------------------------------------------------

    @property
    def _listener(self) -> Agent:
        assert self._agent is not None, "begin() comes first"
        return self._agent

    def _heard(self, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "beat":
                self._lease.acknowledged(float(message["at"]))
            case "fact":
                self._hear(message["fact"])
            case "welcome":
                self.waits, self.present = False, dict(message["nodes"])
                self._listener.welcomed(int(message["generation"]))
            case "told":
                self._listener.from_node(message["from"], message["prefix"], message["message"])
            case "probe":
                self._listener.asked_to_look(int(message["rank"]))
            case "condemn":
                self._listener.convicted(int(message["rank"]), message["action"], message["text"])
            case "notice":
                self._listener.notice(str(message["text"]), "warning")
            case _:
                pass  # of the time of joining

    def _hear(self, fact: Mapping[str, Any]) -> None:
        special: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "gone": self._hear_gone,
            "came": self._hear_came,
            "leaves": lambda told: self._listener.node_leaves(str(told["node"])),
            "kept": self._hear_kept,
            "drained": self._hear_drained,
        }
        if fact["is"] in special:
            special[fact["is"]](fact)
            return
        if "store" in fact:
            host, port = fact["store"]
            self._stores[fact["roster"]["generation"]] = (host, port)
        self._listener.hear(facts.decode(fact))

    def _hear_gone(self, fact: Mapping[str, Any]) -> None:
        self.present.pop(fact["node"], None)
        self._listener.nodes_changed(fact["node"], fact["why"])
        for generation in list(self._drained):
            self._look_drained(generation)

    def _hear_came(self, fact: Mapping[str, Any]) -> None:
        if fact["node"] != self.name:
            self.present[fact["node"]] = str(fact["address"])
            self._listener.node_came(fact["node"], str(fact["who"]))

    def _hear_kept(self, fact: Mapping[str, Any]) -> None:
        if fact["node"] in self.present:
            self._listener.told(fact["node"], fact["told"])

    def _hear_drained(self, fact: Mapping[str, Any]) -> None:
        if fact["problems"] and fact["node"] != self.name:
            self.problems[fact["node"]] = list(fact["problems"])
        self._drained[fact["generation"]].add(fact["node"])
        self._look_drained(fact["generation"])

    def _look_drained(self, generation: int) -> None:
        if self.present.keys() <= self._drained[generation]:
            del self._drained[generation]
            self._listener.all_drained(generation)

    # -- the lease ---------------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """See whether we were heard; to be called about five times a second."""
        if now - self._lease.looked_s > JUMP_S:
            self._beat()  # whoever answers says that we still have our ranks
        if self.over:  # perhaps since then: there was nobody to say it to
            return
        before, self._standing = self._standing, self._lease.look(now)
        if self._standing is Standing.CUT_OFF:
            self._cut(f"nobody has heard this node for {LEASE_S:g} s")
        elif self._standing is not before:
            self._listener.hold(on=self._standing is Standing.ON_HOLD)

    def _pulse(self) -> None:
        if not self.over:
            self._beat()
            self._loop.later(BEAT_S, self._pulse)

    def _beat(self) -> None:
        self._send({"kind": "beat", "at": self._clock.now()})

    def _ended(self) -> None:
        self._cut("the connection to the hub has ended")

    def _cut(self, why: str) -> None:
        if self.over:
            return
        self.over = True
        self._arrival.stream.close()
        self.present = {self.name: self.present.get(self.name, "")}
        text = (
            f"{self.name} is cut off from the other nodes: {why}. Its workers are ended, for the others go on without "
            "them or end as well"
        )
        self._listener.cut(int(ExitCode.BAD_NODE), text)
