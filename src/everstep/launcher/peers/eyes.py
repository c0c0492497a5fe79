"""What can be seen of one worker without its help: its page, and what the kernel says of it."""

from dataclasses import asdict
from typing import Any

from everstep.launcher.core.learned import Lesson
from everstep.launcher.core.memory import Glance, Memory
from everstep.launcher.glances import glance
from everstep.launcher.peers.core.books import JUMP_S
from everstep.process import kernel
from everstep.process.page import Page, Phase

LOOK_S = 0.2


class Eyes:
    """Looks at fixed intervals, and remembers what silence was legitimate."""

    def __init__(self, page: Page, pid: int) -> None:
        self._page, self._pid = page, pid
        self._memory = Memory()
        self._lessons: list[Lesson] = []
        self._asked_s: float | None = None
        self._heard_s: float | None = None
        self._waiting = self._inside = False
        self.rank, self.generation = -1, -1
        self.attached = False  # it has come to its wrapped call
        self.stack = ""

    def enter(self, generation: int, rank: int) -> None:
        """A generation begins."""
        self.generation, self.rank = generation, rank

    @property
    def step(self) -> int | None:
        """The last step done; None before the first."""
        return self._page.read().step or None

    def ask(self, now: float) -> bool:
        """A probe is wanted; True where none is under way."""
        new = self._asked_s is None and self._heard_s is None
        self._asked_s = now if new else self._asked_s
        return new

    def answered(self, now: float, *, waiting: bool, stack: str, inside: bool) -> None:
        """It hears us, and this is where it stands."""
        self._asked_s, self._heard_s, self._waiting, self.stack, self._inside = None, now, waiting, stack, inside

    def look(self, now: float, gap_s: float, *, runs: bool) -> bool:
        """One look; True where we ourselves had not run for a while: silence of that time is void (H5).

        Not `runs`: the generation is being left, and what ends a silence now is us.
        """
        jumped = gap_s > JUMP_S
        if jumped:
            self._page.tick(now)
        self._memory = self._memory.look([self._glance()], now, runs=runs)
        self._lessons += self._memory.lessons
        if self._memory.tracks[self.rank].void:
            self._asked_s = self._heard_s = None
        return jumped

    def _glance(self) -> Glance:
        return glance(
            self.rank, self._page.read(), kernel.status(self._pid), asked_s=self._asked_s, heard_s=self._heard_s,
            waiting=self._waiting, stack=self.stack, inside=self._inside,
        )  # fmt: skip

    def deaf_s(self, now: float) -> float:
        """Seconds since the ticker thread last ran inside a call; 0 outside of one."""
        page = self._page.read()
        if not self.attached or page.phase == Phase.NONE or page.auto_s == 0:
            return 0.0
        return max(0.0, now - max(page.auto_s, page.started_s))

    def view(self, now: float) -> dict[str, Any]:
        """What the hub is shown: `launcher.core.limits.View` as it is now, and what was learned since the last time."""
        if self.rank not in self._memory.tracks:
            self._memory = self._memory.look([self._glance()], now)
        track = self._memory.tracks[self.rank]
        lessons, self._lessons = self._lessons, []
        return {
            "generation": track.seen.generation if self.attached else -1,
            "lessons": lessons,
            "view": asdict(track.view(now)),
        }
