"""From one look at every rank after another to what is judged: pure.

Rule 1: time in which we did not look ourselves does not count (H5): the machine slept, the job was stopped, we starved.
Rule 2: what a rank answered is about the silence in which it was asked; with its end the answer is void.
Rule 3: who waits for others teaches the time of its step, and nothing about the place where it waits.
Rule 4: once a generation is being left nothing is learned: silences are ended by us.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.launcher.core.learned import Learned, Lesson, kind_of, place_of
from everstep.launcher.core.limits import MOVES_S, PROBE_PATIENCE_S, View
from everstep.launcher.core.monitors import Gap, Watched, claim

LOOK_S = 1.0
"""Looks come five times a second; of a longer gap between two of them this much counts."""
_TEACH = ("first", "step", "after")
MOST_GAPS = 64
_SHORTEST_S = 0.1
"""Below it the kernel's count of CPU time says nothing."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What can be seen of one rank from outside at one moment: its page, /proc, and what it answered when asked."""

    rank: int
    generation: int
    step: int
    from_step: int
    phase: str
    mark_s: float  # its last step, ping or change of phase
    moved_s: float  # when its interpreter was last seen to run
    state: str
    cpu_s: float
    pinged: bool = False  # in this generation
    limit_s: float = 0.0  # of a declared phase
    name: str = ""
    asked_s: float | None = None  # when the question was sent that has not been answered
    heard_s: float | None = None  # when its last answer came
    waiting: bool = False  # that answer: it waits for others
    stack: str = ""
    undeclared: bool = False  # it says nothing of its steps
    turns: int = 0  # of its loop, as far as they can be seen
    turned_s: float = 0.0  # the last
    inside: bool = False  # its last answer: it stands in that loop
    places: int = 0  # at which it was seen since its mark
    watched: Watched | None = None  # what its own monitor says
    deaf: bool = False  # it answers no question: its script knows nothing of us

    @property
    def counted(self) -> "Glance":
        """The same with turns for steps, where nothing else is known of those."""
        if not self.turns:
            return self
        return replace(self, step=self.turns, from_step=0, mark_s=max(self.mark_s, self.turned_s))

    @property
    def sign_s(self) -> float:
        """Its last sign of any kind."""
        return max(self.mark_s, self.moved_s)


@dataclass(frozen=True, slots=True)
class Track:
    """One rank, and its present silence."""

    seen: Glance
    away_s: float = 0.0  # not looked at since its mark
    still_away_s: float = 0.0  # since its last sign of any kind
    mark_cpu_s: float = 0.0  # what it had used by then
    still_cpu_s: float = 0.0
    void: bool = False  # what it was asked, or answered, before this look is about a silence that has ended

    def quiet(self, now: float) -> float:
        """Seconds since its mark that were looked at."""
        return max(0.0, now - self.seen.mark_s - self.away_s)

    def still(self, now: float) -> float:
        """The same since its last sign of any kind."""
        return max(0.0, now - self.seen.sign_s - self.still_away_s)

    def follow(self, glance: Glance, now: float, away: float) -> "Track":
        """Take in the next look; `away` seconds before it were not looked at."""
        last = self.seen
        marked, signed = glance.mark_s != last.mark_s, glance.sign_s != last.sign_s
        moves = now - glance.sign_s < MOVES_S
        since = glance.mark_s if moves else glance.sign_s
        ended = marked or (signed and last.sign_s + MOVES_S < glance.sign_s)
        asked, heard = glance.asked_s, glance.heard_s
        void = ended or (asked is not None and asked < since) or (heard is not None and heard < since)
        return Track(
            replace(glance, asked_s=None, heard_s=None) if void else glance,
            away_s=min(away, now - glance.mark_s) if marked else self.away_s + away,
            still_away_s=min(away, now - glance.sign_s) if signed else self.still_away_s + away,
            mark_cpu_s=glance.cpu_s if marked else self.mark_cpu_s,
            still_cpu_s=glance.cpu_s if signed else self.still_cpu_s,
            void=void and (asked is not None or heard is not None),
        )

    def view(self, now: float, gaps: Sequence[Gap] = ()) -> View:
        """Return it as it is judged. `gaps`: when nobody looked."""
        held = None if self.seen.watched is None else claim(self.seen.watched, now, gaps)
        view = self._view(now)
        if held is None:
            return view
        return replace(
            view, monitor=held.what, monitor_s=held.quiet_s, monitor_limit_s=held.limit_s, monitor_firm=held.firm
        )

    def _view(self, now: float) -> View:
        seen, quiet, still = self.seen, self.quiet(now), self.still(now)
        base, since = (self.mark_cpu_s, quiet) if still < MOVES_S else (self.still_cpu_s, still)
        answered = seen.heard_s is not None
        deaf = seen.asked_s is not None and now - seen.asked_s > PROBE_PATIENCE_S
        inside = not seen.undeclared or (seen.inside if answered else deaf)
        return View(
            rank=seen.rank,
            step=seen.step,
            silent_s=quiet,
            still_s=still,
            phase=seen.phase,
            limit_s=seen.limit_s,
            name=seen.name,
            steps_here=seen.step - seen.from_step if inside else 0,
            undeclared=seen.undeclared,
            turns=seen.turns,
            places=seen.places,
            pinged=seen.pinged,
            state=seen.state,
            cpu_share=(seen.cpu_s - base) / max(since, _SHORTEST_S),
            silent_share=(seen.cpu_s - self.mark_cpu_s) / max(quiet, _SHORTEST_S),
            probe_age_s=None if seen.asked_s is None else now - seen.asked_s,
            waiting=seen.waiting if answered else None,
            place=place_of(seen.stack) if answered else "",
            kind=kind_of(seen.stack) if answered else "",
            deaf=seen.deaf,
            beats=seen.watched.beats + seen.watched.events if seen.watched is not None else 0,
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """All that is remembered from one look to the next."""

    learned: Learned = field(default_factory=Learned)
    tracks: Mapping[int, Track] = field(default_factory=dict[int, Track])
    looked_s: float | None = None
    running_s: float = 0.0
    """How long this generation has been looked at."""
    lessons: tuple[Lesson, ...] = ()
    """What the last look has taught."""
    gaps: tuple[Gap, ...] = ()
    """When nobody looked, the newest last."""

    def look(self, glances: Sequence[Glance], now: float, *, runs: bool = True) -> "Memory":
        """Take in one look at every rank of a generation; not `runs`: it is being left."""
        gap = 0.0 if self.looked_s is None else now - self.looked_s
        away, running_s = max(0.0, gap - LOOK_S), self.running_s + min(gap, LOOK_S)
        tracks, lessons = dict[int, Track](), list[Lesson]()
        for glance in (one.counted for one in glances):
            known = self.tracks.get(glance.rank)
            if known is None or known.seen.generation != glance.generation:
                tracks[glance.rank] = Track(glance, mark_cpu_s=glance.cpu_s, still_cpu_s=glance.cpu_s)
                running_s = 0.0
            else:
                lessons += _lessons(known, glance, away) if runs else ()
                tracks[glance.rank] = known.follow(glance, now, away)
        learned = functools.reduce(Learned.taught, lessons, self.learned)
        if tracks:
            learned = learned.passed(min(track.seen.step for track in tracks.values()), running_s)
        gaps = (*self.gaps, (now, away))[-MOST_GAPS:] if away else self.gaps
        return Memory(learned, tracks, now, running_s, tuple(lessons), gaps)

    def views(self, now: float) -> tuple[View, ...]:
        """Return what is to be judged."""
        return tuple(track.view(now, self.gaps) for _, track in sorted(self.tracks.items()))

    def alarmed(self, view: View, limit_s: float) -> "Memory":
        """An alarm was raised about `view`, whose limit was `limit_s`."""
        return replace(
            self, learned=self.learned.hung(view.step if view.counted else None, view.place, limit_s, self.running_s)
        )


def _lessons(known: Track, glance: Glance, away: float) -> Iterator[Lesson]:
    """A silence of one rank may have ended by itself: a step is done, or its interpreter runs again."""
    last = known.seen
    lasted = max(0.0, glance.mark_s - last.mark_s - known.away_s - away)
    if last.phase == "first" and glance.phase == "step":
        yield "set-up", "", lasted, 0
    elif last.phase == "step" and glance.step > last.step and glance.from_step == last.from_step and _told(last):
        yield "step", "", lasted, glance.step - last.step
    silence = glance.sign_s - last.sign_s - known.still_away_s - away
    if last.phase in _TEACH and silence > MOVES_S and last.heard_s is not None and not last.waiting:
        yield "silence", place_of(last.stack), silence, 0


def _told(last: Glance) -> bool:
    """Before a loop has turned for the first time there was its set-up as well."""
    return not last.undeclared or last.turns > 0
