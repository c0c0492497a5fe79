"""What a script imports at its top level: the zygote imports it once, beforehand, for every worker and spare.

A script that sets variables itself may do so for what it imports next (Z6): its text is looked at, nothing is run.
"""

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.launcher import imports
from everstep.launcher.config import LaunchConfig

_OURS = frozenset({"everstep", "torch", "numpy", "__future__"})


def top_level_imports(config: LaunchConfig) -> list[str]:
    """Return `module` and `module:name` entries of the script's own top level, installed packages only.

    Modules from beside the script, from PYTHONPATH and of an editable installation are left out: they are the user's
    code, may look at RANK, and change. What cannot be read is left out too; a preload is only ever a head start.
    """
    if config.no_python or config.module:
        return []
    try:
        tree = ast.parse(Path(config.script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}:{alias.name}" for alias in node.names if alias.name != "*"]
    beside = Path(config.script).parent
    return [name for name in dict.fromkeys(found) if _installed(name.partition(":")[0].partition(".")[0], beside)]


def _installed(top: str, beside: Path) -> bool:
    if top in sys.stdlib_module_names or top in _OURS or (beside / f"{top}.py").exists() or (beside / top).is_dir():
        return False
    try:
        spec = importlib.util.find_spec(top)  # of a top level's name: nothing is run
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else spec.submodule_search_locations or []
    roots = tuple(root + os.sep for root in imports.site_packages())
    return bool(places) and all(place.startswith(roots) for place in places)


# -- variables that a script sets itself -------------------------------------------------------------------------------

_LOADED_WITH_TORCH = (
    "OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOTO_", "LD_", "MALLOC_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "PYTORCH_", "TRITON_", "NPY_",
)  # fmt: skip
"""Read when libraries are loaded that every zygote has loaded: set later they would change nothing."""
_READ_LATER = (
    "TORCH_NCCL_", "TORCH_GLOO_", "NCCL_", "GLOO_", "UCX_", "CUDA_", "CUBLAS_", "MASTER_", "EVERSTEP_", "TORCHELASTIC_",
    "WANDB_", "PYTHON",
)  # fmt: skip
"""Read when a group, a context, a run is made, or by interpreters that are started."""
_READ_LATER_TOO = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TOKENIZERS_PARALLELISM"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Variables that a script sets, by what that means for a worker that has done imports before."""

    cold: tuple[str, ...] = ()  # torch's libraries read them when they are loaded
    alone: tuple[str, ...] = ()  # another package may: the script is to import it itself


def settings(config: LaunchConfig, environment: Mapping[str, str]) -> Settings:
    """Return the variables that the script sets to something else than `environment` of the zygote has."""
    if config.no_python or config.module:
        return Settings()
    try:
        tree = ast.parse(Path(config.script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return Settings()
    cold: dict[str, None] = {}
    alone: dict[str, None] = {}
    for name, value, only_unset in _assignments(tree):
        if name.startswith(_READ_LATER) or name in _READ_LATER_TOO:
            continue
        if environment.get(name) == value is not None or (only_unset and name in environment):
            continue
        (cold if name.startswith(_LOADED_WITH_TORCH) else alone)[name] = None
    return Settings(tuple(cold), tuple(alone))


def _assignments(tree: ast.AST) -> Iterator[tuple[str, str | None, bool]]:
    """Yield name, constant value, and whether only an unset one is set; names that are computed are "…"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield _constant(target.slice) or "…", _constant(node.value), False
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _call(node, node.func)


def _call(node: ast.Call, function: ast.Attribute) -> Iterator[tuple[str, str | None, bool]]:
    words = [_constant(word) for word in node.args[:2]]
    if function.attr == "putenv" and words:
        yield words[0] or "…", words[-1], False
    elif _is_environ(function.value) and function.attr == "setdefault" and words:
        yield words[0] or "…", words[-1], True
    elif _is_environ(function.value) and function.attr == "update":
        yield from _updates(node)


def _updates(node: ast.Call) -> Iterator[tuple[str, str | None, bool]]:
    for word in node.keywords:
        yield word.arg or "…", _constant(word.value), False
    for given in node.args:
        keys = given.keys if isinstance(given, ast.Dict) else [None]
        values = given.values if isinstance(given, ast.Dict) else [None]
        for key, value in zip(keys, values, strict=True):
            yield _constant(key) or "…", _constant(value), False


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _constant(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
