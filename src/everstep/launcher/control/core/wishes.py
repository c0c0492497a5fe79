"""What an operator wants changed, read from a request: pure."""

from dataclasses import dataclass

from everstep.launcher.control.core.http import Request, Response, refusal

_KNOWN = frozenset(("rank", "job"))


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process of one rank; `rank` None: the whole job."""

    rank: int | None


def drains(request: Request) -> Response | None:
    """Return why a request does not ask for the end in order; it has nothing to say beside that."""
    try:
        body = request.json()
    except ValueError:
        body = {"": ""}
    return refusal(400, "send {}: a drain knows nothing else") if body else None


def node_of(request: Request) -> str | Response:
    """Read `{"node": NAME}`."""
    try:
        body = request.json()
    except ValueError:
        body = {}
    node = body.get("node")
    if set(body) != {"node"} or not isinstance(node, str) or not node:
        return refusal(400, 'send {"node": NAME}, as everstep ps has it')
    return node


def wish_of(request: Request) -> Kill | Response:
    """Read `{"rank": N}` or `{"job": true}`; a refusal for anything else: nothing is guessed where something ends."""
    try:
        body = request.json()
    except ValueError:
        body = {}
    rank, job = body.get("rank"), body.get("job")
    if not set(body) <= _KNOWN or (rank is None) == (job is None):
        return refusal(400, 'send {"rank": N} or {"job": true}')
    if job is not None:
        return Kill(None) if job is True else refusal(400, '{"job": true} ends the job, and nothing else is known')
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        return refusal(400, f"{rank!r} is no rank")
    return Kill(rank)
