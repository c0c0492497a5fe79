"""A data set's position as one number: how many samples the whole world has consumed.

Rule 1: training reads one endless stream. It is the epochs' permutations one after another; place p of the stream is
        sample `p % length` of epoch `p // length`, shuffled by a permutation of its own.
Rule 2: of a world of W ranks, standing at position p, rank r takes the places p + r, p + r + W, p + r + 2W, …
        So the position is a fact of the world and not of a rank, and a world of another size goes on from it: nothing
        is read twice, nothing is skipped.
Rule 3: a permutation is computed, never stored. A place costs microseconds at any length, and a resume costs nothing.

What was rejected: an epoch that ends at its last sample. Where the world does not divide the length, somebody must then
pad (a sample seen twice) or drop (one never seen), or ranks end at different steps. A batch across the border of two
epochs costs nothing and keeps every sample at exactly once an epoch; `endless=False` ends an iteration behind it.

    stream   e0: 4 1 0 3 2 | e1: 2 0 4 1 3 | e2: …
    2 ranks      0 1 0 1 0   1   0 1 0 1 0   …
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from everstep import environ
from everstep.errors import StateMismatch, UsageError

_MASK = (1 << 64) - 1
_ROUNDS = 4  # of a Feistel network; four make a permutation that looks random (Luby and Rackoff)


def _mixed(value: int) -> int:
    """Spread every bit of `value` over 64 (the finalizer of splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def permuted(place: int, length: int, key: int) -> int:
    """Return where permutation number `key` of 0 … length-1 sends `place`.

    A Feistel network permutes the next power of four; a result beyond the length is sent through it again, which
    stays a permutation of what lies below ("cycle walking").
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right * 0x9E3779B97F4A7C15 + key + turn & _MASK) & low)
        place = left << half | right
        if place < length:
            return place


class GlobalSampler:
    """Sampler for a map-style data set: of torch's `DataLoader`, or of torchdata's `StatefulDataLoader(…, sampler=…)`.

    It never ends: `run.steps(total, loader)` or `itertools.islice` says when to stop. With `endless=False` an iteration
    ends with an epoch: with the step of the world that reaches its last sample, so that all ranks see equally many.
    That step may take the next epoch's first samples, from behind which the next iteration goes on.

    The loader's `state_dict` takes the position along, as of the last batch handed out: what loader workers have
    prefetched is not counted as used. Iterate one at a time; a new `iter` goes on from the position that the last one
    has reached. torch's own `DataLoader` has no `state_dict`, and its workers draw ahead: go on with
    `seek_steps(steps, batch_size)` there.
    """

    counts_whole_world = True
    """What a restore in a world of another size asks of a sampler; see `position_of`."""

    def __init__(
        self,
        length: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        endless: bool = True,
    ) -> None:
        """Rank and world are the launcher's where they are left out, read when iteration begins.

        Raises UsageError for what cannot be meant, a data set in place of its length among it.
        """
        length, seed = _whole(length, "length", "give len(dataset)"), _whole(seed, "seed", "give a whole number")
        if length < 1:
            raise UsageError(f"GlobalSampler(length={length}): a data set to sample from has at least one item.")
        if (rank is None) != (world_size is None):
            raise UsageError(f"GlobalSampler(rank={rank}, world_size={world_size}): give both, or neither.")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise UsageError(
                f"GlobalSampler(rank={rank}, world_size={world_size}): ranks run from 0 to world_size - 1."
            )
        self.length, self.shuffle, self.seed, self.endless = length, shuffle, seed, endless
        self.consumed = 0
        self._place = None if rank is None or world_size is None else (rank, world_size)

    @property
    def epoch(self) -> int:
        """The pass over the data that the next sample belongs to, counted from 0."""
        return self.consumed // self.length

    def at(self, position: int) -> int:
        """Return the sample at a place of the stream."""
        epoch, place = divmod(position, self.length)
        return (
            permuted(place, self.length, _mixed(_mixed(self.seed & _MASK) + epoch & _MASK)) if self.shuffle else place
        )

    def seek(self, consumed: int) -> None:
        """Go to where the whole world has consumed so many samples. No iteration may be under way."""
        if consumed < 0:
            raise UsageError(f"GlobalSampler.seek({consumed}): give the samples consumed so far, 0 or more.")
        self.consumed = consumed

    def seek_steps(self, steps: int, batch_size: int, *, drop_last: bool = False) -> None:
        """Go on from the present position by so many batches of each rank: `batch_size` and `drop_last` of the loader.

        For loaders without a `state_dict`. With `endless=False` the last batch of an iteration may be a short one, or
        be dropped: its samples are behind us all the same. Microseconds an epoch. Raises UsageError where an epoch has
        no batch at all. No iteration may be under way.
        """
        if steps < 0 or batch_size < 1:
            raise UsageError(
                f"GlobalSampler.seek_steps({steps}, {batch_size}): give the steps done so far, 0 or more, and the "
                "size of one rank's batch, 1 or more."
            )
        world = self._placed()[1]
        if not self.endless and drop_last and steps and self.length <= (batch_size - 1) * world:
            raise UsageError(
                f"GlobalSampler.seek_steps: an epoch of {self.length} samples for {world} ranks has no full batch of "
                f"{batch_size}, and the loader drops all others: make it without drop_last."
            )
        while not self.endless and steps:
            drawn = len(self)
            batches = drawn // batch_size if drop_last else -(-drawn // batch_size)
            if steps < batches:
                break
            steps -= batches
            self.consumed += drawn * world
        self.consumed += steps * batch_size * world

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch that lies ahead; where that is reached or passed, nothing changes.

        What loops written for `DistributedSampler` call before each epoch. It never goes back, so a position that was
        restored stays; `seek` goes anywhere. No iteration may be under way.
        """
        if epoch > self.epoch:
            self.consumed = epoch * self.length

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples, from the position on."""
        rank, world = self._placed()
        end = self._end()
        while end is None or self.consumed < end:
            sample = self.at(self.consumed + rank)
            self.consumed += world
            yield sample

    def __len__(self) -> int:
        """Return how many samples an iteration from here yields on each rank. Raises TypeError where it is endless."""
        end = self._end()
        if end is None:
            raise TypeError("an endless GlobalSampler has no length; make it with endless=False to iterate by epochs")
        return -(-(end - self.consumed) // self._placed()[1])

    def __bool__(self) -> bool:
        """True: a sampler is there, however long it is."""
        return True

    def _placed(self) -> tuple[int, int]:
        if self._place is not None:
            return self._place
        placed = environ.placement()
        return placed.rank, placed.world_size

    def _end(self) -> int | None:
        return None if self.endless else (self.epoch + 1) * self.length

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what gives it its meaning."""
        return {"consumed": self.consumed, "length": self.length, "shuffle": self.shuffle, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises StateMismatch where it counts samples of another stream."""
        ours = self.state_dict()
        if missing := sorted(set(ours) - set(state)):
            raise StateMismatch(f"GlobalSampler: the saved state lacks {', '.join(missing)}; it is not one of ours.")
        if differs := [name for name in ("length", "shuffle", "seed") if state[name] != ours[name]]:
            told = ", ".join(f"{name} {state[name]!r} there and {ours[name]!r} here" for name in differs)
            raise StateMismatch(
                f"GlobalSampler: the saved position counts samples of another stream: {told}. "
                "Make the sampler as it was, or begin the data anew by not restoring the loader."
            )
        consumed = state["consumed"]
        if type(consumed) is not int or consumed < 0:
            raise StateMismatch(
                f"GlobalSampler: {consumed!r} is no count of samples; the saved state is not one of ours."
            )
        self.consumed = consumed


def _whole(value: object, name: str, mend: str) -> int:
    """Return a whole number, of NumPy or torch too, as Python's."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] - it is asked
    except (TypeError, ValueError):
        raise UsageError(f"GlobalSampler({name}={value!r}): {mend}.") from None


@dataclass(frozen=True, slots=True)
class Position:
    """Whether an object holds a position in the data, and for whom it counts."""

    counts_whole_world: bool = False
    who: str = ""  # the object whose position counts for one rank alone, where there is one
    ours: bool = False  # a GlobalSampler


def position_of(thing: object) -> Position:
    """Say whose position an object holds: a loader's is its sampler's. Neither of both: it holds none.

    A sampler or loader of a user's own says `counts_whole_world = True` where its `state_dict` means the same in a
    world of any size, and is equal on all ranks. Anything else that can be iterated counts for its own rank.
    """
    seen: list[object] = [thing]
    while True:
        inner: Any = seen[-1]
        if getattr(inner, "counts_whole_world", False) is True:
            return Position(counts_whole_world=True, ours=isinstance(inner, GlobalSampler))
        within = [getattr(inner, name, None) for name in ("batch_sampler", "sampler")]
        following = next((each for each in within if each is not None), None)
        if following is None or any(following is each for each in seen):
            break
        seen.append(following)
    if len(seen) == 1 and not (hasattr(thing, "__iter__") or hasattr(thing, "__next__")):
        return Position()
    return Position(who=type(seen[-1]).__qualname__)
