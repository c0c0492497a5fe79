"""What a script imports at its top level: the zygote imports it once, beforehand, for every worker and spare."""

import ast
import sys
from pathlib import Path

from everstep.launcher.config import LaunchConfig

_OURS = frozenset({"everstep", "torch", "numpy", "__future__"})


def top_level_imports(config: LaunchConfig) -> list[str]:
    """Return `module` and `module:name` entries of the script's own top level, installed packages only.

    Modules from beside the script are left out: they are the user's code, may look at RANK, and change. What cannot be
    read is left out too; a preload is only ever a head start.
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
    if top in sys.stdlib_module_names or top in _OURS:
        return False
    return not (beside / f"{top}.py").exists() and not (beside / top).is_dir()
