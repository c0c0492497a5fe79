"""One question to an agent, over HTTP; whatever comes back, or does not, is told in words."""

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any

from everstep.errors import EverstepError, UsageError
from everstep.operator.core.reach import NobodyThere, Reach

LIMIT_S, LONG_S = 8.0, 20.0
"""An agent answers within 2 s, whatever its nodes do; within 8 s where it asks its ranks."""
MOST_BYTES = 256 * 1024 * 1024
_DENIED, _OK = 401, 200


def ask(reach: Reach, path: str, body: Mapping[str, Any] | None = None, *, long: bool = False) -> dict[str, Any]:
    """GET `path`, or POST `body` to it; return the object that is answered. `long`: ranks are asked for it.

    NobodyThere where nobody answers, UsageError where the token is not the job's, EverstepError with the agent's words
    for what it refuses.
    """
    line = http.client.HTTPConnection(reach.host, reach.port, timeout=LONG_S if long else LIMIT_S)
    try:
        headers = {"Authorization": f"Bearer {reach.token}"}
        if body is None:
            line.request("GET", path, headers=headers)
        else:
            line.request("POST", path, json.dumps(body), headers)
        answer = line.getresponse()
        status, text = answer.status, answer.read(MOST_BYTES)
    except ConnectionRefusedError:
        raise NobodyThere(f"nobody listens at {reach}: the job is over, or its agent was killed") from None
    except TimeoutError:
        raise NobodyThere(
            f"the agent at {reach} does not answer: its process is stopped, or its machine gone"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        why = "its name does not resolve" if isinstance(error, socket.gaierror) else str(error) or type(error).__name__
        raise NobodyThere(f"{reach} cannot be asked: {why}") from None
    finally:
        line.close()
    return _read(reach, status, text)


def _read(reach: Reach, status: int, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise NobodyThere(f"what answers at {reach} is no agent of Everstep (status {status}): {text[:80]!r}")
    told: dict[str, Any] = found  # pyright: ignore[reportUnknownVariableType]  # what JSON held
    if status == _DENIED:
        raise UsageError(f"{reach}: {told.get('error')}")
    if status != _OK:
        raise EverstepError(f"{reach}: {told.get('error') or f'status {status}'}")
    return told
