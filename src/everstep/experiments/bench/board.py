"""How agents of several nodes come to the next roster over a store whose old keys are deleted, however late they are.

Rule 1: the newest roster is one key. Whoever has the next one puts it in the place of the one that he knows
        (compare-and-set). So each generation is decided once, and who comes too late finds a later one standing.
Rule 2: every other key stands below the place of a generation (`store.keys`), and is void once a later one has a
        roster. Nobody concludes anything from its absence.
Rule 3: waiting for such a key is listening for a bell. It may have rung, and be gone, before one listened: so no wait
        is longer than BELL_S, and what counts is what stands for the newest roster after it.

Hence what is past may be deleted at any moment: who was late misses a bell, and reads a later roster.

The functions yield what they ask of a store and are sent its answers: `run` puts them to a real one.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from everstep.store import Store, keys

BELL_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of a `Store`."""

    call: str  # get | set | create | swap | wait
    arguments: tuple[Any, ...]


Steps = Generator[Ask, Any, T]


def newest(epoch: int) -> str:
    """Name the key of the newest roster."""
    return f"{keys.OURS}/{epoch}/roster"


def bell(epoch: int, generation: int) -> str:
    """Name the key that says that this generation has a roster."""
    return f"{keys.place(epoch, generation)}/roster"


def fault(epoch: int, generation: int) -> str:
    """Name the key of this generation's fault."""
    return f"{keys.place(epoch, generation)}/fault"


def arrived(epoch: int, generation: int, who: object) -> str:
    """Name the key that says that a node, or a process, stands ready for this generation."""
    return f"{keys.place(epoch, generation)}/arrived/{who}"


def propose(epoch: int, generation: int, known: bytes, mine: bytes) -> Steps[bytes | None]:
    """Put a roster in the place of the one that is known; return what stands: one's own where it has won."""
    stands = yield Ask("swap", (newest(epoch), known, mine))
    if stands == mine:
        yield Ask("set", (bell(epoch, generation), b"1"))
    return stands if stands is None else bytes(stands)


def following(epoch: int, generation: int, known: bytes) -> Steps[bytes]:
    """Wait for the roster of `generation`, or of a later one; return it."""
    while True:
        yield Ask("wait", ([bell(epoch, generation)],))
        stands = yield Ask("get", (newest(epoch),))
        if stands is not None and stands != known:
            return bytes(stands)


def heard(epoch: int, key: str, known: bytes) -> Steps[bytes | None]:
    """Wait for what stands under a key of the present generation; None where a later roster stands instead."""
    while True:
        yield Ask("wait", ([key],))
        value = yield Ask("get", (key,))
        if value is not None:
            return bytes(value)
        if (yield Ask("get", (newest(epoch),))) != known:
            return None


def run(store: Store, steps: Steps[T], limit_s: float = BELL_S) -> T:
    """Put what is asked to `store`; no wait is longer than `limit_s`."""
    answer: Any = None
    while True:
        try:
            ask = steps.send(answer)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]
        more = {"timeout_s": limit_s} if ask.call == "wait" else {}
        answer = getattr(store, ask.call)(*ask.arguments, **more)
