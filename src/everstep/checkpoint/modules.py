"""A module's parameters and persistent buffers, named as its `state_dict` would name the model inside its wrappers.

Wrappers are looked through: DDP's `module`, torch.compile's `_orig_mod`, activation checkpointing's
`_checkpoint_wrapped_module` are no part of a name, so a state fits with and without them. FSDP1 is refused: its state
dict gathers (EXPERIMENTS M5, C7).
"""

# nn.Module shows where a tensor stands, and a DTensor its local part without a dispatch, only in underscored names.
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from everstep.checkpoint.core.layout import Leaf, Ref, Section
from everstep.checkpoint.tensors import Collector, Part, Payload, Reading, check, dtype_name, local_of, stored, value_of
from everstep.checkpoint.watch import Watch

EXTRA = "extra_state"
_TRANSPARENT = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

Entry = tuple[str, Tensor, bool]
"""Name, tensor, and whether it is a parameter."""


class ModuleSource:
    """One model."""

    def __init__(self, name: str, module: nn.Module, world_size: int) -> None:
        self._name = name
        self._module = module
        self._world_size = world_size
        self.part: Part | None = None  # as last walked
        self._watch = Watch()
        self._extra = False
        self._reading = Reading(f"{name}/{EXTRA}", per_rank=world_size > 1)
        self.gated: frozenset[Tensor] = frozenset()  # parameters that an optimizer's step alone writes
        self._ddp = [prefix for prefix, inner in walk_modules(module) if _is_ddp(inner)]
        _refuse_fsdp1(name, module)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters with their names; a tied one comes once, under its first name."""
        seen: set[int] = set()
        for fqn, value, is_parameter in self._entries():
            if is_parameter and id(value) not in seen:
                seen.add(id(value))
                yield fqn, value

    def replicated_parameters(self) -> list[Tensor]:
        """Parameters that DDP keeps equal on all ranks."""
        return [v for fqn, v, is_parameter in self._entries() if is_parameter and self._same(fqn)]

    def stable(self) -> list[Part]:
        """See `walk.Source`."""
        if self.part is None or not self._watch.holds():
            _reshard(self._module)
            self.part = self._walk()
        return [self.part]

    def changing(self) -> list[Part]:
        """See `walk.Source`."""
        if not self._extra:
            return []
        return [self._reading.part({fqn: module.get_extra_state() for fqn, module in _with_extra(self._module)})]

    def names(self) -> tuple[str, ...]:
        """See `walk.Source`."""
        self.stable()
        return (self._name, f"{self._name}/{EXTRA}") if self._extra else (self._name,)

    def mismatches(self, saved: Mapping[str, Section]) -> list[str]:
        """See `walk.Source`."""
        section = saved[self._name]
        live = {fqn: value for fqn, value, _ in self._entries()}
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
            for fqn, value, _ in self._entries():
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
        for fqn, value, is_parameter in self._entries():
            same = not own or (is_parameter and self._same(fqn))
            path, late = f"{self._name}/{fqn}", value in self.gated
            tree[fqn] = collector.tensor(path, value, replicated=same, per_rank=not same, late=late)
            watch.tensor(value, collector.local)
        for module in self._module.modules():
            _watch(watch, module)
        self._watch = watch
        self._extra = any(True for _ in _with_extra(self._module))
        return collector.part(tree)

    def _entries(self) -> Iterator[Entry]:
        for prefix, module in walk_modules(self._module):
            for key, value in module._parameters.items():
                if value is not None:
                    yield prefix + key, value, True
            skipped = module._non_persistent_buffers_set
            for key, value in module._buffers.items():
                if value is not None and key not in skipped:
                    yield prefix + key, value, False


class Names:
    """What an optimizer calls its parameters: the models' names for them, looked up anew when a model has changed."""

    def __init__(self, models: Mapping[str, ModuleSource]) -> None:
        self._models = models
        self._parts: list[Part | None] | None = None
        self.known: Mapping[Tensor, str] = {}
        self.replicated: frozenset[Tensor] = frozenset()

    def look(self) -> Mapping[Tensor, str]:
        """Return the names, another object whenever one may differ; call it after `stable` of the models."""
        parts = [source.part for source in self._models.values()]
        if parts != self._parts:
            self._parts, known = parts, dict[Tensor, str]()
            for name, source in self._models.items():
                prefix = f"{name}." if len(self._models) > 1 else ""
                for fqn, parameter in source.parameters():
                    known.setdefault(parameter, prefix + fqn)
            self.known = known
            self.replicated = frozenset(p for s in self._models.values() for p in s.replicated_parameters())
        return self.known


def _watch(watch: Watch, module: nn.Module) -> None:
    """Everything by which `walk_modules` and `_entries` find their way."""
    for name in ("_parameters", "_buffers", "_modules"):
        held = getattr(module, name)
        watch.place(vars(module), name, held)
        watch.size(held)
        for key, value in held.items():
            watch.place(held, key, value)
    if module._buffers:
        watch.contents(module._non_persistent_buffers_set)


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
