"""Tensors that are to come from another rank: what they will be like. NVRx's names."""

import torch
from torch import Tensor

from everstep.errors import UsageError


def get_default_device_from_type(device_type: str) -> torch.device:
    """Return the device of a kind that this process uses: the host, or the current one of an accelerator.

    Raises ValueError for a kind that is not here.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device_type:
        raise UsageError(
            f"there is no device of type {device_type!r} in this process: it has {found or 'the host alone'}"
        )
    return torch.device(device_type, torch.accelerator.current_device_index())


class TensorPlaceholder:
    """A tensor's shape, strides and dtype, and the kind of its device."""

    def __init__(self, tensor: Tensor) -> None:
        self.hollow_tensor = torch.empty_like(tensor, device="meta")
        self.orig_device_type = tensor.device.type

    def empty_like(self, device: torch.device | str | None = None) -> Tensor:
        """Return an empty tensor like it, on `device`, else on this process's device of its kind."""
        return torch.empty_like(self.hollow_tensor, device=device or self.device)

    @property
    def device(self) -> torch.device:
        """This process's device of its kind."""
        return get_default_device_from_type(self.orig_device_type)

    def restore(self, data: Tensor | None = None) -> Tensor:
        """Return `data` on its device, else an empty tensor. UsageError where shape or dtype differ."""
        if data is None:
            return self.empty_like()
        if (data.shape, data.dtype) != (self.hollow_tensor.shape, self.hollow_tensor.dtype):
            raise UsageError(
                f"a tensor of {tuple(self.hollow_tensor.shape)}, {self.hollow_tensor.dtype} is expected, and "
                f"{tuple(data.shape)}, {data.dtype} came"
            )
        return data.to(self.device)
