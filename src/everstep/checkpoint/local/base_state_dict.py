"""What a local checkpoint manager asks of a state: its tensors apart from everything else. NVRx's interface."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, ValuesView
from typing import Any

from torch import Tensor


class TensorAwareStateDict(ABC):
    """A state whose tensors can be taken out, leaving a hollow that is small and picklable, and be put back."""

    @abstractmethod
    def pop_tensors(self) -> Sequence[Tensor]:
        """Take the tensors out and return them; what is left is hollow, and knows their shapes, dtypes and devices."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """The tensors, in the order of `pop_tensors`."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """True while the tensors are out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[Tensor]) -> None:
        """Put tensors into a hollow, in the order of `pop_tensors`."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put empty tensors of the same shapes, dtypes and devices into a hollow."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Hold copies on the host instead of the tensors, and know where they came from."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Bring the tensors back to the kind of device that they came from."""

    def values(self) -> ValuesView[Any]:
        """Return what the object holds."""
        return vars(self).values()
