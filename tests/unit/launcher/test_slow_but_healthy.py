"""Slow but healthy jobs are left alone and hung ones are not: whole jobs, simulated. Time is a number."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from everstep.launcher.core import limits
from everstep.launcher.core.limits import Own, Verdict
from everstep.launcher.core.memory import Glance, Memory

TICK_S = 0.05
LOOK_EVERY = 4  # ticks
SETUP_S = 0.5
BURST_S = 5.0  # a loop that polls wakes this often: torch's loaders do
UNSEEN = 7  # so many turns of a loop without optimizer are not counted yet

_FRAMES = {
    "save": "/usr/lib/python3.11/site-packages/torch/serialization.py",
    "compile": "/usr/lib/python3.11/site-packages/torch/_dynamo/convert_frame.py",
    "batch": "/usr/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
}


@dataclass(frozen=True)
class Work:
    """Some seconds of one rank: at a place, running bytecode or not, burning CPU or not."""

    seconds: float
    runs: bool = True  # its interpreter
    burns: bool = True
    place: str = "step"
    kind: str = ""  # what a library's frame on its stack says
    hears: bool = True  # False: holds the interpreter lock, or is stopped
    state: str = "S"
    wakes_s: float = 0.0  # polls: its interpreter runs for a moment this often
    pings_s: float = 0.0
    phase: str = ""
    places: int = 100  # at which it is seen while it runs
    turns: bool = True  # it is part of the loop

    @property
    def stack(self) -> str:
        own = f'  File "/user/{self.place}.py", line 7, in {self.place}\n    call()\n'
        return own + (f'  File "{_FRAMES[self.kind]}", line 9, in f\n    g()\n' if self.kind else "")


STEP = Work(0.05)
SLEEP = {"runs": False, "burns": False}
Story = Callable[[int, int, int], list[Work]]
"""(rank, step, generation): what the rank does in that step, before all meet."""


@dataclass
class Rank:
    """One rank."""

    number: int
    step: int = 0
    from_step: int = 0
    phase: str = "first"
    mark_s: float = 0.0
    moved_s: float = 0.0
    cpu_s: float = 0.0
    pinged: bool = False
    work: deque = field(default_factory=deque)
    done_s: float = 0.0  # of the first piece of work
    at_barrier: bool = False
    asked_s: float | None = None
    heard_s: float | None = None
    stack: str = ""
    waiting: bool = False
    undeclared: bool = False
    turns: int = 0
    turned_s: float = 0.0
    inside: bool = False

    def run(self, now: float) -> None:
        """Let one tick pass."""
        if self.at_barrier:
            return
        piece: Work = self.work[0]
        self.done_s += TICK_S
        if piece.phase and self.phase != piece.phase:
            self.phase, self.mark_s = piece.phase, now
        if piece.runs or (piece.wakes_s and self.done_s % piece.wakes_s < TICK_S):
            self.moved_s = now
        if piece.pings_s and self.done_s % piece.pings_s < TICK_S:
            self.mark_s, self.pinged = now, True
        self.cpu_s += TICK_S if piece.burns else 0.0
        if self.done_s >= piece.seconds:
            self.work.popleft()
            self.done_s, self.moved_s = 0.0, now  # from one call of C to the next there is some bytecode
            if piece.phase:
                self.phase, self.mark_s = "step", now
        if not self.work:
            self.at_barrier = True
            self.turns, self.turned_s = self.turns + self.undeclared, now if self.undeclared else 0.0

    def answer(self, now: float) -> None:
        """Answer what was asked, where it can be heard."""
        hears = self.at_barrier or not self.work or self.work[0].hears
        if self.asked_s is not None and hears:
            self.asked_s, self.heard_s, self.waiting = None, now, self.at_barrier
            self.stack = "" if self.at_barrier or not self.work else self.work[0].stack
            self.inside = self.at_barrier or not self.work or self.work[0].turns

    def glance(self, generation: int) -> Glance:
        """What is seen of it."""
        piece = None if self.at_barrier or not self.work else self.work[0]
        state, places = (piece.state, piece.places) if piece is not None else ("S", 0)
        step, since = (0, 0) if self.undeclared else (self.step, self.from_step)
        return Glance(
            rank=self.number, generation=generation, step=step, from_step=since, phase=self.phase, places=places,
            mark_s=self.mark_s, moved_s=self.moved_s, state=state, cpu_s=self.cpu_s, pinged=self.pinged,
            asked_s=self.asked_s, heard_s=self.heard_s, waiting=self.waiting, stack=self.stack, inside=self.inside,
            undeclared=self.undeclared, turns=self.turns if self.turns > UNSEEN else 0, turned_s=self.turned_s,
        )  # fmt: skip


@dataclass(frozen=True)
class Alarm:
    """One interrupt or kill."""

    at_s: float
    verdict: Verdict
    step: int  # done by all
    silent_s: float  # since the injured rank's last mark


@dataclass
class World:
    """A job: ranks that do a story's steps and meet after each, an agent that looks and interrupts."""

    story: Story
    total: int
    ranks: int = 2
    undeclared: bool = False  # a function that says nothing of its steps; its attempts begin at the first again
    own: Own = field(default_factory=Own)
    stopped: tuple[float, float] = (0.0, 0.0)  # (when, for how long): the whole job, the agent with it
    setup_s: float = SETUP_S
    now: float = 1000.0
    generation: int = 0
    memory: Memory = field(default_factory=Memory)
    alarms: list[Alarm] = field(default_factory=list)
    crew: list[Rank] = field(default_factory=list)

    def run(self, limit_s: float = 20_000.0, alarms: int = 20) -> "World":
        """Run until all steps are done; raises where it does not end."""
        began = self.now
        self._begin(0)
        for tick in self._ticks():
            if self.now - began > limit_s or len(self.alarms) > alarms:
                raise AssertionError(f"no end after {self.now - began:.0f} s and the alarms {self.alarms}")
            if self.stopped[1] and self.now - began > self.stopped[0]:
                self.now += self.stopped[1]
                self.stopped = (0.0, 0.0)
            for rank in self.crew:
                rank.run(self.now)
                rank.answer(self.now)
            if all(rank.at_barrier for rank in self.crew) and self._meet():
                return self
            if tick % LOOK_EVERY == 0:
                self._look()
        raise AssertionError("not reached")

    def _ticks(self) -> Iterator[int]:
        tick = 0
        while True:
            tick += 1
            self.now += TICK_S
            yield tick

    def _begin(self, step: int) -> None:
        self.crew = [Rank(n, step, step, mark_s=self.now, moved_s=self.now) for n in range(self.ranks)]
        for rank in self.crew:
            rank.undeclared, rank.phase = self.undeclared, "step" if self.undeclared else "first"
            rank.work = deque([Work(self.setup_s, turns=False), *self.story(rank.number, step + 1, self.generation)])

    def _meet(self) -> bool:
        for rank in self.crew:
            rank.step += 1
            rank.phase, rank.moved_s, rank.at_barrier = "step", self.now, False
            rank.mark_s = rank.mark_s if self.undeclared else self.now
            if rank.step < self.total:
                rank.work = deque(self.story(rank.number, rank.step + 1, self.generation))
        return self.crew[0].step >= self.total

    def _look(self) -> None:
        self.memory = self.memory.look([rank.glance(self.generation) for rank in self.crew], self.now)
        for number, track in self.memory.tracks.items():
            if track.void:
                self.crew[number].asked_s = self.crew[number].heard_s = None
        views = {view.rank: view for view in self.memory.views(self.now)}
        verdicts = limits.judge(tuple(views.values()), self.memory.learned, self.own)
        for verdict in verdicts:
            if verdict.action == "probe" and self.crew[verdict.rank].asked_s is None:
                self.crew[verdict.rank].asked_s = self.now
        strict = [verdict for verdict in verdicts if verdict.action != "probe"]
        for verdict in strict:
            view = views[verdict.rank]
            self.memory = self.memory.alarmed(view, limits.limit_of(view, self.memory.learned, self.own).limit_s)
            silent = self.now - max(self.crew[verdict.rank].mark_s, self.crew[verdict.rank].turned_s)
            self.alarms.append(Alarm(self.now, verdict, self.crew[0].step, silent))
        if strict:
            self.generation += 1
            self._begin(0 if self.undeclared else self.crew[0].step)


# Healthy: what issue 3 lists, at defaults and with nothing declared


def at(step: int, rank: int, *work: Work, every: bool = True) -> Story:
    """A story in which `rank` does `work` in `step` (in each generation anew, where `every`); all else is short."""

    def story(number: int, now: int, generation: int) -> list[Work]:
        slow = number == rank and now == step and (every or generation == 0)
        return [STEP, *work] if slow else [STEP]

    return story


EVALUATION = Work(40, place="evaluate")
CHILD = Work(40, **SLEEP, place="child")
SAVE = Work(60, **SLEEP, place="save", kind="save")
COMPILE = (Work(25, place="model", kind="compile"), Work(35, **SLEEP, place="model", kind="compile"))
STALL = Work(30, **SLEEP, place="train", kind="batch")
POLLED_STALL = Work(30, **SLEEP, place="train", kind="batch", wakes_s=BURST_S)


@pytest.mark.parametrize(("ranks", "undeclared"), [(2, False), (4, False), (2, True)])
@pytest.mark.parametrize(
    ("story", "alarms"),
    [
        (at(30, 0, EVALUATION), 0),
        (at(30, 0, CHILD), 1),
        (at(1, 0, Work(60)), 0),
        (at(1, 1, Work(60, **SLEEP)), 0),
        (at(30, 0, SAVE), 0),
        (at(700, 1, *COMPILE), 0),
        (at(30, 1, STALL), 0),
        (at(30, 1, POLLED_STALL), 0),
        (at(30, 0, Work(660, **SLEEP, place="save", kind="save", wakes_s=1.0)), 1),  # eleven minutes, and undeclared
        (at(30, 0, Work(1200, place="evaluate")), 0),
        (at(30, 0, Work(200, place="evaluate"), Work(4, **SLEEP, place="waits for a moment")), 0),
        (at(30, 0, Work(60, runs=False, place="big")), 1),  # a matmul, a sort
        (at(30, 0, Work(60, runs=False, burns=False, place="disk", state="D")), 1),
        (at(30, 0, Work(8, **SLEEP, place="held", hears=False)), 1),  # holds the interpreter lock
        (at(limits.LEARN_STEPS - 1, 0, Work(50, **SLEEP, place="second step")), 0),
    ],
)  # fmt: skip
def test_what_is_slow_is_not_hung(story, alarms, ranks, undeclared):
    total = 720 if story(1, 700, 0) != [STEP] else 80
    world = World(story, total, ranks=ranks, undeclared=undeclared).run()
    assert len(world.alarms) == alarms, world.alarms


def test_the_whole_job_stopped_and_continued():
    for when in (0.1, 1.0, 2.3):
        world = World(at(0, 0), total=200, stopped=(when, 30.0)).run()
        assert world.alarms == []
        assert world.memory.learned.longest_s < 2.0, "nor is it taken for a step"


def test_one_rank_recompiles_again_after_a_restart():
    """A fault of another kind sends all back; what compiled in the first generation compiles in the second as well."""

    def story(rank: int, step: int, generation: int) -> list[Work]:
        slow = rank == 1 and step in (700, 715)
        broken = [Work(1000, **SLEEP, place="lock")] if (rank, step, generation) == (0, 710, 0) else []
        return [STEP, *(COMPILE if slow else ()), *broken]

    world = World(story, total=730).run()
    assert [(a.step, a.verdict.rank) for a in world.alarms] == [(709, 0)]
    assert world.alarms[0].silent_s < limits.IDLE_FLOOR_S + 1


def test_one_false_alarm_teaches_the_place_and_costs_no_other_place_its_limit():
    """Every 20th step rank 0 waits for a child, longer and longer; at step 96 something else hangs."""

    def story(rank: int, step: int, generation: int) -> list[Work]:
        if rank == 0 and step % 20 == 0:
            return [STEP, Work(15 + step / 10, **SLEEP, place="child")]
        if (rank, step, generation) == (1, 96, 1):  # the alarm at step 20 has ended generation 0
            return [STEP, Work(100_000, **SLEEP, place="socket")]
        return [STEP]

    world = World(story, total=120).run()
    assert [(a.verdict.rank, a.step) for a in world.alarms] == [(0, 19), (1, 95)]
    assert world.alarms[1].silent_s < 2 * limits.IDLE_FLOOR_S
    child = next(name for name in world.memory.learned.places if "child" in name)
    assert world.memory.learned.worst_at(child) == pytest.approx(25, abs=0.5)


def test_long_steps_are_learned():
    """Steps of 45 s, idle for the interpreter (one call of C++), from the first on; each at a line of its own."""

    def story(rank: int, step: int, generation: int) -> list[Work]:
        return [Work(45, **SLEEP, place=f"line_{step % 7}")]

    world = World(story, total=30).run()
    assert world.alarms == []
    assert world.memory.learned.typical_s == pytest.approx(45, abs=1)


SLOW = [
    lambda s: Work(s, place="runs"),
    lambda s: Work(s, **SLEEP, place="idle"),
    lambda s: Work(s, runs=False, place="burns"),
    lambda s: Work(s, **SLEEP, place="save", kind="save"),
    lambda s: Work(s, runs=False, place="compile", kind="compile"),
    lambda s: Work(s, **SLEEP, place="batch", kind="batch", wakes_s=BURST_S),
    lambda s: Work(s, **SLEEP, place="holds the lock", hears=False),
    lambda s: Work(s, place="pings", pings_s=2.0),
]


def in_hundreds(first, count):
    """The long tier's seeds, as cases that several workers can share."""
    return [pytest.param(seed, 100, marks=pytest.mark.long) for seed in range(first, first + count, 100)]


def healthy(seed: int) -> tuple[Story, int, int]:
    """A job of some steps in which ranks are slow now and then, each in its own way, up to a minute."""
    dice = random.Random(seed)
    base, ranks, total = dice.choice((0.05, 0.05, 0.3, 2.0, 20.0)), dice.choice((2, 2, 3, 5)), 40
    slow = {
        (dice.randrange(ranks), dice.randrange(1, total + 1)): dice.choice(SLOW)(dice.uniform(1, 60))
        for _ in range(dice.randrange(4))
    }

    def story(rank: int, step: int, generation: int) -> list[Work]:
        piece = slow.get((rank, step))
        return [Work(base, place="train"), *([piece] if piece else [])]

    return story, ranks, total


@pytest.mark.parametrize(("first", "count"), [(0, 12), *in_hundreds(1000, 3000)])
def test_no_healthy_job_ends_in_a_loop_of_restarts(first, count):
    """Two alarms at most after one step: a third in a row would end the job (recovery/core/policy)."""
    for seed in range(first, first + count):
        story, ranks, total = healthy(seed)
        world = World(story, total, ranks=ranks).run()
        after = [a.step for a in world.alarms]
        assert all(after.count(step) <= 2 for step in after), (seed, world.alarms)
        assert len(after) <= 4, (seed, world.alarms)


# Hung: each class is ended, within its limit

FOR_EVER = 10_000_000.0
HANGS = [
    (Work(FOR_EVER, **SLEEP, place="sleep"), "interrupt", 6.0),
    (Work(FOR_EVER, runs=False, place="spins in C"), "interrupt", 11.5),
    (Work(FOR_EVER, **SLEEP, place="held", hears=False), "kill", 8.0),
    (Work(FOR_EVER, runs=False, place="held", hears=False), "kill", 12.0),
    (Work(FOR_EVER, **SLEEP, place="stopped", hears=False, state="T"), "kill", 6.0),
    (Work(FOR_EVER, **SLEEP, place="polls", wakes_s=0.5), "interrupt", 122.0),
    (Work(FOR_EVER, **SLEEP, place="loader", kind="batch", wakes_s=BURST_S), "interrupt", 122.0),
    (Work(FOR_EVER, **SLEEP, place="save", kind="save"), "interrupt", 602.0),
    (Work(FOR_EVER, place="loops", places=2), "interrupt", 602.0),
    (Work(FOR_EVER, place="wanders"), "interrupt", 1802.0),
]


@pytest.mark.sample(17)
@pytest.mark.parametrize("undeclared", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("work", "action", "within_s"), HANGS, ids=lambda w: w.place if isinstance(w, Work) else None)
def test_every_hang_is_ended_and_its_rank_named(work, action, within_s, rank, undeclared):
    world = World(at(30, rank, work, every=False), total=60, ranks=3, undeclared=undeclared).run()
    (alarm,) = world.alarms
    assert (alarm.verdict.rank, alarm.verdict.action, alarm.step) == (rank, action, 29)
    assert alarm.silent_s < within_s + 1


def test_a_loop_of_bytecode_is_seen_at_once_where_ping_is_armed():
    """Steps of 4 s that ping twice a second; then one that runs on and pings no more."""

    def story(rank: int, step: int, generation: int) -> list[Work]:
        hangs = (rank, step, generation) == (1, 20, 0)
        return [Work(FOR_EVER, place="loops")] if hangs else [Work(4.0, pings_s=0.5)]

    world = World(story, total=30).run()
    ((alarm),) = world.alarms
    assert (alarm.verdict.rank, alarm.step) == (1, 19)
    assert alarm.silent_s < limits.MULTIPLE * 4.0 + 2


def test_a_rank_that_never_enters_the_collective_is_the_culprit_and_not_those_who_wait_in_it():
    def story(rank: int, step: int, generation: int) -> list[Work]:
        return [STEP, *([Work(FOR_EVER, **SLEEP, place="elsewhere")] if (rank, step, generation) == (3, 9, 0) else [])]

    world = World(story, total=20, ranks=5).run()
    assert [(a.verdict.rank, a.verdict.action) for a in world.alarms] == [(3, "interrupt")]


def test_a_hang_in_set_up_or_after_the_loop_ends_too():
    world = World(at(1, 1, Work(FOR_EVER, **SLEEP, place="set-up"), every=False), total=5).run()
    assert [a.verdict.rank for a in world.alarms] == [1]
    assert world.alarms[0].silent_s < limits.FIRST_CEILING_S + 2
    after = Work(FOR_EVER, **SLEEP, place="final save", phase="after")
    world = World(at(20, 0, after, every=False), total=20).run()
    assert [a.verdict.rank for a in world.alarms] == [0]
    assert "after the loop of steps" in world.alarms[0].verdict.reason


def test_a_hang_that_comes_again_and_again_ends_the_job_soon():
    """Ten times the time after each alarm, and the third in a row is the last: 5 s, 60 in the first step, 600."""
    story = at(30, 1, Work(FOR_EVER, **SLEEP, place="deterministic"))
    for undeclared, expected in ((False, [5, 60, 600]), (True, [5, 50, 500])):
        world = World(story, total=60, undeclared=undeclared)
        with pytest.raises(AssertionError, match="no end"):
            world.run(alarms=2)
        assert [a.silent_s for a in world.alarms] == pytest.approx(expected, abs=1.5)
        assert {a.verdict.rank for a in world.alarms} == {1}


def test_a_second_hang_at_the_place_of_the_first_is_seen_as_soon_once_the_world_has_come_further():
    """A hang that was ended did not come back by itself: it has taught its place nothing."""
    sleeps = Work(FOR_EVER, **SLEEP, place="sleeps")

    def story(rank: int, step: int, generation: int) -> list[Work]:
        return [STEP, *([sleeps] if rank == 1 and step == 20 + 5 * generation and generation < 3 else [])]

    world = World(story, total=60, undeclared=True).run()
    assert [a.silent_s for a in world.alarms] == pytest.approx([5, 5, 5], abs=1.5)
    assert [a.step for a in world.alarms] == [19, 24, 29]


def test_set_up_and_what_follows_the_loop_are_not_judged_by_its_turns():
    """Idle for a minute and more, undeclared; a hang there has NVRx's own time."""
    for place in (at(12, 0, Work(60, **SLEEP, place="outside", turns=False)), at(1, 1, Work(80, **SLEEP, turns=False))):
        assert World(place, total=40, undeclared=True).run().alarms == []
    world = World(at(12, 0, Work(FOR_EVER, **SLEEP, turns=False), every=False), total=40, undeclared=True).run()
    assert [a.silent_s for a in world.alarms] == pytest.approx([limits.UNDECLARED_S], abs=1.5)


def test_where_no_turn_is_seen_an_alarm_is_settled_by_time():
    """A function whose loop cannot be seen: three times the time for the second alarm, and no more for a later one."""
    hangs = Work(FOR_EVER, **SLEEP, place="sleeps", turns=False)

    def story(rank: int, step: int, generation: int) -> list[Work]:
        slow = rank == 1 and ((step == 1 and generation < 2) or (step == 6 and generation == 2))
        return [Work(400.0), *([hangs] if slow else [])]

    world = World(story, total=UNSEEN, undeclared=True).run()
    ceiling = limits.UNDECLARED_S
    assert [a.silent_s for a in world.alarms[:2]] == pytest.approx([400 + ceiling, 400 + 3 * ceiling], abs=2)
    (last,) = world.alarms[2:]
    assert (last.step, last.silent_s) == (5, pytest.approx(400 + ceiling, abs=2)), "it had come further than before"


@pytest.mark.parametrize(("first", "count"), [(0, 8), *in_hundreds(1000, 2000)])
def test_a_hang_at_any_step_of_any_healthy_job_is_found(first, count):
    for seed in range(first, first + count):
        dice = random.Random(-seed - 1)
        inner, ranks, total = healthy(seed)
        plain = [s for s in range(2, total + 1) if all(len(inner(r, s, 0)) == 1 for r in range(ranks))]
        where, hang = (dice.randrange(ranks), dice.choice(plain)), dice.choice(HANGS)

        done = []

        def story(rank, step, generation, inner=inner, where=where, hang=hang, done=done):
            if (rank, step) == where and not done:
                done.append(generation)
                return [*inner(rank, step, generation), hang[0]]
            return inner(rank, step, generation)

        world = World(story, total, ranks=ranks).run(limit_s=40_000)
        named = [a for a in world.alarms if (a.verdict.rank, a.step) == (where[0], where[1] - 1)]
        assert named, (seed, world.alarms)
