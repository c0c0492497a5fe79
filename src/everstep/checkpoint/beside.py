"""A tensor of an optimizer's state beside its parameter: whether a live one takes the saved bytes, or one is made."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from everstep.checkpoint.core.layout import Leaf
from everstep.checkpoint.modules import differences
from everstep.checkpoint.remake import fresh
from everstep.checkpoint.sharded import local_of
from everstep.checkpoint.tensors import Payload, as_saved


def shaped_as(leaf: Leaf, parameter: Tensor) -> bool:
    """True where a saved shard is the parameter's own rectangle."""
    return tuple(parameter.shape) == leaf.whole_shape and tuple(local_of(parameter).shape) == leaf.shape


def takes(held: Tensor, leaf: Leaf) -> bool:
    """True where a live tensor can take the bytes in place: same kind, shape, dtype and kind of device."""
    if as_saved(leaf, held):
        return held.device.type == leaf.device and not leaf.placements
    local = local_of(held)
    alike = isinstance(held, DTensor) == bool(leaf.placements) and local.device.type == leaf.device
    return alike and not differences(leaf, held)


def made(leaf: Leaf, parameter: Tensor, payload: Payload) -> Tensor:
    """A new state tensor: beside its parameter where it lived on that kind of device; sharded as its parameter is."""
    beside = local_of(parameter).device
    local = fresh(leaf, payload, beside if beside.type == leaf.device else None)
    if not leaf.placements or not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
