"""`Run`: what the wrapped function holds of its job in one generation."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar, overload

import torch

from everstep.errors import UsageError
from everstep.events import Category, SpanClosed, SpanOpened
from everstep.process.page import Phase
from everstep.training.loop import Steps
from everstep.training.parts import Asked, Parts

T = TypeVar("T")
_kept: dict[str, Any] = {}


class Run:
    """One rank's view of the job. Made anew for every generation; all methods are for the function's own thread."""

    def __init__(self, parts: Parts, *, rank: int, world_size: int, local_rank: int, generation: int) -> None:
        self._parts = parts
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.generation = generation
        """How often the function has been called before in this job: 0 at its first start (NVRx: iteration)."""
        self.device = parts.device
        self._logged: dict[str, Any] = {}
        self._looped = False
        self._phases: list[tuple[int, float, str]] = []  # declared and not left, with their limits and names

    @overload
    def steps(
        self,
        total: int,
        /,
        *,
        checkpoint_dir: str | None = None,
        checkpoint_interval: int | None = None,
        checkpoint_local_dir: str | None = None,
        checkpoint_local_interval: int | None = None,
        allow_pickle: bool = False,
        **state: Any,
    ) -> Iterator[int]: ...

    @overload
    def steps(
        self,
        total: int,
        loader: Iterable[T],
        /,
        *,
        checkpoint_dir: str | None = None,
        checkpoint_interval: int | None = None,
        checkpoint_local_dir: str | None = None,
        checkpoint_local_interval: int | None = None,
        allow_pickle: bool = False,
        **state: Any,
    ) -> Iterator[tuple[int, T]]: ...

    def steps(
        self,
        total: int,
        loader: Iterable[Any] | None = None,
        /,
        *,
        checkpoint_dir: str | None = None,
        checkpoint_interval: int | None = None,
        checkpoint_local_dir: str | None = None,
        checkpoint_local_interval: int | None = None,
        allow_pickle: bool = False,
        **state: Any,
    ) -> Iterator[Any]:
        """Yield `(step, batch)`, or the step alone where there is no loader, up to `total`; steps count from 1.

        `state` is anything with `state_dict` and `load_state_dict`: models, optimizers, schedulers. It is restored, and
        the loader with it, before the first step is yielded. A step is done when control comes back here: there its
        snapshot is taken. One iteration is one optimizer step. `checkpoint_…` are what the flags of `everstep run` say
        anyway; where they say otherwise it is an error.

        allow_pickle: what a state_dict holds beside plain values, tensors and arrays is pickled, and unpickled where it
        is restored; without it such a thing is refused by its key. Only for checkpoints whose writer you trust.

        Raises UsageError for a second call in one run, for `total` below 0, and for state that cannot be saved (its key
        is named).
        """
        if self._looped:
            raise UsageError("run.steps was called twice in one run: one loop of steps holds all of a job's progress.")
        if total < 0:
            raise UsageError(f"run.steps({total}): give the number of steps of the whole job, 0 or more.")
        self._looped = True
        steps = Steps(self._parts, total, loader, state, self._take_logged)
        asked = Asked(
            checkpoint_dir, checkpoint_interval, checkpoint_local_dir, checkpoint_local_interval, allow_pickle
        )
        return steps.iterate(asked)

    def log(self, **values: Any) -> None:
        """Note numbers of this step (floats, ints, one-element tensors); written to the ledger exactly, per rank.

        Device tensors are read one step later, so that no step waits for the device.
        """
        for name, value in values.items():
            self._logged[name] = value.detach() if isinstance(value, torch.Tensor) else float(value)

    def _take_logged(self) -> dict[str, Any]:
        values, self._logged = self._logged, {}
        return values

    @contextlib.contextmanager
    def phase(self, name: str, limit: float | None = None) -> Generator[None]:
        """Declare that what follows is not a step (`eval`, `save`): with `limit` seconds of its own, or none."""
        if limit is not None and limit <= 0:
            raise UsageError(f"run.phase({name!r}, limit={limit!r}): give seconds, more than 0, or None for no limit.")
        with self._declared(Phase.DECLARED, Category.PHASE, limit or 0.0, name):
            yield

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Declare that this rank waits for something outside (a person, a cluster): no limit applies anywhere."""
        with self._declared(Phase.PAUSED, Category.PAUSED, 0.0, "paused"):
            yield

    @contextlib.contextmanager
    def _declared(self, phase: int, category: Category, limit_s: float, name: str) -> Generator[None]:
        parts = self._parts
        outer = self._phases[-1] if self._phases else (parts.phase, 0.0, "")
        self._phases.append((phase, limit_s, name))
        parts.enter_phase(phase, limit_s, name)
        parts.emit(SpanOpened(category=category.value))
        try:
            yield
        finally:
            parts.emit(SpanClosed(category=category.value))
            self._phases.pop()
            parts.enter_phase(*outer)

    def ping(self) -> None:
        """Give a sign of progress from inside a long step."""
        self._parts.mark()

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """A section in which this rank is not interrupted; keep it short, others wait for its end."""
        return self._parts.atomic()

    def keep(self, key: str, make: Callable[[], T]) -> T:
        """Return what `make` made when `key` was first asked for in this process: host objects over generations.

        For what is costly and does not change (datasets, pretrained weights on the host); never for trained state.
        """
        if key not in _kept:
            _kept[key] = make()
        return _kept[key]  # type: ignore[no-any-return]
