"""The surface of NVRx's `fault_tolerance`, held to a table that was made from NVRx 0.4.1, never from our code.

Every deliberate difference stands here by name, and in docs/compat-nvrx.md or docs/rank-monitors.md.
"""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

SURFACE = json.loads((Path(__file__).parent / "nvrx/surface.json").read_text())
HOW = "how NVRx is built: a process a rank, and pickle over a socket between the two"
MISSING = {
    "data.AuthkeyMsg": HOW, "data.ErrorMsg": HOW, "data.HeartbeatMsg": HOW, "data.InitMsg": HOW, "data.OkMsg": HOW,
    "data.SectionMsg": HOW, "data.UpdateConfigMsg": HOW, "rank_monitor_server.RankMonitorLogger": HOW,
    "rank_monitor_server.RankMonitorServer": "the agent judges all ranks of its node",
    "rank_monitor_state_machine.InvalidStateTransitionException": HOW,
    "rank_monitor_state_machine.RankMonitorState": HOW,
    "rank_monitor_state_machine.RankMonitorStateMachine": HOW,
}  # fmt: skip


@pytest.fixture(scope="module")
def reader(request):
    spec = importlib.util.spec_from_file_location("peers_surface", request.config.rootpath / "scripts/peers_surface.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(module, name):
    try:
        return getattr(importlib.import_module(f"everstep.{module}"), name, None)
    except ModuleNotFoundError:
        return None


def differences(full, theirs, mine):
    """Say which of their parameters are not ours, in their order; the names and which have a default count."""
    known = {name: default is not None for name, _, default in mine or []}
    wanted = [(name, default is not None) for name, kind, default in theirs or [] if not kind.startswith("VAR_")]
    return [f"{full}({name})" for name, has_default in wanted if known.get(name) != has_default]


@pytest.mark.parametrize("module", SURFACE["modules"])
def test_every_name_is_here_or_missing_on_purpose(reader, module):
    wrong = []
    for name, entry in SURFACE["modules"][module].items():
        full, thing = f"{module.removeprefix('fault_tolerance.')}.{name}", found(module, name)
        if (thing is None) != (full in MISSING):
            wrong.append(full)
        elif thing is not None:
            mine = reader.of_class(thing)
            wrong += differences(full, entry["parameters"], mine["parameters"])
            for member, told in entry["members"].items():
                if not hasattr(thing, member):
                    wrong.append(f"{full}.{member}")
                elif "parameters" in told:
                    wrong += differences(
                        f"{full}.{member}", told["parameters"], reader.parameters(getattr(thing, member))
                    )
    assert wrong == []


def test_the_pages_name_what_is_not_here(root):
    pages = (root / "docs/compat-nvrx.md").read_text() + (root / "docs/rank-monitors.md").read_text()
    assert [name for name in MISSING if f"`{name.rpartition('.')[2]}`" not in pages] == []
