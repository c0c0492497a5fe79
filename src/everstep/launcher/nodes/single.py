"""A job of one node: whatever is said has been heard."""

from collections.abc import Mapping

from everstep.launcher.nodes.api import Listener
from everstep.process.loop import Loop
from everstep.recovery.api import Message
from everstep.recovery.core import words

NAME, ADDRESS = "node-0", "127.0.0.1"


class Single:
    """Implements `nodes.api.Nodes` without anybody else: no socket, no process."""

    def __init__(self, loop: Loop, agent: Listener) -> None:
        self._loop, self._agent = loop, agent
        self.name = NAME
        self.present: Mapping[str, str] = {NAME: ADDRESS}

    def say(self, event: words.Event) -> None:
        """See `Nodes.say`: at once."""
        self._agent.tell(event)

    def tell(self, node: str, prefix: str, message: Message) -> None:
        """See `Nodes.tell`: in a later turn of the loop, as from another node."""
        if node == self.name:
            self._loop.later(0.0, lambda: self._agent.from_node(node, prefix, message))
