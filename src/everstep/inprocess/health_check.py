"""`HealthCheck`: whether this rank may go on. Run before each iteration, and after each one that was left.

What a check raises ends this rank: its process is replaced where that can be. A check that cannot look (no CUDA, no
NVML, no NIC) says so once and passes: what was not measured is no verdict (W10).
"""

import abc
from datetime import timedelta

from everstep.clock import SYSTEM, Clock
from everstep.errors import UsageError
from everstep.inprocess import bounded, devices
from everstep.inprocess.exception import HealthCheckError, RestartError
from everstep.inprocess.exception import TimeoutError as CheckTimeout
from everstep.inprocess.state import FrozenState


class HealthCheck(abc.ABC):
    """Judges this rank."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return `state`, or raise. Called on the thread of the wrapped call, the function off the stack."""
        ...


class CudaHealthCheck(HealthCheck):
    """The device finishes what it was given, within `timeout`. Passes where CUDA has not been used."""

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """Synchronize twice: in a thread with the limit, then here, so that errors of the device come out here."""
        import torch  # noqa: PLC0415 - the other checks work without

        if not torch.cuda.is_initialized():
            return state
        device = torch.cuda.current_device()
        outcome = bounded.run("cuda check", lambda: torch.cuda.synchronize(device), self.timeout.total_seconds())
        if outcome.late:
            raise CheckTimeout(
                f"rank {state.rank}: device {device} has not finished its work within {self.timeout}; a kernel hangs "
                "(a collective that was not aborted, or a faulty GPU)"
            )
        if outcome.error is not None:
            raise HealthCheckError(f"rank {state.rank}: device {device}: {outcome.error}") from outcome.error
        torch.cuda.synchronize(device)
        return state


class Confirmed(HealthCheck):
    """Another check's verdict counts when it was the same `times` in a row, `pause` apart: links may be down briefly.

    Each look has `timeout`, which must be more than what the check takes; one that is late counts as a verdict, and its
    thread is left alone. The check runs in a thread of its own.
    """

    def __init__(
        self,
        check: HealthCheck,
        times: int = 3,
        pause: timedelta = timedelta(seconds=1),
        timeout: timedelta = timedelta(seconds=30),
        clock: Clock = SYSTEM,
    ) -> None:
        if times < 1:
            raise UsageError(f"Confirmed(times={times}): give 1 or more")
        self.check, self.times, self.pause, self.timeout = check, times, pause, timeout
        self._clock = clock

    @property
    def most_s(self) -> float:
        """How long it may take at most."""
        return self.times * self.timeout.total_seconds() + (self.times - 1) * self.pause.total_seconds()

    def __call__(self, state: FrozenState) -> FrozenState:
        """Pass as soon as one look passes; raise HealthCheckError with the last verdict."""
        verdict = ""
        for number in range(self.times):
            if number:
                self._clock.sleep(self.pause.total_seconds())
            outcome = bounded.run("health check", lambda: self.check(state), self.timeout.total_seconds())
            if not outcome.late and outcome.error is None:
                return state
            late = f"not done within {self.timeout}"
            verdict = late if outcome.late else f"{type(outcome.error).__name__}: {outcome.error}"
        raise HealthCheckError(f"rank {state.rank}: {self.times} times in a row, the last: {verdict}")


class FaultCounterExceeded(RestartError):
    """This process has raised more often than it may."""


class FaultCounter(HealthCheck):
    """Counts what the function raised in this process itself; more than `max_rank_faults` end the rank. None: any."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Count, and raise FaultCounterExceeded where it is enough."""
        if state.fn_exception is None:
            return state
        self.faults_count += 1
        if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"rank {state.rank} has raised {self.faults_count} times, and FaultCounter("
                f"max_rank_faults={self.max_rank_faults}) allows {self.max_rank_faults}; the last: "
                f"{type(state.fn_exception).__name__}: {state.fn_exception}"
            )
        return state


class _DeviceCheck(HealthCheck):
    """Judges one device by what the driver says of it. `device_index`: as NVML counts; None: this rank's own."""

    look = staticmethod(devices.gpu_trouble)

    def __init__(self, device_index: int | None = None) -> None:
        self.device_index = device_index

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise HealthCheckError with what the driver says."""
        trouble = type(self).look(self.device_index)
        if trouble:
            raise HealthCheckError(f"rank {state.rank}: {trouble}")
        return state


class ChainedGPUHealthCheck(_DeviceCheck):
    """The driver asks for no recovery (reset, reboot, drain) of this rank's GPU."""


class ChainedNVLHealthCheck(_DeviceCheck):
    """Every NVLink of this rank's GPU is up. Told, and passed: a link that is down slows a job and does not end it."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Tell what is down, once."""
        devices.tell_once(devices.nvlink_trouble(self.device_index))
        return state


class ChainedNicHealthCheck(_DeviceCheck):
    """No InfiniBand port of this node has gone down since the last look."""

    def __init__(self, device_index: int | None = None) -> None:
        super().__init__(device_index)
        self._counters = devices.LinkCounters()

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise HealthCheckError with the ports that went down."""
        fallen = self._counters.fallen()
        if fallen:
            raise HealthCheckError(f"rank {state.rank}: links went down since the last look: {', '.join(fallen)}")
        return state
