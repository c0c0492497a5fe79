"""When a world without an agent has come to its end: what only an agent could mend, told in a sentence."""

from everstep.ranks import brief
from everstep.recovery.core.state import Phase, World

MEND = "Start the job with `everstep run`, which puts another process in its place"


def beyond_mending(world: World) -> str:
    """Return why the job cannot go on here, or nothing: a rank is lost, none can be started, fewer are not allowed."""
    if world.phase is not Phase.GATHERING:
        return ""
    if world.roster is None:
        if not world.false_starts:
            return ""
        return f"{len(world.false_starts)} of {world.policy.world_size} ranks ended before the first generation began"
    if not world.wanting:
        return ""
    lost = sorted(world.ranks[who] for who in world.lost)
    who = f"rank {lost[0]} is lost" if len(lost) == 1 else f"ranks {brief(lost)} are lost"
    return f"{who}{_cause(world)}, and without an agent nobody can start another. {MEND}{_fewer(world)}"


def _cause(world: World) -> str:
    last = world.causes[-1] if world.causes else None
    if last is None or not last.text:
        return ""
    return f" ({last.kind}: {last.text.splitlines()[0][:200]})"


def _fewer(world: World) -> str:
    least = world.policy.min_world_size
    if least is None:
        return "; or allow the world to shrink"
    return f"; the world may shrink to {least} ranks, and {len(world.ranks) - len(world.lost)} are left"
