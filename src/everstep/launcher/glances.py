"""What can be seen of one worker without its help: its page, what the kernel says of it, and what it last answered."""

from everstep.launcher.core.memory import Glance
from everstep.launcher.core.monitors import Watched
from everstep.process.kernel import Status
from everstep.process.monitor import Monitoring
from everstep.process.page import Phase, Reading


def glance(
    rank: int,
    page: Reading,
    stat: Status | None,
    *,
    asked_s: float | None,
    heard_s: float | None,
    waiting: bool,
    stack: str,
    inside: bool,
    held: bool = False,
    monitoring: Monitoring | None = None,
    deaf: bool = False,
) -> Glance:
    """Put one look together. Without a `stat` there is no such process any more: it counts as gone (Z).

    `asked_s`, `heard_s`: monotonic seconds of the open question and of the last answer, which said `waiting`, `stack`
    and `inside`. `held`: a debugger of ours has stopped it for a moment, which is not a stop by anybody else.
    `monitoring`: what the script's own rank monitor has said. `deaf`: it answers no question but by a signal.
    """
    current = monitoring is not None and monitoring.generation == page.generation
    said = monitoring if current else None
    return Glance(
        rank=rank,
        generation=page.generation,
        step=page.step,
        from_step=page.from_step,
        undeclared=page.undeclared,
        turns=page.turns,
        turned_s=page.turned_s,
        places=page.places,
        phase=Phase.WORDS.get(page.phase, "none"),
        mark_s=said.event_s if deaf and said is not None else page.mark_s,
        moved_s=page.moved_s,
        state="Z" if stat is None else "S" if held and stat.state == "t" else stat.state,
        cpu_s=stat.cpu_s if stat is not None else 0.0,
        pinged=page.pinged,
        limit_s=page.limit_s,
        name=page.name,
        asked_s=asked_s,
        heard_s=heard_s,
        waiting=waiting,
        stack=stack,
        inside=inside,
        watched=None if said is None else _watched(said),
        deaf=deaf,
    )


def _watched(said: Monitoring) -> Watched:
    return Watched(
        started_s=said.started_s, beats=said.beats, beat_s=said.beat_s,
        initial_s=said.initial_s, subsequent_s=said.subsequent_s,
        outside_s=said.outside_s, outside_limit_s=said.outside_limit_s, events=said.events,
        sections=tuple((one.name, one.opened_s, one.limit_s) for one in said.sections),
    )  # fmt: skip
