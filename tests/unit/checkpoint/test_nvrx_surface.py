"""The surface of NVRx's checkpointing, held to a table that was made from NVRx, never from our code.

`nvrx/surface.json`: NVRx 0.4.1 by introspection (`make peers-surface`); `nvrx/head.json`: what HEAD has beyond it,
typed from the notes. Every deliberate difference stands here by name, and in docs/compat-nvrx.md.
"""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed here")
TABLES = Path(__file__).parent / "nvrx"
SURFACE = json.loads((TABLES / "surface.json").read_text())
HEAD = json.loads((TABLES / "head.json").read_text())
MISSING = {  # names of NVRx that are not here, each with the reason
    "async_ckpt.core.PersistentAsyncCaller.async_loop": "private: async_ckpt/worker.py is the worker's process",
}
OTHER = {  # parameters that differ, each with the reason
    ("async_ckpt.core.AsyncRequest", "async_fn_kwargs"): "HEAD's None: 0.4.1's {} is one dict that all requests share",
    ("local.replication.strategies.CliqueReplicationStrategy.from_replication_params", "replication_jump"):
        "None, the ranks of a node, looked up when it is called: 0.4.1 counts devices at import, and 0 fails",
    ("local.replication.strategies.LazyCliqueReplicationStrategy", "replication_jump"): "the same",
}  # fmt: skip
BASES = {"object"}


@pytest.fixture(scope="module")
def reader(request):
    spec = importlib.util.spec_from_file_location("peers_surface", request.config.rootpath / "scripts/peers_surface.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(module, *names):
    found = importlib.import_module("everstep." + module.replace("checkpointing", "checkpoint"))
    for name in names:
        found = getattr(found, name)
    return found


def differences(full, theirs, mine):
    """Say how our parameters differ; we may have more, after theirs or keyword-only."""
    told = {name: (kind, default) for name, kind, default in mine or []}
    theirs = [p for p in theirs or [] if p[1] not in ("VAR_POSITIONAL", "VAR_KEYWORD")]
    wrong = [f"{full}({name}): {told.get(name)} != {(kind, default)}" for name, kind, default in theirs
             if told.get(name) != (kind, default) and not ((full, name) in OTHER and name in told)]  # fmt: skip
    order = [name for name, kind, _ in theirs if kind.startswith("POSITIONAL")]
    mine_order = [name for name, kind, _ in mine or [] if kind.startswith("POSITIONAL")][: len(order)]
    return wrong + ([f"{full}: order {mine_order} != {order}"] if order != mine_order else [])


@pytest.mark.parametrize("module", SURFACE["modules"])
def test_every_name_of_nvrx_is_here_with_its_parameters_and_defaults(reader, module):
    found = []
    for name, entry in SURFACE["modules"][module].items():
        full = f"{module.removeprefix('checkpointing.')}.{name}"
        thing = getattr(ours(module), name, None)
        if thing is None:
            found.append(f"{full} is missing")
        elif entry["kind"] == "function":
            found += differences(full, entry["parameters"], reader.parameters(thing))
        else:
            found += of_class(reader, full, thing, entry)
    assert found == []


def of_class(reader, full, thing, entry):
    mine = reader.of_class(thing)
    wrong = [f"{full}: base {base}" for base in entry["bases"] if base not in BASES and base not in mine["bases"]]
    wrong += differences(full, entry["parameters"], mine["parameters"])
    wrong += [f"{full}: field {field}" for field in entry["fields"] or () if field not in (mine["fields"] or ())]
    for member, told in entry["members"].items():
        there = hasattr(thing, member)
        if there == (f"{full}.{member}" in MISSING):
            wrong.append(f"{full}.{member} is {'here now' if there else 'missing'}")
        elif there and told["kind"] in ("method", "staticmethod", "classmethod"):
            wrong += differences(f"{full}.{member}", told["parameters"], reader.parameters(getattr(thing, member)))
    return wrong


@pytest.mark.parametrize("module", [m for m in HEAD if m != "origin"])
def test_what_head_has_beyond_it_is_here_too(reader, module):
    for name, entry in HEAD[module].items():
        thing = ours(module, name)
        if "function" in entry:
            assert [p[0] for p in reader.parameters(thing)] == entry["function"]
            continue
        found = {p[0]: p for p in reader.parameters(thing)}
        assert [found.get(p[0]) for p in entry.get("parameters", [])] == entry.get("parameters", [])
        for member, told in entry.get("members", {}).items():
            assert [p[0] for p in reader.parameters(getattr(thing, member))] == told


def test_a_users_own_manager_finds_what_it_overrides():
    base = ours("checkpointing.local.ckpt_managers.base_manager", "BaseCheckpointManager")
    assert base.__abstractmethods__ == {"_my_ckpt_ids", "_load", "_save", "_cleanup", "_cleanup_failed_save"}


def test_the_page_names_every_difference(root):
    page = (root / "docs/compat-nvrx.md").read_text()
    named = [*MISSING, *(name for name, _ in OTHER)]
    assert [full for full in named if f"`{full.rpartition('.')[2]}" not in page] == []


def test_the_table_was_made_from_the_version_that_pip_installs():
    assert SURFACE["version"] == "0.4.1"
    assert sum(map(len, SURFACE["modules"].values())) > 35


def test_the_package_hands_on_its_names_and_comes_without_torch():
    """`import everstep; everstep.checkpoint.TorchAsyncCheckpoint`: by DESIGN's names, and nothing before it is used."""
    code = (
        "import sys, everstep; package = everstep.checkpoint; package.Keep(2); package.Local('/x', 1)\n"
        "assert {'TorchAsyncCheckpoint', 'AsyncCallsQueue', 'Checkpointer'} <= set(dir(package))\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    package = importlib.import_module("everstep.checkpoint")
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    assert package.TorchAsyncCheckpoint is ours("checkpointing.async_ckpt.torch_ckpt", "TorchAsyncCheckpoint")
    with pytest.raises(AttributeError, match="it offers AsyncCallsQueue"):
        package.TorchCheckpoint  # noqa: B018 - the access is what is tried


def test_importing_the_worker_imports_no_torch():
    """What writes in the background is a small process: torch comes with the first call that needs it (W53)."""
    code = "import sys, everstep.checkpoint.async_ckpt.worker; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)
