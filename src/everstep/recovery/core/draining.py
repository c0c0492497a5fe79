"""At which step a job ends that is asked to: the step that runs ends on every rank, and no rank begins another.

Rule 1: from the moment at which a rank has said how far it has come (`Gate.stand`), it begins no further step before it
        is told up to which it may (`Gate.until`).
Rule 2: that is the newest step that any rank has begun: the others have begun it, or may yet. So no rank waits in a
        collective for one that stops before it, and none has done what another has not.
Rule 3: every node says the newest of its ranks to all nodes; each comes to the same step from the same words. There is
        nobody whose loss leaves it open.
"""

import enum
from collections.abc import Iterable


class Answer(enum.Enum):
    """What a rank does that is about to begin a step."""

    BEGIN = "begin"
    WAIT = "wait"  # until it is known where all stand
    LEAVE = "leave"  # the job has come to its last step


class Gate:
    """One rank's side, between two steps: `before` on the function's thread, the others on one that hears the agent.

    No lock is needed: each side writes its own word before it reads the other's. Whoever begins a step says so first,
    and then looks whether it has been asked; whoever asks, asks first and reads then.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._stands = False
        self._last: int | None = None

    def stand(self) -> int:
        """The end is asked for: return the step that was begun last, 0 before the first."""
        self._stands = True
        return self._begun

    def until(self, step: int) -> None:
        """No rank goes beyond `step`."""
        self._last = step

    def before(self, step: int) -> Answer:
        """`step` is next: may it begin?"""
        self._begun = step  # where it waits all the same, `stand` may have counted it, and then it will begin
        if not self._stands:
            return Answer.BEGIN
        if self._last is None:
            return Answer.WAIT
        return Answer.BEGIN if step <= self._last else Answer.LEAVE


class Agreement:
    """One node's side: collects where its own ranks stand, and what the other nodes say of theirs."""

    def __init__(self, nodes: Iterable[str], ranks: Iterable[int]) -> None:
        """`ranks`: those of this node."""
        self._ranks, self._nodes = set(ranks), set(nodes)
        self._here: dict[int, int] = {}
        self._there: dict[str, int] = {}

    def rank_stands(self, rank: int, begun: int) -> int | None:
        """A rank of this node has answered; return what this node says to all, once it is known. The first counts."""
        before = self._newest_here()
        if rank in self._ranks:
            self._here.setdefault(rank, begun)
        return self._newest_here() if before is None else None

    def node_stands(self, node: str, begun: int) -> None:
        """A node, this one too, has said the newest step that any of its ranks has begun."""
        if node in self._nodes:
            self._there.setdefault(node, begun)

    @property
    def step(self) -> int | None:
        """The last step of all, once every node has spoken."""
        return max(self._there.values(), default=0) if self._nodes <= self._there.keys() else None

    @property
    def missing(self) -> list[int]:
        """The ranks of this node that have not answered."""
        return sorted(self._ranks - self._here.keys())

    def _newest_here(self) -> int | None:
        return max(self._here.values(), default=0) if not self.missing else None
