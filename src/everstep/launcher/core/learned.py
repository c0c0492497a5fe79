"""What a run teaches about its own silences, and what a stack says of one.

Rule 1: a step's time is what nine of ten steps of all ranks do not exceed, so that one evaluation in the middle of a
        thousand steps changes nothing.
Rule 2: a longer silence that ended by itself belongs to the place where it was, a line of the user's own: there it
        may happen again, elsewhere it is as strange as before (H3).
Rule 3: after an alarm the place, and the step, have ten times the time (H2), three times where that was more than a
        minute, up to half an hour: so long do groups wait. When the world has passed that step, or where steps cannot
        be seen has run for longer than the attempt before, either the silence has come again and ended by itself (rule
        2), or it was a hang, and all is as before.
Rejected: limits as a multiple of the mean (one slow evaluation and it fires); the worst gap as a limit for every place
        (one slow evaluation and nothing fires any more); twice the time after an alarm (three in a row end a job).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

RECENT = 100  # steps that are remembered
QUANTILE = 0.9
ALARM_FACTOR, LATER_FACTOR = 10.0, 3.0
LONG_S = 60.0  # a limit above it is raised by the later factor
LONGEST_S = 1800.0  # how long groups wait in a collective: who is silent for longer is ended by his peers
MOST_PLACES = 256

_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<")
_OURS = __file__.rpartition("/launcher/")[0]
_KINDS = (
    ("save", ("/torch/serialization.py", "/torch/distributed/checkpoint/", "/safetensors/")),
    (
        "compile",
        (
            "/torch/_dynamo/convert_frame.py",
            "/torch/_inductor/compile_fx.py",
            "/torch/_inductor/async_compile.py",
            "/torch/_inductor/codecache.py",
            "/torch/utils/cpp_extension.py",
            "/triton/compiler/",
        ),
    ),
    ("batch", ("/torch/utils/data/dataloader.py", "/torchdata/stateful_dataloader/")),
)
_INNERMOST = (
    ("device", ("/torch/cuda/__init__.py", "/torch/cuda/streams.py")),
    ("backward", ("/torch/autograd/graph.py", "/torch/autograd/__init__.py")),
)
"""Calls of C++ that may wait for other ranks: for a kernel of a collective, for DDP's reductions."""
_FETCH = re.compile(r'^\s*File "[^"]+/everstep/training/loop\.py", line \d+, in _fetch$', re.MULTILINE)
"""The loop waits for the user's loader, whatever that is made of."""


def place_of(stack: str) -> str:
    """Return the innermost line of a stack that is the user's own, as "file:line in function", or nothing."""
    frames = [match.groups() for match in _FRAME.finditer(stack)]
    own = [f for f in frames if not _LIBRARY.search(f[0]) and not f[0].startswith(f"{_OURS}/")]
    if not own:
        return ""
    path, line, name = own[-1]
    return f"{path}:{line} in {name}"


def kind_of(stack: str) -> str:
    """Name what a stack is in the middle of: save, compile, batch, device or backward; empty for all else.

    Each is known by files that are on the stack then and only then: running compiled code is not compiling.
    """
    files = [match.group(1) for match in _FRAME.finditer(stack)]
    for kind, parts in _KINDS:
        if any(part in file for file in files for part in parts):
            return kind
    if _FETCH.search(stack):
        return "batch"
    inner = files[-1] if files else ""
    return next((kind for kind, parts in _INNERMOST if any(part in inner for part in parts)), "")


Lesson = tuple[str, str, float, int]
"""(what, place, seconds, steps): one piece of what is learned, as it may also be told to somebody else."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of one line."""

    worst_s: float = 0.0  # the longest silence there that ended by itself
    raised_s: float = 0.0  # its limit after an alarm that is not settled yet


@dataclass(frozen=True, slots=True)
class Learned:
    """What the run has taught so far."""

    recent: tuple[float, ...] = ()  # seconds a step, the newest last
    steps: int = 0  # that were looked at
    longest_s: float = 0.0  # of them
    worst_first_s: float = 0.0  # longest set-up and first step
    places: Mapping[str, Place] = field(default_factory=dict[str, Place])
    hung_step: int | None = None  # after which the last alarm was raised, until it has been passed; None: not known
    hung_place: str = ""
    hung_after_s: float = 0.0  # of its generation
    raised_s: float = 0.0  # the limit at that step, until it has been passed; 0: no alarm is unsettled

    @property
    def typical_s(self) -> float:
        """What nine of ten recent steps do not exceed; 0 before the first."""
        return sorted(self.recent)[int(QUANTILE * (len(self.recent) - 1))] if self.recent else 0.0

    def taught(self, lesson: Lesson) -> "Learned":
        """Take in one lesson: "step", "set-up" or "silence"."""
        what, place, seconds, steps = lesson
        if what == "step":
            return self.stepped(seconds, steps)
        return self.set_up(seconds) if what == "set-up" else self.silent_at(place, seconds)

    def stepped(self, seconds: float, steps: int = 1) -> "Learned":
        """`steps` steps have taken `seconds` together."""
        each = seconds / steps
        recent = (*self.recent, each)[-RECENT:]
        return replace(self, recent=recent, steps=self.steps + steps, longest_s=max(self.longest_s, each))

    def set_up(self, seconds: float) -> "Learned":
        """Set-up and first step have taken this long."""
        return replace(self, worst_first_s=max(self.worst_first_s, seconds))

    def silent_at(self, place: str, seconds: float) -> "Learned":
        """A silence at `place` has ended by itself: it was legitimate."""
        known = self.places.get(place, Place())
        return self if seconds <= known.worst_s else self._with(place, replace(known, worst_s=seconds))

    def hung(self, step: int | None, place: str, limit_s: float, running_s: float = math.inf) -> "Learned":
        """An alarm was raised after `step`, about a rank that stood at `place` for longer than `limit_s`.

        Its generation had been running for `running_s`.
        """
        raised = min(LONGEST_S, (ALARM_FACTOR if limit_s <= LONG_S else LATER_FACTOR) * limit_s)
        found = self._with(place, replace(self.places.get(place, Place()), raised_s=raised))
        return replace(found, hung_step=step, hung_place=place, hung_after_s=running_s, raised_s=raised)

    def passed(self, step: int, running_s: float = 0.0) -> "Learned":
        """The world has done `step` in a generation that has been running for so long. An alarm before is settled."""
        further = self.hung_step is not None and step > self.hung_step
        if not self.raised_s or not (further or running_s > self.hung_after_s + self.raised_s):
            return self
        known = self.places.get(self.hung_place, Place())
        settled = self._with(self.hung_place, replace(known, raised_s=0.0))
        return replace(settled, hung_step=None, hung_place="", hung_after_s=0.0, raised_s=0.0)

    def raised(self, step: int, place: str) -> float:
        """Return the limit after an alarm, for who has done `step` or stands at `place`; 0 where there was none."""
        known = self.places.get(place)
        return max(self.raised_s if step == self.hung_step else 0.0, known.raised_s if known is not None else 0.0)

    def worst_at(self, place: str) -> float:
        """Return the longest legitimate silence at `place`."""
        known = self.places.get(place)
        return known.worst_s if known is not None else 0.0

    def _with(self, place: str, known: Place) -> "Learned":
        places = {name: old for name, old in self.places.items() if name != place}
        if known != Place():
            places[place] = known
        for oldest in list(places)[: max(0, len(places) - MOST_PLACES)]:
            del places[oldest]
        return replace(self, places=places)
