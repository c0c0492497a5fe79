"""The exception tree of Everstep.

    EverstepError
    ├── UsageError            a flag, argument or call that cannot be meant (exit code 64)
    ├── ConfigurationError    the machine or the files do not allow what was asked (exit code 78)
    │   └── MemoryShortage    not enough host memory for the snapshots
    ├── ProtocolError         a message that the protocol does not allow here: a bug of ours, told with its story
    ├── CheckpointError       a checkpoint that cannot be written or read
    │   ├── DamagedCheckpoint names the file and the wound
    │   └── UnreachableStorage  where checkpoints lie does not answer, so nobody knows what is there (exit code 75)
    ├── WorldTooSmall         the world has shrunk, and the state that is kept is of more ranks (exit code 75)
    ├── StateMismatch         what was saved does not fit what is to be restored; names the keys
    ├── StoreError            the store refused, is gone, or did not answer in time
    │   └── StoreTimeout
    ├── JobEnded              the job is over, told to those of its ranks that live; the message is its story
    └── LedgerError           a second that cannot be placed, or an event that cannot be read

    JobDrained                no error: the job is asked to end (a SystemExit with code 0, raised between two steps)

Every message tells what happened, to whom, what was expected, and the mend.
"""

import enum


class ExitCode(enum.IntEnum):
    """What the scheduler reads from us (DESIGN, Exit codes)."""

    DONE = 0
    FAILED = 1
    USAGE = 64
    BAD_NODE = 75
    CONFIGURATION = 78
    DO_NOT_REQUEUE = 93
    SIGNALLED = 128  # plus the number of the signal


class EverstepError(Exception):
    """Base of all errors that Everstep raises on purpose."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(EverstepError, ValueError):
    """A flag, an argument or a call that cannot be meant as it stands."""

    exit_code = ExitCode.USAGE


class ConfigurationError(EverstepError):
    """The machine, the environment or the files do not allow what was asked for."""

    exit_code = ExitCode.CONFIGURATION


class MemoryShortage(ConfigurationError):
    """Host memory does not hold the snapshots; the message says how much is needed and what to change."""


class ProtocolError(EverstepError):
    """An event arrived that the protocol does not allow in this phase."""


class JobEnded(EverstepError):
    """The job is over on all ranks: a rank is lost for good, or no restart is left. Raised from the wrapped call."""


class CheckpointError(EverstepError):
    """A checkpoint could not be written or read."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not whole; the message names the file and what is wrong with it."""


class UnreachableStorage(CheckpointError):
    """What is saved cannot be read now: its storage does not answer, or refuses. It may be whole: start again later."""

    exit_code = ExitCode.BAD_NODE


class WorldTooSmall(EverstepError):
    """Some ranks are lost for good, and the state that is kept for all of them cannot go on with fewer."""

    exit_code = ExitCode.BAD_NODE


class BadNode(EverstepError):
    """This node may not take part: it is not well, or was left out. Others may go on without it."""

    exit_code = ExitCode.BAD_NODE


class StateMismatch(EverstepError):
    """Saved state does not fit the objects it is to be restored into; the message names the keys."""

    exit_code = ExitCode.CONFIGURATION


class StoreError(EverstepError):
    """The store refused a call, is gone, or its reply cannot be trusted."""


class StoreTimeout(StoreError, TimeoutError):
    """The store did not answer within the deadline; its connection has been shut down."""


class LedgerError(EverstepError):
    """The event log of a run cannot be read, or does not account for every second."""


class JobDrained(SystemExit):
    """The job was asked to end, and this rank leaves it after the step that ran. A SystemExit: no `except Exception`
    takes it for a fault, and what follows the wrapped call is not run as if training were done.
    """

    def __init__(self, step: int) -> None:
        """`step`: the last one that all ranks have done."""
        super().__init__(0)
        self.step = step
