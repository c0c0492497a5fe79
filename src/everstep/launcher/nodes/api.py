"""What an agent and its connection to the agents of other nodes ask of one another."""

from collections.abc import Mapping
from typing import Any, Protocol

from everstep.recovery.api import Message
from everstep.recovery.core import words


class Nodes(Protocol):
    """How an agent speaks to all agents of its job, itself included. All calls come on the agent's one thread."""

    name: str
    """Of this node, as `Member.node` has it."""
    present: Mapping[str, str]
    """The address by which others reach it, of each node that is here, in the order of the nodes."""

    def say(self, event: words.Event) -> None:
        """Say a fact to all agents. It counts, here too, when it comes back in the one order of all facts."""
        ...

    def tell(self, node: str, prefix: str, message: Message) -> None:
        """Tell the companion `prefix` on `node` something: in order, at most once; dropped where it is gone."""
        ...


class Listener(Protocol):
    """As much of an agent as its `Nodes` call."""

    def tell(self, event: words.Event) -> None:
        """Hand one event to the world machine."""
        ...

    def from_node(self, node: str, prefix: str, message: Mapping[str, Any]) -> None:
        """The companion `prefix` on `node` tells this."""
        ...
