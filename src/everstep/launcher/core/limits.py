"""When silence is a hang: limits learned from the run, evidence asked for before anything hard is done.

Rule 1: a hang is a property of the world (H1): while any rank is in an exempt phase nobody is suspected, except a rank
        that has outstayed the limit of its own declared phase.
Rule 2: limits start from the longest gap that was legitimate so far, and only after `LEARN_STEPS` steps of this
        generation (H3); until then, and without a learned value, the ceiling holds.
Rule 3: idle silence (no CPU used) is believed sooner than busy silence (H2: slow is not hung).
Rule 4: hard action needs evidence: a stopped process, or one that does not answer a probe (its interpreter lock is
        held), or the operator's own limit. All else gets the soft action, which costs one step when it is wrong.
        Ranks that wait in a collective are not judged before the one they wait for: its own limit counts.
Rule 5: a step that has hung once gets twice the time in the next generation, until it has passed (H2).
Rejected: limits as a multiple of the mean (one slow evaluation and it fires), and any limit below `IDLE_FLOOR_S`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

LEARN_STEPS = 3
IDLE_FLOOR_S = 5.0
BUSY_FLOOR_S = 10.0
CEILING_S = 60.0  # NVRx's soft timeout: what holds where nothing is learned
FIRST_CEILING_S = 600.0  # set-up and first step
MULTIPLE = 6.0
BUSY_SHARE = 0.2  # of one core since the last mark; below it a process is idle
PROBE_SHARE = 0.5  # of the limit: from here on a rank is asked whether it hears us
PROBE_PATIENCE_S = 1.5


@dataclass(frozen=True, slots=True)
class View:
    """What is known of one rank at one moment, without its help."""

    rank: int
    step: int
    silent_s: float  # since its last mark
    phase: str  # first | step | declared | paused | waiting | none
    limit_s: float  # of a declared phase; 0: none
    steps_here: int  # steps done in this generation
    state: str  # of the process, as in /proc
    cpu_share: float  # of one core since the last mark
    probe_age_s: float | None = None  # a probe that has not been answered; None: none outstanding
    waiting: bool | None = None  # its stack stands in a collective, and waits for others; None: not known
    name: str = ""  # of a declared phase


@dataclass(frozen=True, slots=True)
class Learned:
    """What the run has taught."""

    worst_gap_s: float = 0.0  # longest legitimate silence inside steps
    worst_first_s: float = 0.0  # longest set-up and first step
    doubled_step: int = -1  # the step at which it last hung
    doublings: int = 0

    def gap(self, seconds: float, *, first: bool) -> "Learned":
        """A silence has ended by itself: it was legitimate."""
        if first:
            return replace(self, worst_first_s=max(self.worst_first_s, seconds))
        return replace(self, worst_gap_s=max(self.worst_gap_s, seconds))

    def hung(self, step: int) -> "Learned":
        """A hang was declared after `step`."""
        doublings = self.doublings + 1 if step == self.doubled_step else 1
        return replace(self, doubled_step=step, doublings=doublings)

    def passed(self, step: int) -> "Learned":
        """The world has gone past `step`."""
        return replace(self, doubled_step=-1, doublings=0) if step > self.doubled_step >= 0 else self


@dataclass(frozen=True, slots=True)
class Own:
    """The operator's own limits; None: learned."""

    soft_s: float | None = None
    hard_s: float | None = None
    first_s: float | None = None  # set-up and first step; `soft_s` is about steps


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about one rank, and why."""

    rank: int
    action: str  # probe | interrupt | kill
    reason: str


def soft_limit(view: View, learned: Learned, own: Own) -> float:
    """Seconds of silence after which `view` is believed to hang; 0 where no limit applies."""
    if view.phase in ("none", "paused", "waiting"):
        return 0.0
    if view.phase == "declared":
        return view.limit_s
    if view.phase == "first":
        return _first_limit(view, learned, own)
    if own.soft_s is not None:
        return own.soft_s
    if view.steps_here < LEARN_STEPS:
        return CEILING_S
    floor = IDLE_FLOOR_S if view.cpu_share < BUSY_SHARE else BUSY_FLOOR_S
    limit = max(floor, MULTIPLE * learned.worst_gap_s)
    if view.step == learned.doubled_step:
        limit *= 2**learned.doublings
    return min(CEILING_S, limit) if learned.worst_gap_s * 2 < CEILING_S else 2 * learned.worst_gap_s


def _first_limit(view: View, learned: Learned, own: Own) -> float:
    """Set-up compiles, loads and restores: a limit for steps says nothing of it (HD-01)."""
    if own.first_s is not None:
        return own.first_s
    if learned.worst_first_s == 0:
        return FIRST_CEILING_S
    limit = max(CEILING_S, own.soft_s or 0.0, 3 * learned.worst_first_s)
    if view.step == learned.doubled_step:  # a restore from a slower tier takes longer than the set-ups so far
        limit *= 2**learned.doublings
    return min(FIRST_CEILING_S, limit)


def exempt(view: View) -> bool:
    """True while this rank's phase excuses the whole world from suspicion."""
    return view.phase in ("paused", "first") or (view.phase == "declared" and view.limit_s == 0.0)


def judge(views: Sequence[View], learned: Learned, own: Own) -> tuple[Verdict, ...]:
    """Return what to do now, at most one interrupt or kill a round; nothing when all is well."""
    limits = {v.rank: soft_limit(v, learned, own) for v in views}
    overdue = [v for v in views if limits[v.rank] and v.silent_s > limits[v.rank]]
    excused = any(exempt(v) for v in views)
    if excused:
        overdue = [v for v in overdue if v.phase in ("declared", "first")]
    elif any(v.phase == "declared" for v in views):  # a declared phase with a limit excuses those who wait for it
        overdue = [v for v in overdue if v.phase == "declared"]
    hard = [v for v in overdue if own.hard_s is not None and v.silent_s > own.hard_s and not v.waiting]
    if hard:
        return tuple(
            Verdict(v.rank, "kill", f"no progress for {v.silent_s:.1f} s {_place(v)}, --hard-timeout {own.hard_s:g}")
            for v in hard
        )
    if overdue:
        return _condemn(overdue, limits) if not _behind(overdue, views, limits) else _ask(views, limits, overdue)
    return () if excused else _ask(views, limits, ())


def _ask(views: Sequence[View], limits: Mapping[int, float], overdue: Sequence[View]) -> tuple[Verdict, ...]:
    half = [v for v in views if limits[v.rank] and v.silent_s > PROBE_SHARE * limits[v.rank] and not _asked(v)]
    return tuple(Verdict(v.rank, "probe", "overdue" if v in overdue else "silent for half its limit") for v in half)


def _behind(overdue: Sequence[View], views: Sequence[View], limits: Mapping[int, float]) -> bool:
    """True while all who are overdue wait for somebody who is not, and who has a limit of its own.

    It is slow (busy, so believed longer: rule 3) or came to this step later; with its own limit the wait is over.
    """
    if not all(v.waiting for v in overdue):
        return False
    return any(limits[v.rank] and not v.waiting for v in views if v not in overdue)


def _asked(view: View) -> bool:
    """True when it has been asked since its last mark, answered or not."""
    return view.probe_age_s is not None or view.waiting is not None


def _condemn(overdue: Sequence[View], limits: dict[int, float]) -> tuple[Verdict, ...]:
    unheard = [v for v in overdue if not _asked(v)]
    if unheard:  # ask before judging; the answer, or its absence, is the evidence
        return tuple(Verdict(v.rank, "probe", "overdue") for v in unheard)
    wedged = [v for v in overdue if v.state in "Tt" or (v.probe_age_s is not None and v.probe_age_s > PROBE_PATIENCE_S)]
    if wedged:
        return tuple(Verdict(v.rank, "kill", _wedged(v)) for v in wedged)
    if any(v.probe_age_s is not None for v in overdue):
        return ()  # an answer may still come
    culprit = min(overdue, key=lambda v: (v.waiting is not False, v.step, v.rank))
    busy = "burning CPU" if culprit.cpu_share >= BUSY_SHARE else "idle"
    return (
        Verdict(
            culprit.rank,
            "interrupt",
            f"no progress for {culprit.silent_s:.1f} s {_place(culprit)}, {busy}; limit {limits[culprit.rank]:.1f} s",
        ),
    )


def _place(view: View) -> str:
    """Say where it stands: its phase, and the last step it has done."""
    where = {"first": "in set-up or the first step", "declared": f"in the phase {view.name!r}"}.get(view.phase, "")
    return f"{where}, after step {view.step}" if where and view.step else where or f"after step {view.step}"


def _wedged(view: View) -> str:
    if view.state in "Tt":
        return f"stopped (state {view.state}) for {view.silent_s:.1f} s"
    return f"does not answer (its interpreter lock is held, or it is starved); silent for {view.silent_s:.1f} s"
