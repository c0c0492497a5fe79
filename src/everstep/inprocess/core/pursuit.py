"""How an interrupt is followed until the function has been left, as a table of sights and rules.

An exception that is raised from outside may be deferred (an import is on the stack, I1; an atomic section), go unheard
(the thread is inside C++), be swallowed (`except BaseException`, `__del__`, an asyncio callback: E20), or be on its way
through clean-up that takes long or never ends (I4). One rule each:

Rule 1: while it is being handled, it is never raised again before a grace without progress has passed.
Rule 2: progress is that a frame which was there from the beginning has gone; steps inside one frame do not count.
Rule 3: graces double; after the first it is raised again, after the second the things that clean-up may wait for are
        ended too, after the third the worker is given up.
Rule 4: unheard and swallowed interrupts are repeated after a short settling time; rule 3 bounds that as well. What is
        never heard at all is given up after two graces of equal length.
Rule 5: deferral stops the graces, but has its own limit; past it the worker is given up, not restarted.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace


class Verdict(enum.Enum):
    """What is to be done now."""

    KEEP = "keep"  # let it run; look again at the next tick
    AGAIN = "again"  # the interrupt was (or is to be) sent once more
    SEVER = "sever"  # as AGAIN, and end what the clean-up may wait for: sockets again, children started inside
    REPLACE = "replace"  # this process cannot be trusted to leave the function: have it killed


class Sight(enum.Enum):
    """What the interrupted thread looks like."""

    LEFT = "left"  # the function is no longer on the stack
    DEFERRED = "deferred"  # an import or an atomic section is on the stack
    UNHEARD = "unheard"  # nothing was raised since the last sending
    HANDLED = "handled"  # the exception is active: an except, a finally, an __exit__
    SWALLOWED = "swallowed"  # it was raised and is no longer active, yet the function goes on


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an interrupt is given. Defaults end a stubborn function after 1 + 2 + 4 seconds without progress."""

    settle_s: float = 0.1
    grace_s: float = 1.0
    defer_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the interrupted thread, taken from outside."""

    stack: tuple[int, ...]  # identities of its frames, the wrapper's marker first; empty when the function is left
    raised: int  # how often the exception has been raised for this interrupt
    handling: bool
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class Chase:
    """An interrupt that is under way."""

    generation: int
    sent_s: float
    still_s: float  # since when nothing has moved
    raised: int = 0  # raises that had been seen when it was last sent
    held: tuple[int, ...] | None = None  # frames that have been there ever since the first look
    rounds: int = 0  # graces that have passed
    deferred_s: float | None = None

    @classmethod
    def begin(cls, generation: int, now: float) -> "Chase":
        """An interrupt was just sent."""
        return cls(generation, sent_s=now, still_s=now)


ESCALATION = (Verdict.AGAIN, Verdict.SEVER, Verdict.REPLACE)
"""What follows the first, the second and the third grace without progress."""

UNHEARD_ESCALATION = (Verdict.SEVER, Verdict.REPLACE)
"""The same while nothing is heard at all; the graces are of equal length."""

Outcome = tuple[Chase, Verdict]
Rule = Callable[[Chase, Look, float, Patience], Outcome]


def sight(chase: Chase, look: Look) -> Sight:
    """Name what is seen."""
    if not look.stack:
        return Sight.LEFT
    if look.deferred:
        return Sight.DEFERRED
    if look.handling:
        return Sight.HANDLED
    return Sight.SWALLOWED if look.raised > chase.raised else Sight.UNHEARD


def step(chase: Chase, look: Look, now: float, patience: Patience) -> Outcome:
    """Judge one look: the chase as it stands now, and what to do."""
    seen = sight(chase, look)
    if seen is not Sight.DEFERRED and chase.deferred_s is not None:
        chase = replace(chase, deferred_s=None, still_s=now)
    return RULES[seen](_follow(chase, look, now), look, now, patience)


def _follow(chase: Chase, look: Look, now: float) -> Chase:
    """Note which of the first look's frames are still there (rule 2)."""
    if chase.held is None:
        return replace(chase, held=look.stack)
    common = 0
    for before, after in zip(chase.held, look.stack, strict=False):
        if before != after:
            break
        common += 1
    return chase if common == len(chase.held) else replace(chase, held=chase.held[:common], still_s=now)


def _done(chase: Chase, look: Look, now: float, patience: Patience) -> Outcome:
    return chase, Verdict.KEEP


def _defer(chase: Chase, look: Look, now: float, patience: Patience) -> Outcome:
    since = now if chase.deferred_s is None else chase.deferred_s
    late = now - since >= patience.defer_s
    return replace(chase, deferred_s=since), Verdict.REPLACE if late else Verdict.KEEP


def _press(chase: Chase, look: Look, now: float, patience: Patience) -> Outcome:
    """An exception that is being handled has its grace from its own raise on (rule 1)."""
    return _grace(replace(chase, still_s=max(chase.still_s, chase.sent_s)), look, now, patience)


def _grace(chase: Chase, look: Look, now: float, patience: Patience) -> Outcome:
    if chase.rounds >= len(ESCALATION):
        return chase, Verdict.REPLACE
    if now - chase.still_s < patience.grace_s * 2**chase.rounds:
        return chase, Verdict.KEEP
    verdict = ESCALATION[chase.rounds]
    return replace(chase, rounds=chase.rounds + 1, still_s=now, sent_s=now, raised=look.raised), verdict


def _repeat(chase: Chase, look: Look, now: float, patience: Patience) -> Outcome:
    chase, verdict = _grace(chase, look, now, patience)
    if verdict is Verdict.KEEP and now - chase.sent_s >= patience.settle_s:
        return replace(chase, sent_s=now, raised=look.raised), Verdict.AGAIN
    return chase, verdict


def _knock(chase: Chase, look: Look, now: float, patience: Patience) -> Outcome:
    """The thread is inside C++ and nobody there can hear us: a hook on autograd's device thread that hangs (I5), a wait
    that severing did not end. Its graces do not double: a spare is ready sooner than such a wait ends.
    """
    if now - chase.still_s >= patience.grace_s:
        verdict = UNHEARD_ESCALATION[min(chase.rounds, len(UNHEARD_ESCALATION) - 1)]
        return replace(chase, rounds=chase.rounds + 1, still_s=now, sent_s=now, raised=look.raised), verdict
    if now - chase.sent_s >= patience.settle_s:
        return replace(chase, sent_s=now, raised=look.raised), Verdict.AGAIN
    return chase, Verdict.KEEP


RULES: Mapping[Sight, Rule] = {
    Sight.LEFT: _done,
    Sight.DEFERRED: _defer,
    Sight.UNHEARD: _knock,
    Sight.HANDLED: _press,
    Sight.SWALLOWED: _repeat,
}
