"""A module's parameters and persistent buffers, named as its `state_dict` would name the model inside its wrappers.

Wrappers are looked through: DDP's `module`, torch.compile's `_orig_mod`, activation checkpointing's
`_checkpoint_wrapped_module` are no part of a name, so a state fits with and without them. FSDP1 is refused: its state
dict gathers (EXPERIMENTS M5, C7).
"""

# nn.Module shows where a tensor stands, and a DTensor its local part without a dispatch, only in underscored names.
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from everstep.checkpoint.core.layout import Leaf, Ref, Section
from everstep.checkpoint.tensors import Collector, Part, Payload, check, dtype_name, local_of, stored, value_of

EXTRA = "extra_state"
_TRANSPARENT = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

Entry = tuple[str, MutableMapping[str, Any], str, Tensor, bool]
"""Name, the module's dict that holds the tensor, the key in it, the tensor, and whether it is a parameter."""


class Watch:
    """Whether tensors still stand where they were found: by identity and storage pointer."""

    def __init__(self) -> None:
        self._held: list[tuple[MutableMapping[Any, Any], Any, Tensor]] = []
        self._pointers: list[tuple[Tensor, int]] = []
        self._locals: list[tuple[Any, Tensor]] = []
        self._lengths: list[tuple[Any, int]] = []

    def tensor(self, holder: MutableMapping[Any, Any], key: Any, value: Tensor) -> None:
        """Watch one tensor in its place."""
        self._held.append((holder, key, value))
        if isinstance(value, DTensor):
            local = value._local_tensor
            self._locals.append((value, local))
            self._pointers.append((local, local.data_ptr()))
        else:
            self._pointers.append((value, value.data_ptr()))

    def length(self, container: Any) -> None:
        """Watch that nothing is added or taken away."""
        self._lengths.append((container, len(container)))

    def holds(self) -> bool:
        """True as long as all is as it was."""
        return (
            all(len(container) == length for container, length in self._lengths)
            and all(holder.get(key) is value for holder, key, value in self._held)
            and all(value._local_tensor is local for value, local in self._locals)
            and all(value.data_ptr() == pointer for value, pointer in self._pointers)
        )


class ModuleSource:
    """One model."""

    def __init__(self, name: str, module: nn.Module, world_size: int) -> None:
        self._name = name
        self._module = module
        self._world_size = world_size
        self._part: Part | None = None
        self._watch = Watch()
        self._extra = False
        self.gated: frozenset[Tensor] = frozenset()  # parameters that an optimizer's step alone writes
        self._ddp = [prefix for prefix, inner in walk_modules(module) if _is_ddp(inner)]
        _refuse_fsdp1(name, module)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters with their names; a tied one comes once, under its first name."""
        seen: set[int] = set()
        for fqn, _, _, value, is_parameter in self._entries():
            if is_parameter and id(value) not in seen:
                seen.add(id(value))
                yield fqn, value

    def replicated_parameters(self) -> list[Tensor]:
        """Parameters that DDP keeps equal on all ranks."""
        return [v for fqn, _, _, v, is_parameter in self._entries() if is_parameter and self._same(fqn)]

    def stable(self) -> list[Part]:
        """See `walk.Source`."""
        if self._part is None or not self._watch.holds():
            _reshard(self._module)
            self._part = self._walk()
        return [self._part]

    def changing(self) -> list[Part]:
        """See `walk.Source`."""
        if not self._extra:
            return []
        name = f"{self._name}/{EXTRA}"
        collector = Collector(name, per_rank=self._world_size > 1)
        state = {fqn: module.get_extra_state() for fqn, module in _with_extra(self._module)}
        return [collector.part(collector.node(name, state), per_rank=self._world_size > 1)]

    def names(self) -> tuple[str, ...]:
        """See `walk.Source`."""
        self.stable()
        return (self._name, f"{self._name}/{EXTRA}") if self._extra else (self._name,)

    def mismatches(self, saved: Mapping[str, Section]) -> list[str]:
        """See `walk.Source`."""
        section = saved[self._name]
        live = {fqn: value for fqn, _, _, value, _ in self._entries()}
        found = [f"{self._name}/{fqn} is missing in the saved state" for fqn in live if fqn not in section.tree]
        found += [f"{self._name}/{fqn} was saved and is not in the model" for fqn in section.tree if fqn not in live]
        for fqn, ref in section.tree.items():
            if fqn in live:
                found += differences(section.leaves[ref.leaf], live[fqn])
        return found

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """See `walk.Source`."""
        _reshard(self._module)
        section = saved[self._name]
        with torch.no_grad():
            for fqn, _, _, value, _ in self._entries():
                local_of(value).copy_(stored(section.leaves[section.tree[fqn].leaf], payload))
        extra = saved.get(f"{self._name}/{EXTRA}")
        if extra is not None:
            states = value_of(extra.tree, extra.leaves, payload)
            for fqn, module in _with_extra(self._module):
                module.set_extra_state(states[fqn])

    def future_bytes(self) -> tuple[int, int]:
        """See `walk.Source`."""
        return 0, 0

    def _same(self, fqn: str) -> bool:
        return self._world_size == 1 or any(fqn.startswith(prefix) for prefix in self._ddp)

    def _walk(self) -> Part:
        collector, watch = Collector(self._name), Watch()
        tree: dict[str, Ref] = {}
        own = self._world_size > 1
        for fqn, holder, key, value, is_parameter in self._entries():
            same = not own or (is_parameter and self._same(fqn))
            path, late = f"{self._name}/{fqn}", value in self.gated
            tree[fqn] = collector.tensor(path, value, replicated=same, per_rank=not same, late=late)
            watch.tensor(holder, key, value)
        for module in self._module.modules():
            for container in (module._parameters, module._buffers, module._modules):
                watch.length(container)
        self._watch = watch
        self._extra = any(True for _ in _with_extra(self._module))
        return collector.part(tree)

    def _entries(self) -> Iterator[Entry]:
        for prefix, module in walk_modules(self._module):
            for key, value in module._parameters.items():
                if value is not None:
                    yield prefix + key, module._parameters, key, value, True
            skipped = module._non_persistent_buffers_set
            for key, value in module._buffers.items():
                if value is not None and key not in skipped:
                    yield prefix + key, module._buffers, key, value, False


def walk_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules with the prefix of their tensors' names; wrappers have that of what they wrap.

    A module that stands in two places comes twice, as in `state_dict`: its tensors become aliases.
    """
    yield prefix, module
    for key, child in module._modules.items():
        if child is not None:
            hidden = key in _TRANSPARENT or (key == "module" and _is_ddp(module))
            yield from walk_modules(child, prefix if hidden else f"{prefix}{key}.")


def differences(leaf: Leaf, live: Tensor) -> list[str]:
    """Say in what a saved tensor and the live one that is to take it differ."""
    check(live, leaf.path)
    local = local_of(live)
    saved_facts = (leaf.dtype, leaf.shape, leaf.whole_shape)
    live_facts = (dtype_name(local.dtype), tuple(local.shape), tuple(live.shape))
    if saved_facts == live_facts:
        return []
    return [f"{leaf.path} was saved as {_told(*saved_facts)} and is {_told(*live_facts)}"]


def _told(dtype: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}" + ("" if shape == whole else f" of {list(whole)}")


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


def _with_extra(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    for prefix, inner in walk_modules(module):
        if type(inner).get_extra_state is not plain:
            yield prefix + "_extra_state", inner


def _refuse_fsdp1(name: str, module: nn.Module) -> None:
    for inner in module.modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(inner).__mro__):
            raise TypeError(
                f"run.steps({name}=…): FSDP1 (FullyShardedDataParallel) is not supported, since its state can only be "
                "had by gathering. Use fully_shard (FSDP2): torch.distributed.fsdp.fully_shard(model)."
            )


def _reshard(module: nn.Module) -> None:
    """An FSDP2 module whose last forward was not followed by a backward still holds whole parameters."""
    for inner in module.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(inner).__mro__):
            inner.reshard()  # pyright: ignore[reportCallIssue]
