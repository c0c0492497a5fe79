"""What rides on an agent, and what an agent offers it.

Snapshots, checkpoints and fault plans are features; the agent knows none of them by name. Each registers as a
`Companion`, whose messages start with its prefix. All calls come on the agent's one thread and must not block.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from everstep.clock import Clock
from everstep.events import Event
from everstep.recovery.core.words import Roster

Message = Mapping[str, Any]
"""One JSON object; its `kind` says what it is, as `prefix.verb`. At most 128 KiB on the wire."""


class Child(Protocol):
    """A helper process of the agent (a writer): forked from the zygote, ended with the agent."""

    name: str
    pid: int

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message; descriptors are duplicated into the child. Never blocks: a full queue is kept here."""
        ...

    def kill(self) -> None:
        """SIGKILL; its end comes to `Companion.on_child_exit`."""
        ...


class Host(Protocol):
    """What the agent offers its companions."""

    clock: Clock
    run_dir: str

    @property
    def world_size(self) -> int:
        """Of the present roster, also while a companion is told of it; before the first, what the job starts with."""
        ...

    def send(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        """Send to the worker that holds `rank` in the present roster; dropped where nobody holds it."""
        ...

    def spawn(self, name: str, entry: str, arguments: Mapping[str, Any]) -> Child:
        """Fork a helper from the zygote that runs `module:function(link, **arguments)`; imports are warm there."""
        ...

    def emit(self, event: Event) -> None:
        """Append to the agent's ledger."""
        ...

    def later(self, delay_s: float) -> None:
        """Have `on_tick` called at the latest in `delay_s` seconds."""
        ...

    def recheck(self) -> None:
        """Say that `drained` may have changed."""
        ...


class Companion(Protocol):
    """A feature that rides on the agent."""

    prefix: str

    def start(self, host: Host) -> None:
        """Called once, before any worker starts. May raise EverstepError: the job then ends with its message."""
        ...

    def on_message(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        """A worker of the present roster says something; `fds` are ours to close."""
        ...

    def on_child_message(self, child: Child, message: Message, fds: Sequence[int]) -> None:
        """A helper of ours says something."""
        ...

    def on_child_exit(self, child: Child, status: int) -> None:
        """A helper of ours is gone."""
        ...

    def on_stopped(self, generation: int) -> None:
        """Every member of `generation` has unwound or is dead: nothing of it writes any more."""
        ...

    def on_roster(self, roster: Roster) -> Mapping[int, Message]:
        """A roster is about to be entered: return what each rank shall be told under our prefix."""
        ...

    def on_tick(self, now: float) -> None:
        """Time has passed."""
        ...

    def drained(self, completed: bool) -> bool:
        """True when nothing intended is outstanding. `completed`: the function has returned on all ranks."""
        ...

    def problems(self) -> Sequence[str]:
        """What went wrong and must show in the exit status (a background save that failed), a sentence each."""
        ...

    def close(self) -> None:
        """The job is over; descriptors and files are released."""
        ...


class DurableCompanion(Companion, Protocol):
    """A companion whose checkpoints outlive the job."""

    def durable(self) -> int:
        """Return the newest step that a start can go on from; 0 where there is none."""
        ...


class PeerCompanion(Companion, Protocol):
    """A companion in a world without an agent: one of them beside every rank, none of which sees another's rank.

    What one tells, all hear, in the same order, its own words too, before the roster that follows.
    """

    def telling(self) -> Message:
        """Our rank has left its generation: return what all must know to come to the same answer in `on_roster`."""
        ...

    def told(self, rank: int, message: Message) -> None:
        """Whoever stands beside `rank`, as it was numbered until now, tells this."""
        ...


class NodeHost(Host, Protocol):
    """What an agent offers its companions in a job of several nodes; in a job of one too, with nobody else there.

    `send` and `on_message` know the ranks of this node alone; what a node must know of another's goes by `tell`.
    """

    @property
    def node(self) -> str:
        """This node's name, as `Member.node` and `NodeCompanion.on_nodes` give it."""
        ...

    @property
    def ordinal(self) -> int:
        """How many nodes had come to the job before this one, of all that ever did: no two have the same."""
        ...

    def tell(self, node: str, message: Message) -> None:
        """Send to the companion of our prefix on another node: in order, at most once; dropped where it is gone."""
        ...


class NodeCompanion(Companion, Protocol):
    """A companion that works with those of its prefix on other nodes."""

    def on_nodes(self, nodes: Mapping[str, str]) -> None:
        """Who is here now, this node too: the address by which others reach it, by its name, in the order of the nodes.

        Called before the first roster, and at each change; a node that is missing is gone with all that it held.
        """
        ...

    def on_node_message(self, node: str, message: Message) -> None:
        """The companion of our prefix on `node` tells this. It comes over a network: it may be anything."""
        ...


class TellingCompanion(NodeCompanion, Protocol):
    """A companion whose answer in `on_roster` depends on what each node keeps.

    Where there are several nodes, what one of them tells all hear, in the same order, their own words too, before the
    roster that follows: so all answer alike. A node that is lost has told nothing. On one node neither is called.
    """

    def telling(self) -> Message:
        """No rank of this node is in an earlier generation any more: return what all must know of what is kept here."""
        ...

    def told(self, node: str, message: Message) -> None:
        """The companion of our prefix on `node` tells this. It comes over a network: it may be anything."""
        ...


class ShownCompanion(Companion, Protocol):
    """A companion of which an operator sees something that no event has told."""

    def shown(self) -> Sequence[Message]:
        """Return rows of `{tier, what, step, bytes}`. It may be asked five times a second, and costs microseconds."""
        ...
