"""What an agent asks of its connection to the agents of all nodes, its own included."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from everstep.recovery.api import Message
from everstep.recovery.core import words

Address = tuple[str, int]


class Nodes(Protocol):
    """How an agent speaks to all agents of its job, itself included. All calls come on the agent's one thread."""

    name: str
    """Of this node, as `Member.node` has it."""
    number: int
    """How many nodes had come before this one, of all that ever did."""
    cut_off: bool
    """The others go on without this node, or have ended: nothing may be written any more."""

    @property
    def present(self) -> Mapping[str, str]:
        """The address by which others reach it, of each node that is here, in the order of the nodes."""
        ...

    def begin(self) -> None:
        """Companions have been started: serve from here on."""
        ...

    def say(self, event: words.Event) -> None:
        """Say a fact to all agents. It counts, here too, when it comes back in the one order of all facts."""
        ...

    def tell(self, node: str, prefix: str, message: Message) -> None:
        """Tell the companion `prefix` on `node` something: in order, at most once; dropped where it is gone."""
        ...

    def publish(self, roster: words.Roster) -> None:
        """Propose a roster; the one that wins comes back as `Published`."""
        ...

    def store_of(self, roster: words.Roster) -> Address:
        """Where the members of a roster that is entered meet."""
        ...

    def store_changed(self) -> None:
        """The store of this node serves, or does so no more."""
        ...

    def store_failed(self, code: int, text: str) -> None:
        """There will be no store on this node."""
        ...

    def entered(self) -> None:
        """A roster has been entered."""
        ...

    def follow(self) -> None:
        """The world machine has moved."""
        ...

    def drained(self, generation: int) -> None:
        """Nothing intended is outstanding on this node."""
        ...

    def look(self, now: float) -> None:
        """To be called about five times a second."""
        ...

    def judge(self, now: float) -> None:
        """A generation of a wrapped script runs: look at its ranks, and at who may hang."""
        ...

    def ending(self, command: words.End) -> None:
        """The end has been decided here."""
        ...

    def exclude(self, text: str) -> None:
        """This node shall take no part any more: its ranks end here, and go to others where there are any."""
        ...

    def leave(self, why: str, then: Callable[[str], None]) -> None:
        """Leave this node out where the others can do without it. `then` hears why not, or "" before it leaves."""
        ...

    def faulted(self, fault: words.Fault, now: float) -> None:
        """A generation has ended by this fault, as far as is known now."""
        ...

    def problems(self) -> Sequence[str]:
        """What went wrong on other nodes and must show in the exit status, a sentence each."""
        ...

    def close(self) -> None:
        """Our part of the job is over."""
        ...
