"""Which steps the disk tier saves: decided once for all ranks, ahead of every rank's present step.

Rule 1: one intent is open at a time; the next is chosen when the last is done, void or failed. Where storage is slower
than the interval the steps between are left out *here*, in choosing, never in one rank's queue: rank by rank next to
nothing is ever whole (EXPERIMENTS C1, E33).
Rule 2: an intent lies ahead of the newest step that any rank is known to have begun. A rank that has passed it says
so; the intent is then void for all, and the lead grows until intents come in time. It grows from fresh knowledge only:
who calls `choose` first says where the ranks are (`saw`).
Rule 3: multiples of the interval only. A save that ends late waits for the next one: the newest durable step is then
never older than twice the write and one interval.
Rule 4: a new generation begins from the step it restores; intents of the old one are void.

It does not know ranks, clocks or files; who calls it holds the open intent's fate (core/commit.py).
"""

from dataclasses import dataclass, replace

from everstep.errors import UsageError

MAX_LEAD = 1024
"""No message takes longer than so many steps; beyond, a rank is slow for another reason."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The next step to save, and why this one. `left_out`: due steps that no longer can be taken."""

    step: int
    reason: str
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator remembers between intents."""

    interval: int
    seen: int = 0  # the newest step that a rank is known to have done or begun
    last: int = 0  # the last step that was intended, or from which this generation began
    lead: int = 0  # further steps that an intent needs to reach every rank in time

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise UsageError(
                f"a checkpoint interval of {self.interval} steps cannot be kept; give 1 or more, "
                "or leave --checkpoint-dir out to save none"
            )


def choose(plan: Plan) -> tuple[Plan, Choice]:
    """Choose the next step to save, and remember it."""
    beyond = max(plan.last, plan.seen + plan.lead)
    step = (beyond // plan.interval + 1) * plan.interval
    first_due = (plan.last // plan.interval + 1) * plan.interval
    left_out = tuple(range(first_due, step, plan.interval))
    reason = f"the next multiple of {plan.interval} after step {plan.last}"
    if left_out:
        reason = (
            f"the first multiple of {plan.interval} ahead of every rank, the newest of which is at step {plan.seen}"
        )
    return replace(plan, last=step), Choice(step, reason, left_out)


def saw(plan: Plan, step: int) -> Plan:
    """A rank is known to be at `step`."""
    return replace(plan, seen=max(plan.seen, step))


def late(plan: Plan, step: int) -> Plan:
    """A rank was already at `step` when the intent came: look further ahead from now on, in this generation."""
    return replace(saw(plan, step), lead=min(MAX_LEAD, max(1, 2 * plan.lead)))


def rewind(plan: Plan, step: int) -> Plan:
    """A generation begins after `step`: what was intended beyond it is due again."""
    return replace(plan, seen=step, last=step, lead=0)
