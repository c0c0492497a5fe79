"""What a run has imported, kept in its folder for the next one: what the zygote can load beforehand without being told.

Rule 1: installed packages only: what lies beside the script is the user's, may look at RANK, and changes.
Rule 2: a preload is only ever a head start: what cannot be read or written is left out, without a word.
Rule 3: another script's imports are nobody's; of an edited script those of the last run are a first guess.

Written by the worker that is rank 0, when its script has ended; read by the agent. No torch here.
"""

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = "imports.json"
MOST = 4_000
_MOST_FOLDERS = 32
_OURS = ("everstep", "torch.testing")


def of_last_run(run_dir: Path, script: str) -> list[str]:
    """Return what the last run of `script` imported: of this folder's own job, else of its newest neighbour's."""
    for folder in (run_dir, *_neighbours(run_dir)):
        known = _read(folder)
        if known.get("script") == script:
            return [str(name) for name in known.get("modules", ())][:MOST]
    return []


def _neighbours(run_dir: Path) -> Iterable[Path]:
    try:
        found = [(path.stat().st_mtime, path.parent) for path in run_dir.parent.glob(f"*/{FILE}")]
    except OSError:
        return []
    return [folder for _, folder in sorted(found, reverse=True)[:_MOST_FOLDERS]]


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        known = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) and isinstance(known.get("modules", []), list) else {}


def installed(modules: Mapping[str, ModuleType], before: Iterable[str], roots: Sequence[str] = ()) -> list[str]:
    """Return which of the loaded modules are installed packages' and were not there `before`, in their order."""
    known = set(before)
    tops = tuple(root + os.sep for root in roots or site_packages())
    found: list[str] = []
    for name, module in list(modules.items()):
        if name in known or name.startswith(_OURS):
            continue
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if getattr(spec, "name", None) == name and isinstance(origin, str) and origin.startswith(tops):
            found.append(name)
    return found


def site_packages() -> list[str]:
    """Return where packages are installed, with and without links in the paths."""
    paths = sysconfig.get_paths()
    named = [paths["purelib"], paths["platlib"]]
    return list(dict.fromkeys([*named, *map(os.path.realpath, named)]))


def keep(run_dir: Path, script: str, own: Iterable[str], preloaded: Iterable[str]) -> None:
    """Write what this process has loaded beyond our `own`.

    Of an edited script only what was not `preloaded` counts: what it does not import any more is found out so.
    """
    try:
        digest = hashlib.sha256(Path(script).read_bytes()).hexdigest()
    except OSError:  # a module, by its name
        digest = ""
    same = _read(run_dir).get("text", digest) == digest
    modules = installed(sys.modules, {*own} if same else {*own, *preloaded})[:MOST]
    part = run_dir / f"{FILE}.part"
    with contextlib.suppress(OSError):
        part.write_text(json.dumps({"script": script, "text": digest, "modules": modules}))
        part.replace(run_dir / FILE)
