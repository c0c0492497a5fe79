"""The surface of NVRx's in-process restart, held to a table that was made from NVRx, never from our code.

`nvrx/surface.json`: NVRx 0.4.1 by introspection (`make peers-surface`); `nvrx/head.json`: what HEAD has beyond it,
typed from the notes. Every deliberate difference stands here by name, and in docs/compat-nvrx.md.
"""

import importlib
import importlib.util
import json
import pickle
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed here")
TABLES = Path(__file__).parent / "nvrx"
SURFACE = json.loads((TABLES / "surface.json").read_text())["modules"]
HEAD = json.loads((TABLES / "head.json").read_text())

MISSING = {  # names of NVRx that are not here, each with the reason
    "inprocess.param_utils": "private helper",
    "inprocess.utils": "private helper",
    "inprocess.sibling_monitor": "private: siblings are watched by everstep.launcher.peers",
    "inprocess.monitor_process": "private: an agent, or a watcher without torch, stands in its place",
    "inprocess.compose.T": "a type variable",
    "inprocess.rank_assignment.Node": "private: rank_assignment.topology",
    "inprocess.rank_assignment.bounded_activate": "private: rank_assignment.topology",
    "inprocess.rank_assignment.propagate_terminations": "private: rank_assignment.topology",
    "inprocess.rank_assignment.Tree.build_tree": "private: rank_assignment.topology",
    "inprocess.rank_assignment.Tree.filter_active_world_size": "private: rank_assignment.topology",
    "inprocess.rank_assignment.Tree.get_state_from_tree": "private: rank_assignment.topology",
    "inprocess.rank_assignment.Tree.recompute_rank": "private: rank_assignment.topology",
    "inprocess.rank_assignment.Tree.replace_with_backfill": "private: rank_assignment.topology",
    "inprocess.rank_assignment.Tree.replace_with_inactive": "private: rank_assignment.topology",
    "inprocess.rank_assignment.Tree.shift_ranks": "private: rank_assignment.topology",
    "inprocess.rank_assignment.Tree.update_tree": "private: rank_assignment.topology",
    "inprocess.rank_assignment.FilterCountGroupedByKey.instance_count": "private: exchanges are numbered by the store",
    "inprocess.progress_watchdog.ProgressWatchdog.get_automatic_timestamp": "private: a C callback; see pulse.py",
    "inprocess.state.freeze_dataclass": "private: FrozenState is written out",
    "inprocess.wrap.HealthCheckPassed": "private",
    "inprocess.wrap.reserve_fn": "private: reserve ranks need no loop, the agent calls them back",
}
BASES = {"pybind11_object", "RankMonitorLogger", "Filterer", "ABC", "Generic"}
"""Bases that come of how NVRx is built."""


@pytest.fixture(scope="module")
def reader(request):
    spec = importlib.util.spec_from_file_location("peers_surface", request.config.rootpath / "scripts/peers_surface.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(module, *names):
    found = importlib.import_module(f"everstep.{module}")
    for name in names:
        found = getattr(found, name)
    return found


def has(module, *names):
    try:
        ours(module, *names)
    except (AttributeError, ModuleNotFoundError):
        return False
    return True


def parameters_differ(theirs, found):
    """Say how our parameters differ; we may have more, after theirs or keyword-only."""
    if theirs is None:
        return []
    told = {name: (kind, default) for name, kind, default in found or []}
    wrong = [f"{name} {told.get(name)} != {(kind, default)}" for name, kind, default in theirs
             if told.get(name) != (kind, default)]  # fmt: skip
    positional = [name for name, kind, _ in theirs if kind.startswith("POSITIONAL")]
    in_our_order = [name for name, kind, _ in found or [] if kind.startswith("POSITIONAL")][: len(positional)]
    return wrong + ([f"order {in_our_order} != {positional}"] if in_our_order != positional else [])


@pytest.mark.parametrize("module", SURFACE)
def test_every_name_of_nvrx_is_here_with_its_parameters_and_defaults(reader, module):
    differences = [text for name, entry in SURFACE[module].items() for text in compare(reader, module, name, entry)]
    assert differences == []


def compare(reader, module, name, entry):
    """Say, for one name, what differs from the table without being on the list of differences."""
    full = f"{module}.{name}"
    if full in MISSING or not has(module, name):
        if full in MISSING and has(module, name):
            return [f"{full} is here now: take it off the list of differences"]
        return [] if full in MISSING else [f"{full} is missing"]
    thing = ours(module, name)
    if entry["kind"] == "function":
        return [f"{full}: {text}" for text in parameters_differ(entry["parameters"], reader.parameters(thing))]
    return of_class(reader, full, thing, entry) if entry["kind"] == "class" else []


def of_class(reader, full, thing, entry):
    mine = reader.of_class(thing)
    wrong = [f"{full}: base {base}" for base in entry["bases"] if base not in BASES and base not in mine["bases"]]
    wrong += [f"{full}: {text}" for text in parameters_differ(entry["parameters"], mine["parameters"])]
    wrong += [f"{full}: field {field}" for field in entry["fields"] or () if field not in (mine["fields"] or ())]
    for member, told in entry["members"].items():
        there = hasattr(thing, member)
        if there == (f"{full}.{member}" in MISSING):
            wrong.append(f"{full}.{member} is {'here now' if there else 'missing'}")
        elif there and told["kind"] in ("method", "staticmethod", "classmethod"):
            found = reader.parameters(getattr(thing, member))
            wrong += [f"{full}.{member}: {text}" for text in parameters_differ(told["parameters"], found)]
    return wrong


@pytest.mark.parametrize("module", [m for m in HEAD if m != "origin"])
def test_what_head_has_beyond_it_is_here_too(reader, module):
    for name, entry in HEAD[module].items():
        mine = reader.of_class(ours(module, name))
        found = {p[0]: p for p in mine["parameters"]}
        assert [found.get(p[0]) for p in entry.get("parameters", [])] == entry.get("parameters", [])
        assert set(entry.get("bases", ())) <= set(mine["bases"])
        for member, told in entry.get("members", {}).items():
            assert [p[0] for p in reader.parameters(getattr(ours(module, name), member))] == told


def test_the_page_names_every_difference(root):
    page = (root / "docs/compat-nvrx.md").read_text()
    assert [full for full in MISSING if f"`{full.removeprefix('inprocess.')}`" not in page] == []


def test_the_table_was_made_from_the_version_that_pip_installs():
    assert json.loads((TABLES / "surface.json").read_text())["version"] == "0.4.1"
    assert sum(map(len, SURFACE.values())) > 100


def test_importing_the_package_imports_no_torch(root):
    """`everstep.inprocess` is light; its names are found all the same, and listed."""
    import subprocess
    import sys

    code = "import sys, everstep.inprocess as i; assert 'torch' not in sys.modules; print(len(dir(i)), i.Mode.ACTIVE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Mode.ACTIVE" in done.stdout
    with pytest.raises(AttributeError, match="it offers"):
        ours("inprocess", "Wraper")


def test_a_default_is_told_from_the_same_value_written_out():
    """W1's mend: what is left out is learned, what is written is meant. The objects differ, the values do not."""
    from everstep.inprocess import Wrapper

    assert Wrapper().times.soft_s is None
    assert Wrapper().times.soft_timeout == timedelta(seconds=60)
    assert Wrapper(soft_timeout=timedelta(seconds=60)).times.soft_s == 60
    assert Wrapper(hard_timeout=timedelta(seconds=90)).times.hard_s == 90
    assert "soft_s" not in Wrapper().wishes()


def test_a_rank_may_take_to_leave_what_its_callbacks_may_take():
    from everstep.inprocess import Compose, Wrapper
    from everstep.inprocess.finalize import Finalize, ThreadedFinalize
    from everstep.inprocess.health_check import CudaHealthCheck, FaultCounter

    class Own(Finalize):
        def __call__(self, state):
            return state

    second = timedelta(seconds=1)
    listed = {"finalize": ThreadedFinalize(30 * second, print), "health_check": FaultCounter(3)}
    assert Wrapper().wishes()["stop_s"] == 10
    assert Wrapper(**listed).wishes()["stop_s"] == 40
    assert Wrapper(**listed, barrier_timeout=91 * second).wishes()["stop_s"] == 40
    assert Wrapper(finalize=Compose(ThreadedFinalize(300 * second, print))).wishes()["stop_s"] == 120
    assert Wrapper(finalize=Own(), health_check=CudaHealthCheck()).wishes()["stop_s"] == 120


def test_the_users_own_budget_comes_before_ours(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    from everstep.inprocess import Compose, Wrapper
    from everstep.inprocess.initialize import RetryController

    assert (Wrapper().wishes()["alike"], Wrapper().peer_settings()["min_world_size"]) == (10, 1)
    both = Wrapper(initialize=Compose(RetryController(20, min_world_size=2), RetryController(30)))
    assert (both.wishes()["alike"], both.wishes()["patience"]) == (21, 21)
    assert both.peer_settings()["min_world_size"] == 2
    assert Wrapper(initialize=RetryController(min_world_size=3)).peer_settings()["min_world_size"] == 2


def test_an_agent_goes_no_lower_than_a_retry_controller_would():
    from everstep.inprocess import Compose, Wrapper
    from everstep.inprocess.initialize import RetryController

    assert Wrapper().wishes()["least"] == 1
    assert Wrapper(initialize=RetryController(min_active_world_size=3)).wishes()["least"] == 3
    both = Compose(RetryController(min_world_size=2), RetryController(min_world_size=4, min_active_world_size=3))
    assert Wrapper(initialize=both).wishes()["least"] == 4


def test_what_contradicts_itself_is_refused_with_both_numbers():
    from everstep.inprocess import Wrapper
    from everstep.inprocess.settings import _ORDER

    good = vars_of(Wrapper().times)
    for less, more in _ORDER:
        with pytest.raises(ValueError, match=rf"{less}=.*must be less than"):
            Wrapper(**{less: good[more]})
    with pytest.raises(TypeError, match="timedelta is expected"):
        Wrapper(soft_timeout=60)
    with pytest.raises(TypeError, match="a Finalize or None is expected"):
        Wrapper(finalize=lambda state: state)
    with pytest.raises(TypeError, match="RankAssignment is expected"):
        Wrapper(rank_assignment=None)
    with pytest.raises(TypeError, match="derived from StoreMixin"):
        Wrapper(store_factory=dict)
    with pytest.raises(ValueError, match="absolute"):
        Wrapper(monitor_process_logfile="log_{rank}.txt")


def vars_of(times):
    return {name: getattr(times, name) for name in times.__dataclass_fields__}


def test_a_wrapper_that_is_not_enabled_hands_the_function_back():
    from everstep.inprocess import Wrapper

    def train():
        return 1

    assert Wrapper(enabled=False)(train) is train
    assert Wrapper()(train).__name__ == "train"


def test_a_compose_passes_wherever_its_members_do_and_pickles():
    from everstep.inprocess import Compose, Wrapper, abort, initialize

    both = Compose(abort.AbortTransformerEngine(), abort.AbortTorchDistributed())
    assert isinstance(both, abort.Abort)
    again = pickle.loads(pickle.dumps(both))
    assert isinstance(again, abort.Abort)
    assert [type(one) for one in again.instances] == [type(one) for one in both.instances]
    Wrapper(abort=both, initialize=Compose(initialize.RetryController(3), initialize.RetryController()))
    with pytest.raises(TypeError, match="a Abort or None"):
        Wrapper(abort=Compose(abort.AbortTransformerEngine(), initialize.RetryController()))
