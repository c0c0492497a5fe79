"""`Completion`: a callback of the wrapper."""

import abc

from everstep.inprocess.state import FrozenState


class Completion(abc.ABC):
    """Run by every rank after all have completed the function; what it raises is told, and changes nothing."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do it, and return `state`. Called on the thread of the wrapped call."""
        ...
