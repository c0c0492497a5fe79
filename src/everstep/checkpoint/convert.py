"""A committed checkpoint as one file of `torch.save`, or as Hugging Face's safetensors: for others.

Names are the model's own. Taken is what is one thing in the whole world: models, optimizers, schedulers, whatever all
ranks held alike; what belongs to a rank alone (generators, a loader's position) is left out, and said. Every byte is
verified while it is read. The result takes its name when it is whole and durable; nothing that exists is overwritten.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everstep.checkpoint.core.layout import Layout, Leaf, Ref, Section
from everstep.checkpoint.core.reshard import Digest, Resharded, Wish, reshard
from everstep.checkpoint.core.trees import mapped
from everstep.checkpoint.load import State, open_for
from everstep.checkpoint.modules import EXTRA
from everstep.checkpoint.remake import fresh, numbers_in, pickled_in, value_of
from everstep.checkpoint.walk import RNG
from everstep.errors import CheckpointError, ConfigurationError, UsageError

SHARD_BYTES = 5 * 1000**3
"""What transformers cuts at: 5 GB a file."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. `left_out`: what belongs to each rank alone, a sentence each."""

    files: tuple[str, ...]
    bytes: int
    tensors: int
    left_out: tuple[str, ...]


class _Whole:
    """One who takes everything whole, as a world of one rank would."""

    rank, world_size = 0, 1

    def divided_as(self, layout: Layout) -> bool:
        """True where no tensor is a shard."""
        return not any(leaf.placements for leaf in layout.leaves())

    def reshard(self, saved: Sequence[Layout], digest: Digest) -> Resharded:
        """Whole tensors; of a world of one rank that has shards, the same."""
        wishes = {
            section.name: Wish({n: _whole(leaf) for n, leaf in enumerate(section.leaves)}, by_leaf=_is_model(section))
            for section in saved[0].sections
        }
        return reshard(saved, 0, 1, wishes, digest)


def _whole(leaf: Leaf) -> Leaf:
    return replace(leaf, shape=leaf.whole_shape, global_shape=None, offsets=None, placements=(), device="cpu")


def convert(path: str, to: str, out: str, only: str | None = None, shard_bytes: int = SHARD_BYTES) -> Converted:
    """Convert the checkpoint at `path` (verified before) to `torch` or `safetensors` at `out`, which must not exist.

    Raises UsageError for what cannot be meant, DamagedCheckpoint, ConfigurationError where safetensors is missing.
    """
    if os.path.lexists(out):
        raise UsageError(f"{out} exists; nothing is overwritten. Give another name, or move it away.")
    parent = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(parent):
        raise UsageError(f"{parent} is no directory; make it first, or give another name.")
    writers: Mapping[str, Callable[[State, list[Section], str, int], tuple[str, ...]]] = {
        "torch": _torch, "safetensors": _safetensors,
    }  # fmt: skip
    with open_for(path, _Whole()) as state:
        sections, left_out = _chosen(state, only, flat=to == "safetensors")
        staging = os.path.join(parent, f".{os.path.basename(out)}.{os.getpid()}.everstep-tmp")
        try:
            files = writers[to](state, sections, staging, shard_bytes)
            _take_name(staging, out)
        finally:
            _remove(staging)
    size = sum(leaf.nbytes for section in sections for leaf in section.leaves if leaf.alias_of is None)
    count = sum(1 for section in sections for _ in numbers_in(section.tree))
    return Converted(tuple(os.path.join(out, name) if name else out for name in files), size, count, left_out)


def _chosen(state: State, only: str | None, *, flat: bool) -> tuple[list[Section], tuple[str, ...]]:
    """The sections to convert, and why others are left out."""
    own = [f"{RNG}: random generators belong to each rank alone"]
    there = tuple(section.name for section in state.layout.sections)
    refused = {name: why for name, why in state.refused.items() if not name.startswith(RNG)}
    taken = {name for name in refused if name.startswith(tuple(f"{section}/" for section in there))}
    left_out = (*own, *(f"{why}{'; rank 0 has given it' if n in taken else ''}" for n, why in refused.items()))
    pickled = tuple(path for section in state.layout.sections for path in pickled_in(section))
    left_out += tuple(f"{path} was pickled, and nothing is unpickled here" for path in pickled)
    sections = [section for section in state.layout.sections if section.name != RNG and not any(pickled_in(section))]
    if flat:
        sections = [section for section in sections if _is_model(section)]
    if only is not None:
        chosen = [section for section in sections if section.name.split("/")[0] == only]
        if not chosen:
            held = ", ".join(dict.fromkeys(section.name.split("/")[0] for section in sections)) or "nothing that fits"
            raise UsageError(f"--only {only}: the checkpoint at {state.path} has no {only!r}; it has: {held}")
        return chosen, left_out
    if flat and len(sections) != 1:
        held = ", ".join(section.name for section in sections) or "none"
        raise UsageError(f"safetensors holds one model, and {state.path} has: {held}. Choose with --only NAME.")
    return sections, left_out


def _is_model(section: Section) -> bool:
    """A flat dict of tensors: what a module is walked to."""
    tree = section.tree
    named = isinstance(tree, dict) and bool(tree) and "/" not in section.name
    return named and all(isinstance(ref, Ref) and section.leaves[ref.leaf].kind == "tensor" for ref in tree.values())


def _torch(state: State, sections: list[Section], staging: str, shard_bytes: int) -> tuple[str, ...]:
    """One file: {"model": state dict, "optimizer": {"state": by name, "param_groups": …}, …}."""
    del shard_bytes
    made: dict[str, Any] = {}
    known: dict[str, Tensor] = {}

    def tensor(leaf: Leaf) -> Any:
        key = leaf.alias_of or leaf.path
        if leaf.kind != "tensor":
            return value_of(Ref(0), (leaf,), state.bytes_of)
        if key not in known:
            known[key] = fresh(replace(leaf, stride=()), state.bytes_of, torch.device("cpu"))
        return known[key]  # so that what is tied is written once, and stays tied

    for section in sections:
        names = section.name.split("/")
        place = made
        for name in names[:-1]:
            place = place.setdefault(name, {})
        value = mapped(section.tree, partial(_leaf_of, section, tensor))
        if names[-1] == EXTRA:  # a model's state dict has it among its tensors
            place.update(value)
        else:
            place[names[-1]] = value
    with open(staging, "xb") as file:
        torch.save(made, file)
        file.flush()
        os.fsync(file.fileno())
    return ("",)


def _leaf_of(section: Section, tensor: Callable[[Leaf], Any], ref: Ref) -> Any:
    return tensor(section.leaves[ref.leaf])


def _safetensors(state: State, sections: list[Section], staging: str, shard_bytes: int) -> tuple[str, ...]:
    """A directory as transformers writes it: one file, or several and an index."""
    save = _saver()
    (section,) = sections
    leaves = {fqn: section.leaves[ref.leaf] for fqn, ref in section.tree.items()}
    groups = list(_groups(leaves, shard_bytes))
    os.mkdir(staging)
    files: list[str] = []
    for n, names in enumerate(groups, 1):
        one = len(groups) == 1
        files.append("model.safetensors" if one else f"model-{n:05d}-of-{len(groups):05d}.safetensors")
        cpu = torch.device("cpu")
        tensors = {fqn: fresh(replace(leaves[fqn], stride=()), state.bytes_of, cpu) for fqn in names}
        try:
            save(tensors, os.path.join(staging, files[-1]), metadata={"format": "pt"})
        except (KeyError, ValueError, TypeError) as error:
            told = f"{section.name} cannot be written as safetensors: {error}; use --to torch"
            raise CheckpointError(told) from error
    if len(groups) > 1:
        size = sum(leaf.nbytes for leaf in leaves.values())
        where = {fqn: name for name, names in zip(files, groups, strict=True) for fqn in names}
        with open(os.path.join(staging, "model.safetensors.index.json"), "x") as file:
            json.dump({"metadata": {"total_size": size}, "weight_map": where}, file, indent=2)
        files.append("model.safetensors.index.json")
    for name in files:
        _sync(os.path.join(staging, name))
    return tuple(files)


def _groups(leaves: Mapping[str, Leaf], shard_bytes: int) -> Iterator[list[str]]:
    """Names in order, as many to a file as fit; a larger tensor has one of its own."""
    group: list[str] = []
    size = 0
    for fqn, leaf in leaves.items():
        if group and size + leaf.nbytes > shard_bytes:
            yield group
            group, size = [], 0
        group.append(fqn)
        size += leaf.nbytes
    yield group


def _saver() -> Callable[..., None]:
    try:
        from safetensors.torch import save_file  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigurationError(
            "safetensors is not installed, which --to safetensors writes with: pip install 'everstep[safetensors]'"
        ) from error
    return save_file


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _take_name(staging: str, out: str) -> None:
    """Atomic, and never over something: a file by a second name, a directory by a rename, which a full one refuses."""
    try:
        if os.path.isdir(staging):
            _sync(staging)
            os.rename(staging, out)
        else:
            os.link(staging, out)
        _sync(os.path.dirname(os.path.abspath(out)))
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise UsageError(f"{out} exists by now; nothing is overwritten. Give another name.") from error
        raise CheckpointError(f"{out} cannot be written: {error.strerror}") from error


def _remove(staging: str) -> None:
    if os.path.isdir(staging):
        shutil.rmtree(staging, ignore_errors=True)
    elif os.path.lexists(staging):
        os.unlink(staging)
