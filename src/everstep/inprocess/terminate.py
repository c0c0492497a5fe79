"""`Terminate`: a callback of the wrapper."""

import abc

from everstep.inprocess.state import FrozenState


class Terminate(abc.ABC):
    """Run by a rank that leaves, after what made it leave and before its process ends or is replaced."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do it, and return `state`. Called on the thread of the wrapped call."""
        ...
