"""When silence is a hang: limits learned from the run, evidence asked for before anything hard is done.

A rank gives two signs. A mark: a step is done, `ping` was called, a phase was entered. And its interpreter runs: the
main thread executes bytecode, whatever it is about. Silent is who gives no mark, still is who does not run either.

Rule 1: a hang is a property of the world (H1): while any rank is in an exempt phase nobody is suspected, except a rank
        that has outstayed the limit of its own phase. Ranks that wait in a collective are not judged before the one
        they wait for: its own limit counts.
Rule 2: stillness has a limit that is learned from the step times (`learned.py`), once `LEARN_STEPS` steps of this
        generation are done (H3); until then the ceiling holds.
Rule 3: idle stillness (no CPU used) is believed sooner than busy stillness (H2: slow is not hung). A rank that may wait
        for others in C++ (it burns CPU: a device's wait spins; it stands in a device's wait, or in a backward) is not
        judged while another, no further than it, is within its own limit and does not wait.
Rule 4: who moves without a mark is believed for long: an evaluation looks like that. A rank that has pinged has said
        that it will ping again: silence alone counts.
Rule 5: a rank whose stack is in the middle of a save, a compilation or a wait for a batch has the time for that.
Rule 6: hard action needs evidence: a stopped process, or one that does not answer a probe (its interpreter lock is
        held), or the operator's own limit. All else gets the soft action, which costs one step when it is wrong.
Rule 7: an alarm raises the limit of its place and of its step tenfold, until that step is passed (H2).
Rule 8: a function that declares no steps has turns of its loop for steps, as far as they can be seen (ADR 0012). What
        is learned from them is held against a rank that stands in that loop, or cannot say where it stands. All else,
        set-up and what follows the loop included, has the time after which NVRx ends a rank, and may run for ever.
Rule 9: who runs without a mark at a few lines, for longer than a compilation takes, loops for ever; an evaluation is at
        many.
Rule 10: what a rank's own monitor says of it (`monitors.py`) is judged here too, by the same ladder: one fault, one
        restart. While the rank waits for others it is they who are judged, for as long as their own limits say.
Rejected: any limit below `IDLE_FLOOR_S`, and none at all (an endless loop of bytecode would hold a job for ever).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.launcher.core.learned import LONGEST_S, Learned

LEARN_STEPS = 3
IDLE_FLOOR_S = 5.0
BUSY_FLOOR_S = 10.0
CEILING_S = 60.0  # NVRx's soft timeout: what holds where nothing is learned
UNDECLARED_S = 90.0  # NVRx's hard timeout: a function whose loop is not seen to turn
POLL_S = 120.0  # its interpreter runs, yet it burns no CPU: it polls, or waits for a batch
FIRST_CEILING_S = 600.0  # set-up and first step; after the loop; a save, a compilation
LOOP_S = LONGEST_S  # its interpreter runs and burns CPU
SPIN_S = 600.0  # the same at few places
FEW_PLACES = 8
MULTIPLE = 6.0
PLACE_MULTIPLE = 2.0
MOVES_S = 1.0  # an interpreter that ran within this time runs
BUSY_SHARE = 0.2  # of one core since the last sign; below it a process is idle
PROBE_SHARE = 0.5  # of the limit: from here on a rank is asked whether it hears us
PROBE_PATIENCE_S = 1.5
NEAR_SHARE = 0.6  # of the limit: from here on evidence is gathered that takes time
_KIND_S: Mapping[str, float] = {"save": FIRST_CEILING_S, "compile": FIRST_CEILING_S, "batch": POLL_S}
_WAITS = ("device", "backward")
_BUSY_STATES = "RD"  # runs or would run; in a disk's or a driver's hands
_SLOW_PHASES = ("first", "after")
_DECLARED = ("declared", "paused", "waiting")  # phases that say themselves how long they may be


@dataclass(frozen=True, slots=True)
class View:
    """What is known of one rank at one moment, without its help."""

    rank: int
    step: int
    silent_s: float  # since its last mark
    phase: str  # first | step | after | declared | paused | waiting | none
    limit_s: float  # of a declared phase; 0: none
    steps_here: int  # steps done in this generation
    state: str  # of the process, as in /proc
    cpu_share: float  # of one core: since its last sign where it is still, since its mark where it moves
    still_s: float = 0.0  # since its last sign of any kind
    pinged: bool = False  # `ping` was called in this generation
    probe_age_s: float | None = None  # a probe that has not been answered; None: none outstanding
    waiting: bool | None = None  # its stack stands in a collective, and waits for others; None: not known
    name: str = ""  # of a declared phase
    place: str = ""  # the user's line that it stands at; empty: not known
    kind: str = ""  # what its stack is in the middle of
    undeclared: bool = False  # its steps, if any, are turns of a loop; `steps_here` counts only where it stands in it
    turns: int = 0  # of that loop
    places: int = 0  # at which it was seen since its mark; 0: not known
    silent_share: float | None = None  # `cpu_share` since its mark, whether it moves or not; None: the same
    monitor: str = ""  # what its own monitor waits for; empty: nothing
    monitor_s: float = 0.0  # for so long
    monitor_limit_s: float = 0.0
    monitor_firm: bool = False  # in place of what is learned
    deaf: bool = False  # its script knows nothing of us: it is asked once it is overdue, by a signal
    beats: int = 0  # heartbeats and sections, where no steps are counted

    @property
    def busy(self) -> bool:
        """It uses a core, or would."""
        return self.cpu_share >= BUSY_SHARE or self.state in _BUSY_STATES

    @property
    def worked(self) -> bool:
        """It has used a core in this silence, or would: who has evaluated for minutes may then wait for a moment."""
        share = self.cpu_share if self.silent_share is None else self.silent_share
        return share >= BUSY_SHARE or self.state in _BUSY_STATES

    @property
    def counted(self) -> bool:
        """Its step number says how far it is."""
        return not self.undeclared or self.turns > 0 or self.pinged

    @property
    def spins(self) -> bool:
        """It runs, in a loop of steps, at a few lines."""
        known = self.phase == "step" and (not self.undeclared or self.turns >= LEARN_STEPS)
        return known and 0 < self.places <= FEW_PLACES

    @property
    def may_wait(self) -> bool:
        """It waits for others, or stands in a call of C++ that does."""
        return bool(self.waiting) or self.kind in _WAITS or (self.busy and not self.moves)

    @property
    def moves(self) -> bool:
        """Its interpreter runs."""
        return self.still_s < MOVES_S


@dataclass(frozen=True, slots=True)
class Own:
    """The operator's own limits; None: learned."""

    soft_s: float | None = None
    hard_s: float | None = None
    first_s: float | None = None  # set-up and first step, and what follows the loop; `soft_s` is about steps
    automatic: bool = False  # they are about stillness, as NVRx's are, until `ping` was called


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about one rank, and why."""

    rank: int
    action: str  # probe | interrupt | kill
    reason: str


@dataclass(frozen=True, slots=True)
class Limit:
    """What is held against a rank, and how long that may last; 0: no limit applies."""

    quiet_s: float
    limit_s: float
    what: str = ""  # of the rank's own monitor

    @property
    def over(self) -> bool:
        """It has lasted too long."""
        return 0.0 < self.limit_s < self.quiet_s


def limit_of(view: View, learned: Learned, own: Own) -> Limit:
    """Return what applies to `view` now."""
    limit = _limit_of(view, learned, own)
    if not view.monitor_limit_s or view.phase in _DECLARED:
        return limit
    monitor = Limit(view.monitor_s, view.monitor_limit_s, view.monitor)
    stands = view.monitor_firm and _explicit(view, own) is None
    return monitor if monitor.over or stands or not limit.limit_s else limit


def _explicit(view: View, own: Own) -> float | None:
    return own.first_s if view.phase in _SLOW_PHASES else own.soft_s


def _limit_of(view: View, learned: Learned, own: Own) -> Limit:
    if view.phase in ("none", "paused", "waiting"):
        return Limit(0.0, 0.0)
    if view.phase == "declared":
        return Limit(view.silent_s, view.limit_s)
    explicit = _explicit(view, own)
    if explicit is not None:
        return Limit(view.still_s if own.automatic and not view.pinged else view.silent_s, explicit)
    raised = learned.raised(view.step, view.place)
    still_s = max(raised, _still_limit(view, learned, own))
    if view.pinged and not view.undeclared:
        return Limit(view.silent_s, still_s)
    silence, still = Limit(view.silent_s, max(raised, _moving_limit(view, learned))), Limit(view.still_s, still_s)
    if view.undeclared and not view.pinged and view.steps_here < LEARN_STEPS:
        return still  # without marks silence says nothing
    return silence if silence.over or view.moves else still


def _still_limit(view: View, learned: Learned, own: Own) -> float:
    """How long an interpreter may not run."""
    if view.phase in _SLOW_PHASES:
        return _slow_limit(view, learned, own)
    known = _known(view, learned)
    if view.steps_here < LEARN_STEPS:
        return max(UNDECLARED_S if view.undeclared else CEILING_S, known)
    return max(BUSY_FLOOR_S if view.busy else IDLE_FLOOR_S, idle_limit(learned), known)


def _known(view: View, learned: Learned) -> float:
    """How long what its stack says may take."""
    return max(_KIND_S.get(view.kind, 0.0), PLACE_MULTIPLE * learned.worst_at(view.place))


def idle_limit(learned: Learned) -> float:
    """Return how long a rank may stand still and idle inside a step: the shortest limit there is."""
    typical = learned.typical_s
    return max(IDLE_FLOOR_S, 2 * typical, min(CEILING_S, MULTIPLE * typical))


def _moving_limit(view: View, learned: Learned) -> float:
    """How long an interpreter may run without a mark."""
    if view.pinged:  # of a loop that declares no steps: its pings may be far apart (rule 4)
        return max(CEILING_S, _known(view, learned))
    if view.worked:
        return SPIN_S if view.spins else LOOP_S
    return FIRST_CEILING_S if view.phase in _SLOW_PHASES else max(POLL_S, _KIND_S.get(view.kind, 0.0))


def _slow_limit(view: View, learned: Learned, own: Own) -> float:
    """Set-up compiles, loads and restores: limits of steps say nothing of it (HD-01). Nor of what follows the loop."""
    if view.phase == "after" or learned.worst_first_s == 0:
        return FIRST_CEILING_S
    return min(FIRST_CEILING_S, max(CEILING_S, own.soft_s or 0.0, 3 * learned.worst_first_s))


def near(view: View, learned: Learned, own: Own) -> bool:
    """Tell whether `view` may soon be called the cause of a hang."""
    limit = limit_of(view, learned, own)
    return limit.limit_s > 0 and limit.quiet_s > NEAR_SHARE * limit.limit_s and not view.waiting and _asked(view)


def exempt(view: View) -> bool:
    """True while this rank's phase excuses the whole world from suspicion."""
    return view.phase in ("paused", "first") or (view.phase == "declared" and view.limit_s == 0.0)


def judge(views: Sequence[View], learned: Learned, own: Own) -> tuple[Verdict, ...]:
    """Return what to do now, at most one interrupt or kill a round; nothing when all is well."""
    limits = {v.rank: limit_of(v, learned, own) for v in views}
    overdue = [v for v in views if limits[v.rank].over and not _held_up(v, views, limits)]
    excused = any(exempt(v) for v in views)
    if excused:
        overdue = [v for v in overdue if v.phase in ("declared", "first")]
    elif any(v.phase == "declared" for v in views):  # a declared phase with a limit excuses those who wait for it
        overdue = [v for v in overdue if v.phase == "declared"]
    hard = [v for v in overdue if own.hard_s is not None and limits[v.rank].quiet_s > own.hard_s and not v.waiting]
    if hard:
        return tuple(Verdict(v.rank, "kill", f"{_silence(v, limits)}, --hard-timeout {own.hard_s:g}") for v in hard)
    if overdue:
        return _condemn(overdue, limits) if not _behind(overdue, views, limits) else _ask(views, limits, overdue)
    return _ask(views, limits, ())


def _held_up(view: View, views: Sequence[View], limits: Mapping[int, Limit]) -> bool:
    """It may wait in C++ for another that is no further and is within its own limit (rule 3)."""
    if view.phase != "step" or view.moves or view.waiting or not view.may_wait or view.silent_s > LOOP_S:
        return False
    others = (o for o in views if o.rank != view.rank and o.phase == "step" and o.step <= view.step)
    return any(not o.may_wait and limits[o.rank].limit_s and not limits[o.rank].over for o in others)


def _ask(views: Sequence[View], limits: Mapping[int, Limit], overdue: Sequence[View]) -> tuple[Verdict, ...]:
    """Ask early: what a silence was about can be learned only from who was asked before it ended."""
    late = [v for v in views if _half_way(v, limits[v.rank]) and not _asked(v)]
    return tuple(Verdict(v.rank, "probe", "overdue" if v in overdue else "silent for half its limit") for v in late)


def _half_way(view: View, limit: Limit) -> bool:
    """Half of what a rank has that stands still in a step: set-ups and raised limits are learned from as well."""
    if not limit.limit_s or view.deaf:
        return False
    silent = view.turns > 0 and view.silent_s > PROBE_SHARE * POLL_S  # it runs: is that its loop?
    return silent or view.still_s > PROBE_SHARE * IDLE_FLOOR_S or limit.quiet_s > PROBE_SHARE * limit.limit_s


def _behind(overdue: Sequence[View], views: Sequence[View], limits: Mapping[int, Limit]) -> bool:
    """True while all who are overdue wait for somebody who is not, and who has a limit of its own.

    It is slow (busy, so believed longer: rule 3) or came to this step later; with its own limit the wait is over.
    """
    if not all(v.waiting for v in overdue):
        return False
    others = [limits[v.rank].limit_s for v in views if v not in overdue and not v.waiting]
    if any(limits[v.rank].what for v in overdue):  # those who go on beating may be waited for in vain
        return any(limits[v.rank].quiet_s < limits[v.rank].limit_s + most for v in overdue for most in others if most)
    return any(others)


def _asked(view: View) -> bool:
    """True when it has been asked in this silence, answered or not."""
    return view.probe_age_s is not None or view.waiting is not None


def _condemn(overdue: Sequence[View], limits: Mapping[int, Limit]) -> tuple[Verdict, ...]:
    unheard = [v for v in overdue if not _asked(v)]
    if unheard:  # ask before judging; the answer, or its absence, is the evidence
        return tuple(Verdict(v.rank, "probe", "overdue") for v in unheard)
    wedged = [v for v in overdue if v.state in "Tt" or (v.probe_age_s is not None and v.probe_age_s > PROBE_PATIENCE_S)]
    if wedged:
        return tuple(Verdict(v.rank, "kill", _wedged(v, limits)) for v in wedged)
    if any(v.probe_age_s is not None for v in overdue):
        return ()  # an answer may still come
    culprit = min(overdue, key=lambda v: (v.waiting is not False, v.kind in _WAITS, v.step, v.beats, v.rank))
    how = f"{'burning CPU' if culprit.busy else 'idle'}; limit {limits[culprit.rank].limit_s:.1f} s"
    return (Verdict(culprit.rank, "interrupt", f"{_silence(culprit, limits)}, {how}"),)  # a deaf one is ended by it


def _silence(view: View, limits: Mapping[int, Limit]) -> str:
    """Say how long it has been silent, in which phase, after which step."""
    limit = limits[view.rank]
    if limit.what:
        return f"{limit.what} for {limit.quiet_s:.1f} s"
    where = {
        "first": "in set-up or the first step",
        "declared": f"in the phase {view.name!r}",
        "after": "after the loop of steps",
    }.get(view.phase, "")
    done = f"after {view.turns} turns of its loop" if view.turns else f"after step {view.step}"
    place = f"{where}, {done}" if where and view.step else where or done
    return f"no progress for {limit.quiet_s:.1f} s {place}"


def _wedged(view: View, limits: Mapping[int, Limit]) -> str:
    limit = limits[view.rank]
    told = f"{_silence(view, limits)}; limit {limit.limit_s:.1f} s" if limit.what else ""
    if view.state in "Tt":
        return (
            f"stopped (state {view.state}); {told}"
            if told
            else f"stopped (state {view.state}) for {view.silent_s:.1f} s"
        )
    told = told or f"silent for {view.silent_s:.1f} s"
    return f"does not answer (its interpreter lock is held, or it is starved); {told}"
