"""Doubles of what the fault slice meets: an agent's host, torch's hooks."""

from dataclasses import dataclass, field

import pytest

from everstep.faults import flags


@dataclass
class StillClock:
    """Time that stands still until a test moves it."""

    at: float = 100.0

    def now(self):
        return self.at

    def wall(self):
        return 1_000_000 + self.at


@dataclass
class FakeHost:
    """Keeps what a companion does."""

    run_dir: str
    world_size: int = 2
    clock: StillClock = field(default_factory=StillClock)
    sent: list = field(default_factory=list)  # (rank, message)
    events: list = field(default_factory=list)
    order: list = field(default_factory=list)  # what was done, in order
    timers: list = field(default_factory=list)

    def send(self, rank, message, fds=()):
        assert not fds
        self.sent.append((rank, dict(message)))
        self.order.append(message["kind"])

    def emit(self, event):
        self.events.append(event)
        self.order.append(type(event).__name__)

    def later(self, delay_s):
        self.timers.append(delay_s)

    def recheck(self):
        pass

    def spawn(self, name, entry, arguments):
        raise AssertionError("the fault companion has no helpers")

    def take(self):
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def host(tmp_path):
    return FakeHost(str(tmp_path / "run"))


@pytest.fixture(autouse=True)
def nothing_asked():
    flags.forget()
    yield
    flags.forget()
