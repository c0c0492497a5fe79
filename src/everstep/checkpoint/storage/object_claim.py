"""A job's ownership of a prefix of an object store: an object that it created, and renews.

Rule 1: a job renews its ownership; another takes it over only when it has seen no renewal for a lease, by its own
clock: no time of another machine is ever compared. What a job that lost it still tries to publish is refused.
Rule 2: a lease outlasts what it takes until another node of the same job knows that the one that renewed is gone (10 s,
after the last renewal up to 5 s before) and goes on with it (`go_on`).
Rule 3: before the first step the place is tried with all that is asked of it later.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.core import names
from everstep.checkpoint.storage.bucket import Bucket
from everstep.checkpoint.storage.objects import ObjectStorage, data_folder
from everstep.checkpoint.storage.owner import OWNER, read_owner, told
from everstep.checkpoint.unreachable import AWAY, Retry, deadline_s, is_away, unreachable, why
from everstep.clock import SYSTEM, Clock
from everstep.errors import ConfigurationError, EverstepError

PROBE = ".everstep-probe-"
LEASE_S = 30.0
RENEW_S = 5.0
LOOK_S = 0.5


class ObjectClaim:
    """A job's ownership of a prefix: an object that it made, and renews."""

    lock = ""

    def __init__(
        self,
        bucket: Bucket,
        job: str,
        moving: Callable[[], None] = lambda: None,
        clock: Clock = SYSTEM,
        *,
        several: bool = False,
    ) -> None:
        """`several`: other nodes of the job go on where this one goes; what it owns is not a dead process's at once."""
        self._several, self.over = several, not several
        self._bucket, self._job, self._moving, self._clock = bucket, job, moving, clock
        self._storage = ObjectStorage(bucket)
        self._over = threading.Event()
        self._renewer: threading.Thread | None = None
        self._beats = self._probes = 0
        self._run = self._doing = ""

    def take(self, run: str) -> list[str]:
        """See `Claiming.take`. Also UnreachableStorage, where the store is away for the time that a call may take."""
        self._run = run
        retry = Retry(deadline_s(), self._moving, self._clock, worth=is_away)
        try:
            warnings = retry(self._probe)
            self._doing = "be claimed"
            retry(self._own)
        except OSError as error:
            raise self._refusal(error) from error
        self._begin()
        return [*warnings, *self._sweep(retry)]

    def go_on(self, job: str, run: str) -> None:
        """See `Claiming.go_on`. Returns at once; the store is asked on the thread that renews."""
        self._job, self._run = job, run
        self._begin(at_once=True)

    def _begin(self, *, at_once: bool = False) -> None:
        self._renewer = threading.Thread(target=self._renew, args=(at_once,), name="everstep-owner", daemon=True)
        self._renewer.start()

    def close(self) -> None:
        """See `Claiming.close`."""
        renewer, self._renewer = self._renewer, None
        if renewer is None:
            return
        self._over.set()
        renewer.join(RENEW_S)
        try:
            if self.over and read_owner(self._bucket).get("job") == self._job:
                self._bucket.delete(OWNER)
        except OSError:
            return  # the next job finds it not renewed

    def _content(self) -> bytes:
        owner = {"job": self._job, "run": self._run, "pid": os.getpid(), "host": socket.gethostname()}
        owner["several"] = self._several
        return json.dumps(owner | {"beat": self._beats}).encode()

    def _probe(self) -> list[str]:
        self._probes += 1
        key = f"{PROBE}{self._job}-{self._probes}"  # the one before may have been made, and not answered
        self._doing = "be written to"
        first = self._bucket.create(key, b"x")
        self._doing = "be listed"
        if not any(item.key == key for item in self._bucket.items(PROBE)):
            raise OSError(0, "what was just written is not in the listing")
        self._doing = "be read in ranges"
        if self._bucket.read(key, 0, 1) != b"x":
            raise OSError(0, "another byte came back")
        self._doing = "be written to twice under one name"
        again = self._bucket.create(key, b"y")
        self._doing = "remove an object"
        self._bucket.delete(key)
        self._moving()
        if not again and first:
            return []
        return [
            f"warning: {self._bucket.url} does not honour conditional creation (If-None-Match: *): that two jobs "
            "write there would not always be noticed; see to it that none does"
        ]

    def _refusal(self, error: OSError) -> EverstepError:
        if is_away(error):
            return unreachable(self._bucket.url, f"it cannot {self._doing}: {why(error)}", AWAY)
        return ConfigurationError(
            f"the checkpoint storage {self._bucket.url} cannot {self._doing}: {error.strerror or error}. Look at its "
            "name, region, credentials and rights (put, get, list and delete are needed), or give another "
            "--checkpoint-dir."
        )

    def _own(self) -> None:
        """Create the owner's object, or take it over from a job that has not renewed it for a lease."""
        first = read_owner(self._bucket)  # a store that ignores the condition would have it written over
        if not first and self._bucket.create(OWNER, self._content()):
            return
        first = first or read_owner(self._bucket)
        if first.get("job") == self._job:
            return  # made before, and not answered
        deadline = self._clock.now() + LEASE_S
        while self._clock.now() < deadline and not self._dead(first):
            self._clock.sleep(LOOK_S)
            self._moving()
            if read_owner(self._bucket) != first:
                break
        else:
            if read_owner(self._bucket) == first:
                self._bucket.delete(OWNER)
        if not read_owner(self._bucket) and self._bucket.create(OWNER, self._content()):
            return
        owner = read_owner(self._bucket)
        if owner.get("job") != self._job:
            raise ConfigurationError(
                f"the checkpoint storage {self._bucket.url} is in use by {told(owner)}, and two jobs would take each "
                "other's checkpoints for their own. End that job, or give --checkpoint-dir another prefix."
            )

    def _dead(self, owner: Mapping[str, Any]) -> bool:
        if owner.get("several"):
            return False
        here = owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int)
        return here and not os.path.exists(f"/proc/{owner['pid']}")

    def _renew(self, at_once: bool) -> None:
        if at_once and not self.renew():
            return
        while not self._clock.wait(self._over, RENEW_S):
            if not self.renew():
                return

    def renew(self) -> bool:
        """Show that this job lives; False where another has taken over: publishing says so."""
        try:
            if read_owner(self._bucket).get("job") not in (self._job, None):
                return False
            self._beats += 1
            self._bucket.put(OWNER, self._content())
        except OSError:
            return True  # the next one may come through; saves say what is wrong
        return True

    def _sweep(self, retry: Retry) -> list[str]:
        """Remove what the dead have left; what cannot be removed now is told, and swept by the next start."""
        where = self._bucket.url
        try:
            told = [
                f"aborted the upload of {where}/{key}, left over by a writer that is gone"
                for key in retry(lambda: self._bucket.abort_uploads(""))
            ]
            return [*told, *retry(self._swept)]
        except OSError as error:
            return [f"warning: what dead writers have left in {where} could not be removed: {why(error)}"]

    def _swept(self) -> list[str]:
        where, told = self._bucket.url, list[str]()
        found = self._storage.scan()
        kept = {data_folder(one.manifest.save) for one in found if one.manifest is not None}
        unknown = {one.step for one in found if one.manifest is None}  # what their manifests name, nobody knows now
        items = self._bucket.items("")
        for folder in sorted({item.key.partition("/")[0] for item in items if "/" in item.key}):
            staging = names.staging_of(f"{folder}.tmp")
            if folder in kept or staging is None or staging.step in unknown:
                continue
            strange = self._storage.remove(f"{folder}.tmp")
            self._moving()
            if strange:
                text = f"the leftover {where}/{folder} stays, it holds {', '.join(strange)}, which is not ours"
                told.append(f"warning: {text}")
            else:
                told.append(f"removed {where}/{folder}, left over by a writer that is gone")
        for item in items:
            if item.key.startswith(PROBE):
                self._bucket.delete(item.key)
        return told
