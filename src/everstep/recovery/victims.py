"""Whose exception says no more than that another rank is gone.

What gloo and NCCL raise then has its cause elsewhere: in a death that an agent is about to see, or in the exception of
a rank that has closed its connections over it.
"""

_PEER_GONE = ("gloo/transport/tcp", "Connection closed by peer", "ncclRemoteError", "NCCL communicator was aborted")
_DEEPEST = 10


def is_victim(error: BaseException | None) -> bool:
    """Tell whether `error`, or what it was raised from or over, is the loss of a peer."""
    for _ in range(_DEEPEST):
        if error is None:
            return False
        if isinstance(error, RuntimeError) and _says_so(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _says_so(error: RuntimeError) -> bool:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return False
    return any(sign in text for sign in _PEER_GONE)
