"""Question and answer over a line that another thread reads.

The asking thread (the user's function, inside a hook) sends and waits; the thread that owns the line hands each answer
to `deliver`. Answers carry the number of their question, so that one that comes after its asker was interrupted, or has
given up, is dropped. No thread is started here.
"""

import itertools
import queue
from collections.abc import Callable, Mapping
from typing import Any

from everstep.recovery.link import LinkClosed

Message = Mapping[str, Any]
Call = Callable[[Message, float], Message | None]
"""Ask, wait at most so many seconds, return the answer; None where none came."""


class Calls:
    """The worker's side of questions to the agent. `call` from any thread, `deliver` from the one that receives."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, queue.SimpleQueue[Message]] = {}

    def call(self, message: Message, timeout_s: float) -> Message | None:
        """Send `message` and return its answer; None where none came in time or nobody is there."""
        number, answer = next(self._numbers), queue.SimpleQueue[Message]()
        self._open[number] = answer
        try:
            self._send({**message, "call": number})
            return answer.get(timeout=timeout_s)
        except (queue.Empty, LinkClosed):
            return None
        finally:
            self._open.pop(number, None)

    def deliver(self, message: Message) -> None:
        """Hand an answer to whoever asked; one that nobody waits for any more is dropped."""
        waiting = self._open.get(message.get("call", 0))
        if waiting is not None:
            waiting.put(message)
