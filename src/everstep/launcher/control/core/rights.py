"""Who may ask what: a table, and the one function that reads it.

Rule 1: whatever tells of the job or changes it needs the job's token; numbers for a scraper do not.
Rule 2: the token is compared in constant time, and before anything else of a request is looked at.
"""

import hmac
from collections.abc import Mapping

from everstep.launcher.control.core.http import Request, Response, refusal

ROUTES: Mapping[str, tuple[str, bool]] = {
    "/v1/ps": ("GET", True),
    "/v1/stacks": ("GET", True),
    "/v1/kill": ("POST", True),
    "/v1/drain": ("POST", True),
    "/v1/exclude": ("POST", True),
    "/metrics": ("GET", False),
}
"""Path: the method, and whether the token is needed."""


def admit(request: Request, token: str) -> Response | None:
    """Return why a request is refused; None for one that may be answered."""
    method, guarded = ROUTES.get(request.path, ("", True))
    if guarded and not _knows(request, token):
        return refusal(
            401,
            "this needs the job's token, as `Authorization: Bearer TOKEN`: it lies in control.json in the run folder, "
            "for the job's owner alone. Commands that are given RUN read it; for HOST:PORT set EVERSTEP_TOKEN",
        )
    if not method:
        return refusal(404, f"{request.path[:80]} is not here; there are {', '.join(ROUTES)}")
    if request.method != method:
        return refusal(405, f"{request.path} is asked with {method}")
    return None


def _knows(request: Request, token: str) -> bool:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())
