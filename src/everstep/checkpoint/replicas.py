"""What this node keeps of other nodes' ranks: two places for each, so that one copy is always whole.

Rule 1: memory is judged when a rank is announced, for all its places, and allocated in full, in slices that keep the
agent's loop free. What does not fit is refused with a sentence; training needs none of it.
Rule 2: a copy counts when it has been received and verified, and is what was announced. What is newer than the last
save that counted everywhere never takes its place; what is older does.
Rule 3: a copy that a rank begins from is handed over, and its place made anew when the next one comes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everstep.checkpoint import memory
from everstep.checkpoint.core.budget import Memory, size
from everstep.checkpoint.core.copies import Copy, Place, Version
from everstep.checkpoint.core.plan import Sealed
from everstep.checkpoint.core.segment import Header
from everstep.checkpoint.segments import Segment

PLACES = 2
RESERVE = 16
"""One part in so many of what is available stays free for everything else."""


@dataclass(eq=False, slots=True)
class Slot:
    """One place. `copy`: what is whole in it; `busy`: something is being received into it."""

    number: int
    segment: Segment
    copy: Copy | None = None
    kept_s: float = 0.0
    busy: bool = False

    @property
    def version(self) -> Version | None:
        """Which save its copy belongs to."""
        return None if self.copy is None else self.copy.version


@dataclass(slots=True)
class _Rank:
    bytes: int
    slots: list[Slot] = field(default_factory=list[Slot])


class Replicas:
    """The copies of one node, of other nodes' ranks."""

    def __init__(self, look: Callable[[], Memory] = memory.read, cap_bytes: int | None = None) -> None:
        self._look, self._cap = look, cap_bytes
        self._ranks: dict[int, _Rank] = {}
        self._leaving: list[Slot] = []  # let go while something is received into them
        self._count = 0

    @property
    def bytes(self) -> int:
        """What all of it takes."""
        return sum(slot.segment.size for slot in self._slots()) + sum(slot.segment.size for slot in self._leaving)

    @property
    def ranks(self) -> Sequence[int]:
        """Whose copies are kept here."""
        return sorted(self._ranks)

    def want(self, rank: int, needed: int, held: int) -> str:
        """Make places for a rank's snapshots of so many bytes; say why not. `held`: what all snapshots here take."""
        known = self._ranks.get(rank)
        if known is not None and known.bytes >= needed:
            return self._filled(rank, held)
        self._ranks[rank] = _Rank(needed, [] if known is None else [s for s in known.slots if s.copy or s.busy])
        why = self._filled(rank, held)
        if why and known is not None:
            self._ranks[rank] = known
        elif why:
            del self._ranks[rank]
        return why

    def _filled(self, rank: int, held: int) -> str:
        """Have `PLACES` places that are large enough; smaller ones go when their copy is no longer needed."""
        mine = self._ranks[rank]
        missing = PLACES - len([s for s in mine.slots if s.segment.size >= mine.bytes])
        why = self._shortage(rank, missing * mine.bytes, held)
        if why:
            return why
        for _ in range(missing):
            self._count += 1
            mine.slots.append(Slot(self._count, Segment(f"copy-{rank}-{self._count}", mine.bytes)))
        return ""

    def _shortage(self, rank: int, missing: int, held: int) -> str:
        """Judge what is to be allocated; what is promised to others here and not allocated yet counts as taken."""
        found = self._look()
        promised = sum(slot.segment.size for slot in self._slots() if not slot.segment.ready)
        limits = [(found.available - found.available // RESERVE - promised, "this machine has available",
                   "use nodes with more memory, or --checkpoint-peer-copies 0")]  # fmt: skip
        if found.group_free is not None:
            free = found.group_free - found.group_free // RESERVE - promised
            limits.append((free, f"the memory limit of control group {found.group} leaves", "raise it"))
        if self._cap is not None:
            limits.append((self._cap - held, "--snapshot-memory leaves", "raise it"))
        free, what, mend = min(limits, key=lambda limit: limit[0])
        if missing <= free:
            return ""
        return f"copies of rank {rank} need {size(missing)} more, but {what} {size(max(0, free))}: {mend}"

    def allocate(self, at_most: int) -> bool:
        """Allocate a slice; True when all is there. MemoryShortage where the kernel has no more."""
        for slot in self._slots():
            if not slot.segment.ready:
                at_most -= slot.segment.allocate(at_most)
        return all(slot.segment.ready for slot in self._slots())

    def ready(self, rank: int) -> bool:
        """True when there is room for one more copy of this rank, beside the last."""
        mine = self._ranks.get(rank)
        return mine is not None and len([s for s in mine.slots if s.segment.ready]) >= PLACES

    def place(self, rank: int, needed: int, counted: Version | None) -> Slot | None:
        """Choose where the next copy goes: never over that of the save that counted last; None where there is none."""
        mine = self._ranks.get(rank)
        if mine is None:
            return None
        free = [s for s in mine.slots if s.segment.ready and s.segment.size >= needed and not s.busy]
        free = [s for s in free if s.version is None or s.version != counted]
        chosen = min(free, key=lambda s: (s.version is not None, s.kept_s, s.number), default=None)
        if chosen is not None:
            chosen.busy, chosen.copy = True, None
            chosen.segment.void()
        return chosen

    def received(self, slot: Slot, node: str, expected: Place, now: float) -> str:
        """What was announced has arrived: it counts, or why not."""
        slot.busy = False
        if slot in self._leaving:
            self._leaving.remove(slot)
            slot.segment.close()
            return "it is not wanted any more"
        header = slot.segment.header()
        if isinstance(header, str):
            return header
        came = (header.rank, header.step, header.epoch, header.generation)
        if came != (expected.rank, expected.step, expected.epoch, expected.generation):
            slot.segment.void()
            return f"step {header.step} of rank {header.rank} came, not what was announced"
        slot.copy, slot.kept_s = Copy(node, True, _sealed(header, slot.number), slot.segment.size), now
        return ""

    def dropped(self, slot: Slot) -> None:
        """What was to come into a place has not."""
        slot.busy = False
        if slot in self._leaving:
            self._leaving.remove(slot)
            slot.segment.close()
        else:
            slot.segment.void()

    def copies(self, now: float) -> list[Copy]:
        """What is whole here, oldest first."""
        kept = sorted((s for s in self._slots() if s.copy is not None), key=lambda s: s.kept_s)
        found: list[Copy] = []
        for slot in kept:
            assert slot.copy is not None, "sorted out above"
            c = slot.copy
            found.append(Copy(c.node, True, c.snapshot, c.bytes, round(max(0.0, now - slot.kept_s), 3)))
        return found

    def find(self, place: Place) -> Segment | None:
        """Return the memory of a copy that lies here; it stays ours."""
        slot = self._find(place)
        return None if slot is None else slot.segment

    def take(self, place: Place) -> Segment | None:
        """Hand a copy over: the caller's from now on."""
        slot = self._find(place)
        if slot is None:
            return None
        self._ranks[place.rank].slots.remove(slot)
        return slot.segment

    def keep_only(self, wanted: Callable[[Copy], bool]) -> None:
        """Void every copy that is not wanted any more."""
        for slot in self._slots():
            if slot.copy is not None and not wanted(slot.copy):
                slot.copy = None
                slot.segment.void()

    def let_go(self, ranks: Sequence[int]) -> None:
        """Keep nothing of these ranks; what is being received is let go when it has come."""
        for rank in ranks:
            for slot in self._ranks.pop(rank).slots if rank in self._ranks else ():
                if slot.busy:
                    self._leaving.append(slot)
                else:
                    slot.segment.close()

    def close(self) -> None:
        """Let go of everything."""
        for slot in [*self._slots(), *self._leaving]:
            slot.segment.close()
        self._ranks.clear()
        self._leaving.clear()

    def _slots(self) -> list[Slot]:
        return [slot for mine in self._ranks.values() for slot in mine.slots]

    def _find(self, place: Place) -> Slot | None:
        for slot in self._ranks[place.rank].slots if place.rank in self._ranks else ():
            if slot.copy is not None and slot.copy.place == place:
                return slot
        return None


def _sealed(header: Header, number: int) -> Sealed:
    return Sealed(header.rank, number, header.step, header.epoch, header.generation, header.parent, header.world_size)
