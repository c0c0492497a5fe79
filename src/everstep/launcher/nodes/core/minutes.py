"""The hub's minutes: what was said, in the one order in which all agents hear it.

Rule 1: of facts with one key the first counts. So a roster, and the end, are decided here and by nobody else.
Rule 2: a roster is told when it can be entered: its members have a store to meet on, and every node that is here has
        told what it keeps of the last generation. So all agents have heard the same before it, in the same order, and
        come to the same answer about where its state comes from. What else is said meanwhile is told at once.
Rule 3: the store is that of the node that keeps one; with the node it is gone.
Rule 4: a store serves one generation where the script makes its groups itself (`renewed`: torch's rendezvous would meet
        what earlier generations left there, EXPERIMENTS E12).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

REMEMBERED = 8  # generations
Fact = Mapping[str, Any]
"""One JSON object; `is` says what: an event of the world machine, or node, kept, drained."""


@dataclass
class Minutes:
    """See the rules above."""

    renewed: bool
    nodes: set[str] = field(default_factory=set[str])  # that are here
    keys: set[str] = field(default_factory=set[str])
    store: tuple[str, list[Any]] | None = None  # the node that keeps it, and its address
    _kept: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict[int, set[str]](set))
    _held: list[Fact] = field(default_factory=list[Fact])

    def begin(self, nodes: Iterable[str]) -> None:
        """All are here."""
        self.nodes = set(nodes)

    def come(self, node: str) -> None:
        """One more is here; it has heard what was told, and is waited for from now on."""
        self.nodes.add(node)

    def say(self, fact: Fact, key: str | None = None) -> list[Fact]:
        """Write a fact down; return what is told to all now, in this order."""
        if key is not None:
            if key in self.keys:
                return []
            self.keys.add(key)
        if fact["is"] == "Published" and fact["roster"]["members"]:
            self._held.append(fact)
            return self._released()
        if fact["is"] == "kept":
            self._kept[int(fact["generation"])].add(str(fact["node"]))
        return [fact, *self._released()]

    def serves(self, node: str, address: list[Any]) -> list[Fact]:
        """The store of `node` serves at `address`."""
        self.store = (node, address)
        return self._released()

    def serves_no_more(self, node: str) -> None:
        """It does not, or is not to be trusted."""
        if self.store is not None and self.store[0] == node:
            self.store = None

    def leave(self, node: str, why: str, *, lost: bool) -> list[Fact]:
        """A node is here no more; `lost`: and it did not say good-bye."""
        if node not in self.nodes:
            return []
        self.nodes.discard(node)
        for told in self._kept.values():
            told.discard(node)  # whoever has its name next has not told yet
        self.serves_no_more(node)
        gone: list[Fact] = [{"is": "gone", "node": node, "why": why}] if lost else []
        return [*gone, *self._released()]

    def _released(self) -> list[Fact]:
        told: list[Fact] = []
        while self._held and self.store is not None:
            generation = int(self._held[0]["roster"]["generation"])
            if not self.nodes <= self._kept[generation]:
                break
            told.append({**self._held.pop(0), "store": self.store[1]})
            for old in [g for g in self._kept if g < generation - REMEMBERED]:
                del self._kept[old]
            if self.renewed:
                self.store = None
        return told
