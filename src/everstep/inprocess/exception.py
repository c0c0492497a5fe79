"""What in-process restart raises, under NVRx's names.

RestartError(Exception)     one attempt or one rank has failed; the others may go on
├── HealthCheckError        this rank is not fit to go on
├── InternalError           a state that should not exist
└── TimeoutError            a user's callback took too long
RestartAbort(BaseException) end now: no more restarts
"""

import builtins


class RestartError(Exception):
    """Base of what goes wrong around a restart."""


class HealthCheckError(RestartError):
    """This rank is not fit to go on; the message says what was measured and what was expected."""


class InternalError(RestartError):
    """A state that should not exist: a bug of ours, told with its story."""


class TimeoutError(RestartError, builtins.TimeoutError):  # noqa: A001 - NVRx's name
    """A user's callback did not end within its time."""


class RestartAbort(BaseException):
    """End the job now: raised where another restart would be of no use. No Exception, so that `except` misses it."""
