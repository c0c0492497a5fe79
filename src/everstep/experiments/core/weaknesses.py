"""NVRx's weaknesses as trials: what is done, what became of it, and in what one outcome is better than another.

Rule 1: nothing is known beforehand. What a table says of an implementation was seen in the run that the table is of.
Rule 2: a rank that is lost counts for more than any time, and an end that does not come for more than a rank.
Rule 3: seconds are compared only by factors that a busy machine does not make.

The ids are those of the notes on NVRx (Part 3), where each weakness is described.
"""

import enum
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from everstep.experiments.core.tapes import Ending, Mark, Run, judge

FASTER = 3.0
"""So many times longer is a difference of kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A number that a case counts itself; less is better. `how` is how the marks of all ranks become one."""

    words: str
    how: str = "most"  # or "sum"

    def of(self, values: Sequence[float]) -> float | None:
        """Return the one number; None where nobody counted."""
        if not values:
            return None
        return sum(values) if self.how == "sum" else max(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One case of `alone/weakness.py`. Seconds; `told` are words of the cause that a person should find somewhere."""

    id: str
    case: str
    does: str
    ranks: int = 2
    silent_s: float = 200.0
    most_s: float = 300.0
    alone: bool = False  # a matter of milliseconds: nothing else runs meanwhile
    launchers: tuple[str, ...] = ("everstep",)  # how ours is started
    native: bool = False  # ours is `@everstep.resilient` and `run.steps`
    meet: str = "own"
    counted: Counted | None = None
    told: str = ""


TRIALS = (
    Trial(id="W1", case="W1", does="limits 5 and 10 s, the watchdog's interval below the monitor's; rank 1 sleeps",
          silent_s=40.0),
    Trial(id="W2", case="W2", ranks=4, does="rank 1 raises while three others are in gloo"),
    Trial(id="W3", case="W3", does="rank 1 sleeps without end, all limits left at their defaults"),
    Trial(id="W4", case="W4", does="rank 1 waits in C with the interpreter lock, and has a handler of SIGTERM"),
    Trial(id="W4", case="W4 stopped", does="rank 1 is stopped (SIGSTOP), all limits left at their defaults"),
    Trial(id="W5", case="W5", does="rank 1 is killed", silent_s=40.0, alone=True),
    Trial(id="W6", case="W6", does="the process that watches rank 1 is killed (under `everstep run`: the agent), then "
          "rank 1 raises", silent_s=60.0, launchers=("everstep", "bare")),
    Trial(id="W8", case="W8", ranks=3, does="rank 2 and what watches it are killed together", silent_s=60.0,
          launchers=("bare",)),
    Trial(id="W9", case="W9", ranks=4, does="ranks form nodes of two, a node that is not whole is left out "
          "(FilterCountGroupedByKey); rank 3 is killed", silent_s=60.0, meet="file"),
    Trial(id="W11", case="W11", does="rank 0, which hosts NVRx's store, is killed", meet="file"),
    Trial(id="W12", case="exception", does="rank 1 raises, five times", alone=True),
    Trial(id="W13", case="W13", does="the function waits for atomic() while an abort takes two seconds",
          counted=Counted(words="CPU seconds for each second of waiting")),
    Trial(id="W14", case="W14 swallowed", does="rank 1 raises, a loop on rank 0 swallows the first BaseException"),
    Trial(id="W14", case="W14 autocast", does="rank 1 raises fifteen times while rank 0 enters and leaves autocast",
          counted=Counted(words="times autocast was on when the function was entered again", how="sum")),
    Trial(id="W15", case="W15", does="the wrapped function is called on another thread; rank 1 raises"),
    Trial(id="W16", case="W16", ranks=4, does="what stands beside four ranks that train",
          launchers=("everstep", "bare"), counted=Counted(words="MB (PSS) beside each rank")),
    Trial(id="W17", case="W17", ranks=1, does="arrivals at the barrier between iterations, 16 ranks and 256",
          launchers=("bare",), counted=Counted(words="times more read by one arrival among 256 than among 16")),
    Trial(id="W18", case="W18 hangs", does="rank 1 raises, rank 0's abort callback never returns"),
    Trial(id="W18", case="W18 raises", does="rank 1 raises, rank 0's abort callback fails", silent_s=40.0,
          told="the switch does not answer"),
    Trial(id="W19", case="W19", does="rank 1 hangs in its function load_shard, limits 3 and 8 s", silent_s=60.0,
          told="load_shard"),
    Trial(id="W20", case="W20 copy", does="rank 1 raises an exception that holds a lock, a health check hears of it",
          silent_s=60.0),
    Trial(id="W20", case="W20 garbage", does="rank 1 raises and leaves garbage that makes garbage when it is collected",
          silent_s=60.0),
    Trial(id="W21", case="W21", does="rank 1 raises in every iteration, nobody has set a budget", most_s=60.0),
    Trial(id="W22", case="W22", does="rank 1 raises at the last of twenty steps, no checkpoint is written by hand",
          native=True, counted=Counted(words="steps done again by rank 0", how="sum"), silent_s=40.0),
)  # fmt: skip

NOT_RUN = {
    "W7": "of the launcher's client (`end_all_sections`), and of HEAD alone, which pip does not install on Python "
    "3.11; ours comes with the slice of `RankMonitorClient`",
    "W10": "of HEAD alone: 0.4.1 has none of the checks that fail without NVML",
    "W23": "a word of the release notes of 0.6, nothing that runs",
}
"""Weaknesses that no run can show here, each with the reason."""


_WORDS = re.compile(r"[\w.]*(Error|Exception|Interrupt|Timeout)\b|everstep: ")


class End(enum.IntEnum):
    """How a run ended, worst first."""

    ENDLESS = 0  # it was ended by us
    EARLY = 1  # by itself, in an error
    DONE = 2  # by itself, all that trained on have returned


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was seen of one implementation in one trial."""

    ranks: int
    faults: int  # that came
    over: int  # of them: a next iteration trained
    seconds: float | None = None  # from the fault to the first step of the last rank, the median of those
    kept: int | None = None  # how many ranks trained on after the last
    bystanders_lost: int = 0
    iterations: int = 0
    returned: int = 0
    end: End = End.DONE
    outcome: str = ""
    words: str = ""  # the last that it said, where it was not done
    counted: float | None = None
    told: bool | None = None  # None: nothing was to be told
    left: int = 0  # processes that had to be ended afterwards

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"end": self.end.name}


def outcome(trial: Trial, marks: Sequence[Mark], ending: Ending, outputs: Sequence[str], left: int) -> Outcome:
    """Say what was seen. `outputs` are the texts of the run: what it printed first, then what else it wrote."""
    ran = judge(marks, ending)
    over = [r for r in ran.recoveries if r.step_s is not None]
    end = _end(ran, ending)
    values = [float(m.text) for m in marks if m.what == "seen"]
    return Outcome(
        ranks=trial.ranks,
        faults=len(ran.recoveries),
        over=len(over),
        seconds=statistics.median([r.step_s for r in over if r.step_s is not None]) if over else None,
        kept=over[-1].world_after if over else None,
        bystanders_lost=sum(r.bystanders_lost or 0 for r in over),
        iterations=len({m.generation for m in marks if m.what == "enter"}),
        returned=ran.done,
        end=end,
        outcome=_how(trial, ran, ending),
        words="" if end is End.DONE else last_words(marks, outputs),
        counted=trial.counted.of(values) if trial.counted is not None else None,
        told=any(trial.told in text for text in outputs) if trial.told else None,
        left=left,
    )


def _how(trial: Trial, ran: Run, ending: Ending) -> str:
    if ending.silent_s is not None and ending.wall_s >= trial.most_s:
        return f"ended by us after {trial.most_s:g} s, though its ranks came to something again and again"
    return ran.outcome


def _end(ran: Run, ending: Ending) -> End:
    if ending.silent_s is not None:
        return End.ENDLESS
    return End.DONE if ran.outcome == "done" else End.EARLY


def last_words(marks: Sequence[Mark], outputs: Sequence[str], most: int = 160) -> str:
    """Return what a call raised in the end; else the last line anywhere that reads like an error or is ours."""
    said = [m.text for m in marks if m.what == "failed"]
    said = said or [line for text in outputs for line in text.splitlines() if _WORDS.match(line)]
    return _cut(said[-1], most) if said else ""


def _cut(text: str, most: int = 160) -> str:
    """Return a text as one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most] + " …"


def told(trial: Trial, found: Outcome) -> str:
    """Say an outcome the way a person would."""
    parts = [*_recovered(found), *_counted(trial, found), *_ended(found)]
    return "; ".join(parts)


def _recovered(found: Outcome) -> Iterator[str]:
    if found.over:
        each = f", {found.over} times" if found.over > 1 else ""
        yield f"**{found.kept} of {found.ranks}** ranks trained on after **{_time(found.seconds)}**{each}"
    if found.bystanders_lost:
        yield f"{found.bystanders_lost} of those lost had done nothing"


def _counted(trial: Trial, found: Outcome) -> Iterator[str]:
    if trial.counted is not None and found.counted is not None:
        yield f"**{found.counted:.3g}** {trial.counted.words}"
    if found.told is not None:
        yield f"`{trial.told}` is {'told' if found.told else '**nowhere told**'}"


def _ended(found: Outcome) -> Iterator[str]:
    if found.end is End.DONE:
        yield "done"
    else:
        entered = f"{found.iterations} iteration{'s' * (found.iterations != 1)} entered"
        yield f"{_OVER[found.end]} ({_cut(found.outcome)}), {entered}"
    if found.words and found.words[:60] not in _cut(found.outcome):
        yield f"last words: {found.words}"
    if found.left:
        yield f"{found.left} process{'es' * (found.left > 1)} left behind"


_OVER = {End.ENDLESS: "**without end**", End.EARLY: "**ended early**"}


def _time(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"


def better(trial: Trial, ours: Outcome, theirs: Outcome) -> list[str]:
    """Say in what ours is better, the weightiest first; nothing where no difference was seen."""
    found: list[str] = []
    if ours.end > theirs.end:
        found.append("it ends by itself" if ours.end is End.EARLY else "it goes on to its end")
    if ours.over and (ours.kept or 0) > (theirs.kept or 0):
        found.append(f"{ours.kept} of {ours.ranks} ranks instead of {theirs.kept or 'none'}")
    if ours.bystanders_lost < theirs.bystanders_lost:
        found.append("no rank lost that had done nothing")
    if ours.told and theirs.told is False:
        found.append("the cause is told")
    if trial.counted is not None and None not in (ours.counted, theirs.counted):
        found += _fewer(trial.counted, ours.counted or 0.0, theirs.counted or 0.0)
    if ours.seconds is not None and theirs.seconds is not None and ours.seconds * FASTER < theirs.seconds:
        found.append(f"{theirs.seconds / ours.seconds:.0f} times faster")
    if ours.left < theirs.left:
        found.append("nothing is left behind" if not ours.left else "less is left behind")
    return found


def _fewer(counted: Counted, ours: float, theirs: float) -> list[str]:
    return [f"{ours:.3g} {counted.words} instead of {theirs:.3g}"] if ours < theirs else []


_HEAD = (
    "Each row is one script, run once under each implementation with only the import changed, in the same run on the",
    "same machine: NVRx as its users start it, a process a rank; ours under `everstep run`, with one spare, where a",
    "row does not say `bare`. What a row says was seen there: nothing in it was known beforehand. Seconds are from the",
    "fault to the first new step of the last rank, by what the ranks wrote down themselves. Script: `weakness.py` of",
    "`src/everstep/experiments/bench/alone`; what each row is about: [traceability-3.md](traceability-3.md).",
)


def page(result: Mapping[str, Any]) -> str:
    """Return the result as a page of the documentation."""
    machine = result["machine"]
    versions = "; ".join(
        f"{name} with " + ", ".join(f"{key} {value}" for key, value in pairs.items())
        for name, pairs in result["versions"].items()
    )
    lines = [
        "# NVRx's weaknesses, run beside ours",
        "",
        *_HEAD,
        "",
        f"`{result['command']}`, {machine['when']}, {machine['cores']} cores, load {machine['load']:.1f} before and "
        f"{machine['load_at_end']:.1f} after; {versions}.",
        "",
        "| id | what was done | NVRx | Everstep | in which ours does better |",
        "|---|---|---|---|---|",
        *(_line(row) for row in result["rows"]),
        "",
        "Not run:",
        "",
        "| id | why |",
        "|---|---|",
        *(f"| {name} | {why} |" for name, why in result["not_run"].items()),
        "",
    ]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    better_ = "; ".join(row["better"]) or "no difference was seen"
    many = f"{row['ranks']} rank{'s' * (row['ranks'] != 1)}"
    cells = (row["id"], f"{row['does']} ({many})", row["theirs_told"], row["ours_told"], better_)
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
