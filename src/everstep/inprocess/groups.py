"""What torch.distributed keeps for the whole process, and how a process is made to look as if it had made no group yet.

`destroy_process_group` does most of it, but is not reached where no group came to be: after a fault inside
`init_process_group` the counter stands at 1, the next default group is called "1", a fresh spare's is "0", and they
never meet (EXPERIMENTS P9, E10, E11). DTensor's random tracker broadcasts at its first use only, so that a spare
broadcasts and survivors do not (B2).
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from everstep.inprocess.items import Absent, Item, find, loaded

_MAPS = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
    "comms",
)
_SYMMETRIC = ("_group_name_to_store", "_group_name_to_workspace_tensor")
_MEMORY = "torch.distributed._symmetric_memory"
_MESH = "torch.distributed.device_mesh"
_DTENSOR = "torch.distributed.tensor"


def items() -> Iterator[Item]:
    """Return what must have its fresh value, whatever it was at the first entry."""
    yield _clean("default group", _has_default, False, _drop_default)
    for name in _MAPS:
        yield _clean(f"c10d {name}", partial(_size, c10d, f"_world.{name}"), 0, partial(_clear, c10d, f"_world.{name}"))
    yield _clean("c10d group count", lambda: _world("group_count"), 0, _restart_count)
    yield _clean("c10d init method", lambda: find(c10d, "_default_pg_init_method"), None, _forget_method)
    yield _clean("mesh stack", lambda: _held(_mesh()), 0, lambda: _empty(_mesh()))
    yield _clean("DTensor random tracker", _tracker, False, _drop_tracker)
    for name in _SYMMETRIC:
        yield _clean(f"symmetric memory {name}", partial(_size, _MEMORY, name), 0, partial(_clear, _MEMORY, name))


def caches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Return what is emptied without being looked at: registries in C++, caches keyed by meshes of dead groups."""
    yield "group registry in C++", lambda: find(torch, "_C._distributed_c10d._unregister_all_process_groups")()
    yield "DTensor cache in C++", lambda: find(torch, "_C._clear_DTensor_sharding_propagator_cache")()
    yield "DTensor propagation cache", _clear_propagation
    yield "DTensor function caches", _clear_function_caches


def forget() -> None:
    """Take all groups out of torch's books without ending them: somebody else does that, and holds them until then."""
    for item in items():
        with contextlib.suppress(Absent):
            item.write(None)
    for _, empty in caches():
        with contextlib.suppress(Exception):  # a registry that this torch has not got
            empty()


def _clean(name: str, read: Callable[[], Any], clean: Any, reset: Callable[[], object]) -> Item:
    return Item(name, read, lambda _: reset(), clean, always=True)


def _world(name: str) -> Any:
    return find(c10d, f"_world.{name}")


def _collection(owner: Any, path: str) -> Any:
    """A collection of an object, or of a module that is named and may not be imported."""
    return find(loaded(owner) if isinstance(owner, str) else owner, path)


def _size(owner: Any, path: str) -> int:
    return len(_collection(owner, path))


def _clear(owner: Any, path: str) -> None:
    _collection(owner, path).clear()


def _has_default() -> bool:
    return _world("default_pg") is not None


def _drop_default() -> None:
    try:
        find(c10d, "_update_default_pg")(None)
    except Absent:
        find(c10d, "_world").default_pg = None


def _restart_count() -> None:
    find(c10d, "_world").group_count = 0


def _forget_method() -> None:
    setattr(c10d, "_default_pg_init_method", None)  # noqa: B010 - a private name, looked for by `find` before


def _mesh() -> Any:
    return find(loaded(_MESH), "_mesh_resources")


def _held(environment: Any) -> int:
    """Count what the mesh environment holds; which collections it has differs from version to version."""
    return sum(len(value) for value in vars(environment).values() if isinstance(value, (dict, list, set)))


def _empty(environment: Any) -> None:
    for value in vars(environment).values():
        if isinstance(value, (dict, list, set)):
            value.clear()


def _tracker() -> bool:
    return find(loaded(f"{_DTENSOR}._random"), "_rng_tracker") is not None


def _drop_tracker() -> None:
    setattr(loaded(f"{_DTENSOR}._random"), "_rng_tracker", None)  # noqa: B010


def _clear_propagation() -> None:
    find(loaded(f"{_DTENSOR}._api"), "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear")()


_function_caches: dict[str, tuple[Any, ...]] = {}
"""The caches that each module of DTensor was found to have; looking through all of them takes some milliseconds."""


def _clear_function_caches() -> None:
    """Empty each `lru_cache` of DTensor's modules and of the classes in them."""
    for name in [n for n in sys.modules if n == _DTENSOR or n.startswith(f"{_DTENSOR}.")]:
        if name not in _function_caches:
            _function_caches[name] = tuple(_caches_in(sys.modules[name]))
        for cache in _function_caches[name]:
            cache.cache_clear()


def _caches_in(module: Any) -> Iterator[Any]:
    for value in list(vars(module).values()):
        owned = [value, *vars(value).values()] if isinstance(value, type) else [value]
        for each in owned:
            inner = each.__func__ if isinstance(each, (staticmethod, classmethod)) else each
            if isinstance(inner, functools._lru_cache_wrapper):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
                yield inner
