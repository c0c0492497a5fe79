"""One Checkpointer to a prefix of an object store, as `sole.SoleUse` is for a directory.

The owner's object, which its job renews, also says whether that job is about to end.
"""

import json
from collections.abc import Callable

from everstep.checkpoint.storage.fsspec_bucket import connect
from everstep.checkpoint.storage.object_claim import LOOK_S, ObjectClaim
from everstep.checkpoint.storage.owner import read_owner, told
from everstep.clock import Clock
from everstep.errors import ConfigurationError


class _Claim(ObjectClaim):
    """Says in the owner's object that its job is about to end."""

    ending = False

    def _content(self) -> bytes:
        return json.dumps(json.loads(super()._content()) | {"ending": self.ending}).encode()


class SoleObjects:
    """Held from `take` to `close`."""

    def __init__(self, place: str, job: str, clock: Clock, moving: Callable[[], None]) -> None:
        self._place, self._clock, self._moving = place, clock, moving
        self._bucket = connect(place)
        self._claim = _Claim(self._bucket, job, moving, clock)
        self.lock = ""

    def take(self, who: str, wait_s: float, say: Callable[[str], None]) -> list[str]:
        """Have the prefix; return what was swept. A holder that is ending is waited for, with a line.

        Raises ConfigurationError where another has it, or is still not done after `wait_s`.
        """
        deadline, said = self._clock.now() + wait_s, False
        while True:
            try:
                return self._claim.take(who)
            except ConfigurationError:
                owner = read_owner(self._bucket)
                if not owner.get("ending") or self._clock.now() > deadline:
                    raise
            if not said:
                said = True
                say(f"{self._place}: waiting for {told(owner)}, which is writing what its ranks have left")
            self._moving()
            self._clock.sleep(LOOK_S)

    def ending(self) -> None:
        """The ranks have ended: who comes now may wait for us."""
        self._claim.ending = True
        self._claim.renew()

    def close(self) -> None:
        """Give it up."""
        self._claim.close()
