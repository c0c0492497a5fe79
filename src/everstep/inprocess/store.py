"""NVRx's stores: torch's, with what ranks tell each other around a restart.

Under an agent the wrapper opens no store of its own: rosters and faults go over the agent, and assignments meet on the
generation's own prefix. These are for scripts that use them, and for stores that users derive from `StoreMixin`.

Rule 1: the mixin precedes torch's store among the bases: since torch 2.13 that has a `barrier` of its own (W9).
Rule 2: an arrival is one counter and one key, whatever the number of ranks (W17); values are JSON or numbers (W8).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partialmethod
from typing import Any, ClassVar

import torch.distributed as dist

from everstep import environ
from everstep.clock import SYSTEM
from everstep.inprocess.attribution import InterruptionRecord
from everstep.inprocess.exception import RestartError
from everstep.inprocess.state import Mode, State

_MASTER_PORT = "29500"


class BarrierError(RestartError):
    """A barrier has failed."""


class BarrierTimeout(BarrierError):
    """Not all have come in time; the message says how many have."""


class BarrierOverflow(BarrierError):
    """More have come than were expected: a name was used twice."""


class StoreMixin:
    """What ranks tell each other, over the `set`, `get`, `add`, `wait` and `check` of any of torch's stores."""

    STORE_PREFIX: ClassVar[str] = "_inprocess_{iteration}"
    BARRIER_PREFIX: ClassVar[str] = "inprocess_barrier_prefix"
    INITIAL_BARRIER: ClassVar[str] = "initial_barrier"
    COMPLETION_BARRIER: ClassVar[str] = "completion_barrier"
    ITERATION_BARRIER: ClassVar[str] = "iteration_barrier"
    TERMINATION_BARRIER: ClassVar[str] = "termination_barrier"
    ANY_RANK_INTERRUPTED: ClassVar[str] = "any_rank_interrupted"
    ANY_RANK_COMPLETED: ClassVar[str] = "any_rank_completed"
    INTERRUPTION_RECORDS: ClassVar[str] = "interruption_records"
    INTERRUPTION_RECORDS_LOCK: ClassVar[str] = "interruption_records_lock"
    TERMINATED_RANKS: ClassVar[str] = "terminated_ranks"
    INITIAL_RANK: ClassVar[str] = "initial_rank_{rank}"
    ACTIVE_RANK: ClassVar[str] = "active_rank_{rank}"
    HEARTBEAT: ClassVar[str] = "heartbeat_{rank}"
    STATE: ClassVar[str] = "state_{rank}"
    KEY: ClassVar[str] = "key_{rank}"

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Ranks without which the store is gone; none."""
        return ()

    # -- barriers ------------------------------------------------------------------------------------------------

    def barrier(
        self,
        ranks: Iterable[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Wait until `rendezvous_count` ranks have come to `group_name`; `ranks` come by this call.

        Raises BarrierOverflow where more come, BarrierTimeout after `timeout`, of which at most `timeout_chunk` is
        waited for at a time.
        """
        base = f"{self.BARRIER_PREFIX}:barrier:{group_name}"
        come = self._raw.add(f"{base}:arrived", len(list(ranks)))
        if come > rendezvous_count:
            raise BarrierOverflow(
                f"{come} ranks have come to the barrier {group_name!r} of {rendezvous_count}: give each use its name"
            )
        self._meet(base, group_name, come, rendezvous_count, timeout, timeout_chunk)

    def reentrant_barrier(
        self,
        ranks: Iterable[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """The same, but a rank may come again, or be brought by another; it counts once."""
        base = f"{self.BARRIER_PREFIX}:reentrant_barrier:{group_name}"
        new = [r for r in ranks if self._raw.add(f"{base}:rank:{r}", 1) == 1]
        come = self._raw.add(f"{base}:arrived", len(new))
        if come > rendezvous_count:
            raise BarrierOverflow(f"{come} ranks have come to the barrier {group_name!r} of {rendezvous_count}")
        self._meet(base, group_name, come, rendezvous_count, timeout, timeout_chunk)

    def is_rank_at_reentrant_barrier(self, rank: int, group_name: str) -> bool:
        """Tell whether `rank` has come there."""
        return bool(self._raw.check([f"{self.BARRIER_PREFIX}:reentrant_barrier:{group_name}:rank:{rank}"]))

    initial_barrier = partialmethod(barrier, group_name=INITIAL_BARRIER)
    completion_barrier = partialmethod(reentrant_barrier, group_name=COMPLETION_BARRIER)
    iteration_barrier = partialmethod(reentrant_barrier, group_name=ITERATION_BARRIER)
    termination_barrier = partialmethod(reentrant_barrier, group_name=TERMINATION_BARRIER)

    def _meet(
        self, base: str, name: str, come: int, count: int, timeout: timedelta, timeout_chunk: timedelta | None
    ) -> None:
        last = f"{base}:last_worker_arrived"
        if come == count:
            self._raw.set(last, "1")
        if not self._came(last, timeout, timeout_chunk):
            come = self._raw.add(f"{base}:arrived", 0)
            raise BarrierTimeout(f"{come} of {count} ranks have come to the barrier {name!r} within {timeout}")

    def _came(self, key: str, timeout: timedelta, timeout_chunk: timedelta | None = None) -> bool:
        until = SYSTEM.now() + timeout.total_seconds()
        while not self._raw.check([key]):
            left = timedelta(seconds=until - SYSTEM.now())
            if left <= timedelta(0):
                return False
            try:
                self._raw.wait([key], min(left, timeout_chunk or left))
            except RuntimeError as error:  # torch's DistStoreError is one; a store that is gone is another
                if "imeout" not in str(error) and "timed out" not in str(error):
                    raise
        return True

    @property
    def _raw(self) -> Any:
        """This object as the store that it also is."""
        return self

    # -- interruptions -------------------------------------------------------------------------------------------

    def record_interrupted(self, records: Iterable[InterruptionRecord] | None = None) -> None:
        """Note that this iteration is over, and why; after `lock_interruption_records` the reasons are not kept."""
        if not self._raw.check([self.INTERRUPTION_RECORDS_LOCK]):
            for record in records or ():
                self._append(self.INTERRUPTION_RECORDS, str(record))
        self._raw.set(self.ANY_RANK_INTERRUPTED, "1")

    def wait_for_interrupted(self, timeout: timedelta) -> None:
        """Wait until somebody is interrupted. Raises torch's store error after `timeout`."""
        self._raw.wait([self.ANY_RANK_INTERRUPTED], timeout)

    def lock_interruption_records(self) -> None:
        """Keep the reasons as they are."""
        self._raw.set(self.INTERRUPTION_RECORDS_LOCK, "1")

    def get_interruption_records(self) -> list[InterruptionRecord]:
        """Return the reasons, in the order in which they came."""
        return [InterruptionRecord.from_str(text) for text in self._entries(self.INTERRUPTION_RECORDS)]

    def record_completed(self) -> None:
        """Note that a rank has completed."""
        self._raw.set(self.ANY_RANK_COMPLETED, "1")

    def wait_for_completed(self, timeout: timedelta) -> None:
        """Wait until somebody has completed. Raises torch's store error after `timeout`."""
        self._raw.wait([self.ANY_RANK_COMPLETED], timeout)

    def record_terminated_ranks(self, ranks: Iterable[int]) -> None:
        """Note ranks that are lost."""
        for rank in ranks:
            self._append(self.TERMINATED_RANKS, str(int(rank)))

    def get_terminated_ranks(self) -> set[int]:
        """Return the ranks that are lost."""
        return {int(text) for text in self._entries(self.TERMINATED_RANKS)}

    def get_packed(self, key: str, sep: str) -> list[str]:
        """Return the parts of the text under `key`; none where it is not set."""
        if not self._raw.check([key]):
            return []
        return [part for part in _text(self._raw.get(key)).split(sep) if part]

    def _append(self, key: str, text: str) -> None:
        number = self._raw.add(f"{key}:count", 1)
        self._raw.set(f"{key}:{number}", text)

    def _entries(self, key: str) -> Iterator[str]:
        for number in range(1, self._raw.add(f"{key}:count", 0) + 1):
            yield _text(self._raw.get(f"{key}:{number}"))

    # -- one value a rank ----------------------------------------------------------------------------------------

    def set_initial_rank(self, rank: int, initial_rank: int) -> None:
        """Note which rank `rank` was at first."""
        self._raw.set(self.INITIAL_RANK.format(rank=rank), str(initial_rank))

    def get_initial_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return which ranks they were at first, as numbers (W8)."""
        return [int(text) for text in self._values(self.INITIAL_RANK, ranks)]

    def set_active_rank(self, rank: int, active: int | None) -> None:
        """Note which active rank `rank` has."""
        self._raw.set(self.ACTIVE_RANK.format(rank=rank), json.dumps(active))

    def get_all_active_ranks(self, world_size: int) -> list[int | None]:
        """Return the active rank of each rank; None where it waits."""
        return [json.loads(text) for text in self._values(self.ACTIVE_RANK, range(world_size))]

    def send_heartbeat(self, rank: int) -> None:
        """Note that `rank` lives now: wall-clock seconds."""
        self._raw.set(self.HEARTBEAT.format(rank=rank), repr(SYSTEM.wall()))

    def get_heartbeat(self, rank: int) -> float:
        """Return when `rank` last lived."""
        return float(_text(self._raw.get(self.HEARTBEAT.format(rank=rank))))

    def get_all_heartbeats(self, world_size: int) -> list[float]:
        """Return when each rank last lived."""
        return [float(text) for text in self._values(self.HEARTBEAT, range(world_size))]

    def send_state(self, state: State, rank: int) -> None:
        """Note the state of `rank`, but for what its function raised."""
        fields = {name: value for name, value in vars(state).items() if name != "fn_exception"}
        self._raw.set(self.STATE.format(rank=rank), json.dumps(fields | {"mode": state.mode.name}))

    def get_states(self, ranks: Iterable[int]) -> list[State]:
        """Return the states of `ranks`."""
        found = [json.loads(text) for text in self._values(self.STATE, ranks)]
        return [State(**(fields | {"mode": Mode[fields["mode"]]})) for fields in found]

    def send_key(self, key: Any, rank: int) -> None:
        """Note the key of `rank`: anything that JSON holds."""
        self._raw.set(self.KEY.format(rank=rank), json.dumps(key))

    def get_keys(self, ranks: Iterable[int]) -> list[Any]:
        """Return the keys of `ranks`."""
        return [json.loads(text) for text in self._values(self.KEY, ranks)]

    def exchange(self, name: str, rank: int, text: str, ranks: Sequence[int], timeout: timedelta) -> dict[int, str]:
        """Say `text` under `name`, and return what each of `ranks` says there. The same name may be used again.

        Raises BarrierTimeout, naming who has said nothing within `timeout`.
        """
        used: dict[str, int] = self.__dict__.setdefault("_exchanges", {})
        used[name] = used.get(name, 0) + 1
        base = f"exchange:{name}:{used[name]}"
        self._raw.set(f"{base}:{rank}", text)
        until = SYSTEM.now() + timeout.total_seconds()
        for other in ranks:
            if not self._came(f"{base}:{other}", timedelta(seconds=max(0.0, until - SYSTEM.now()))):
                raise BarrierTimeout(f"rank {rank} waited {timeout} for what rank {other} says about {name!r}")
        return {other: _text(self._raw.get(f"{base}:{other}")) for other in ranks}

    def _values(self, key: str, ranks: Iterable[int]) -> list[str]:
        return [_text(self._raw.get(key.format(rank=rank))) for rank in ranks]


class TCPStore(StoreMixin, dist.TCPStore):  # type: ignore[misc]
    """Torch's TCPStore; rank 0 hosts it, or joins where somebody else already does."""

    TCP_STORE_HOST_RANK: ClassVar[int] = 0

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
    ) -> None:
        """What is left out is read from MASTER_ADDR, MASTER_PORT and WORLD_SIZE."""
        where = environ.placement()
        host = host_name or environ.get("MASTER_ADDR", "localhost") or "localhost"
        number = port if port is not None else int(environ.get("MASTER_PORT", _MASTER_PORT) or _MASTER_PORT)
        settings: dict[str, Any] = {
            "world_size": where.world_size if world_size is None else world_size,
            "timeout": timeout,
            "wait_for_workers": wait_for_workers,
            "multi_tenant": multi_tenant,
            "use_libuv": use_libuv,
        }
        hosts = where.rank == self.TCP_STORE_HOST_RANK
        try:
            dist.TCPStore.__init__(self, host, number, is_master=hosts, **settings)
        except RuntimeError:  # the port is taken: by the store that a former life of this rank began
            if not hosts:
                raise
            dist.TCPStore.__init__(self, host, number, is_master=False, **settings)

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """See `StoreMixin.critical_ranks`."""
        return (self.TCP_STORE_HOST_RANK,)


class PrefixStore(StoreMixin, dist.PrefixStore):  # type: ignore[misc]
    """The keys of one iteration on a store that lives on."""

    def __init__(self, iteration: int | str, store: dist.Store) -> None:
        self.base = store
        dist.PrefixStore.__init__(self, self.STORE_PREFIX.format(iteration=iteration), store)


class FileStore(StoreMixin, dist.FileStore):  # type: ignore[misc]
    """Torch's FileStore."""


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
