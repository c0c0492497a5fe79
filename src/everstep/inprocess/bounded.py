"""Run a user's callback in a thread of its own, and wait for it no longer than was said (W18)."""

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it. Its thread goes on where it was late: nobody can end it."""

    late: bool = False
    error: BaseException | None = None


def run(what: str, act: Callable[[], object], seconds: float) -> Outcome:
    """Call `act` in a daemon thread named for `what`; return within `seconds`."""
    raised: list[BaseException] = []

    def caught() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to who waits for it
            raised.append(error)

    thread = threading.Thread(target=caught, name=f"everstep-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    return Outcome(late=thread.is_alive(), error=raised[0] if raised else None)
