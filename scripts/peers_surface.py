"""Read the surface of NVRx 0.4.1 by introspection, and write it down as tables that our tests are held to.

    make peers-surface        rewrites tests/unit/inprocess/nvrx/{surface,assignments}.json
                              and tests/unit/{checkpoint,fault_tolerance}/nvrx/surface.json

Runs in the peers' environment, where Everstep's own modules are never imported: the table must not be made from our
code. `surface.json` holds names, kinds, bases, parameters and defaults; `assignments.json` holds what its rank
assignments answer to seeded random worlds, as input and output.
"""

import dataclasses
import datetime
import enum
import functools
import importlib
import importlib.metadata
import inspect
import json
import random
import sys
import threading
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
PEER = "nvidia_resiliency_ext"
TABLES = Path(__file__).resolve().parent.parent / "tests/unit/inprocess/nvrx"
MODULES = (
    "inprocess", "inprocess.abort", "inprocess.attribution", "inprocess.completion", "inprocess.compose",
    "inprocess.exception", "inprocess.finalize", "inprocess.health_check", "inprocess.initialize",
    "inprocess.monitor_thread", "inprocess.nested_restarter", "inprocess.progress_watchdog",
    "inprocess.rank_assignment", "inprocess.rank_filter", "inprocess.state", "inprocess.store", "inprocess.terminate",
    "inprocess.tools.inject_fault", "inprocess.wrap",
)  # fmt: skip
"""What stands in the reference of its public interface. Its private helpers (monitor_process, sibling_monitor,
param_utils, utils) are left out."""
CHECKPOINT_TABLE = TABLES.parent.parent / "checkpoint/nvrx/surface.json"
CHECKPOINT_MODULES = (
    "checkpointing.async_ckpt.cached_metadata_filesystem_reader", "checkpointing.async_ckpt.core",
    "checkpointing.async_ckpt.filesystem_async", "checkpointing.async_ckpt.state_dict_saver",
    "checkpointing.async_ckpt.torch_ckpt", "checkpointing.local.base_state_dict",
    "checkpointing.local.basic_state_dict", "checkpointing.local.ckpt_managers.base_manager",
    "checkpointing.local.ckpt_managers.local_manager", "checkpointing.local.replication.group_utils",
    "checkpointing.local.replication.strategies", "checkpointing.local.replication.torch_device_utils",
    "checkpointing.local.replication.utils", "checkpointing.utils",
)  # fmt: skip
"""All of its checkpointing but `_torch_future`, a copy of torch's own functions for older versions of it."""
LAUNCHER_TABLE = TABLES.parent.parent / "fault_tolerance/nvrx/surface.json"
LAUNCHER_MODULES = (
    "fault_tolerance.config", "fault_tolerance.data", "fault_tolerance.rank_monitor_client",
    "fault_tolerance.rank_monitor_server", "fault_tolerance.rank_monitor_state_machine",
)  # fmt: skip
"""What its `fault_tolerance` hands on. Beside them the flags of its launcher, as its parser has them."""


def launcher_flags():
    """Return [[destination, spellings, default]] of its launcher's parser."""
    parser = importlib.import_module(f"{PEER}.fault_tolerance.launcher").get_args_parser()
    return [
        [action.dest, action.option_strings, default_text(action.default)]
        for action in parser._actions
        if action.dest != "help"
    ]


def default_text(value):
    """Write a default down so that the same value made elsewhere reads the same."""
    if isinstance(value, datetime.timedelta):
        return f"timedelta {value.total_seconds():g}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isclass(value):
        return f"class {value.__name__}"
    if callable(value) and hasattr(value, "instances"):
        return "Compose " + " ".join(type(one).__name__ for one in value.instances)
    if type(value).__module__.startswith((PEER, "everstep")):
        return f"a {type(value).__name__}"
    return repr(value)


def parameters(thing):
    """Return [[name, kind, default or null]], or null where nothing can be told."""
    try:
        found = inspect.signature(thing).parameters.values()
    except (ValueError, TypeError):
        return None
    return [
        [p.name, p.kind.name, None if p.default is inspect.Parameter.empty else default_text(p.default)] for p in found
    ]


def of_class(kind):
    """Describe a class: bases by name, constructor, members."""
    members = {}
    for name, value in sorted(vars(kind).items()):
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(value, property):
            members[name] = {"kind": "property"}
        elif isinstance(value, functools.partialmethod) or inspect.isfunction(value):
            members[name] = {"kind": "method", "parameters": parameters(getattr(kind, name))}
        elif isinstance(value, staticmethod | classmethod):
            members[name] = {"kind": type(value).__name__, "parameters": parameters(getattr(kind, name))}
        elif issubclass(kind, enum.Enum) and isinstance(getattr(kind, name), kind):
            members[name] = {"kind": "member"}
        else:
            members[name] = {"kind": "value", "value": default_text(value)}
    bases = [b.__name__ for b in kind.__mro__[1:] if b.__module__ != "pybind11_builtins" and b is not object]
    constructor = None if issubclass(kind, enum.Enum | BaseException) else parameters(kind)
    fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None
    return {"kind": "class", "bases": bases, "parameters": constructor, "fields": fields, "members": members}


def of_module(name, package):
    """Describe what a module itself defines; of the package itself, what it hands on."""
    module = importlib.import_module(f"{package}.{name}")
    found = {}
    for key, value in sorted(vars(module).items()):
        if key.startswith("_"):
            continue
        if name == "inprocess":
            if inspect.ismodule(value) or getattr(value, "__module__", "").startswith(package):
                found[key] = {"kind": "module" if inspect.ismodule(value) else "handed on"}
        elif getattr(value, "__module__", None) == module.__name__:
            if inspect.isclass(value):
                found[key] = of_class(value)
            elif inspect.isfunction(value):
                found[key] = {"kind": "function", "parameters": parameters(value)}
    return found


# What its rank assignments answer


def states_of(world, classes):
    """Return each rank's state at the start."""
    return {r: classes.State(r, world, initial_rank=r, initial_world_size=world) for r in range(world)}


def together(functions):
    """Run one function a rank at the same time, as ranks do; return what each returned or raised."""
    answers = {}

    def one(rank, function):
        try:
            answers[rank] = function()
        except Exception as error:
            answers[rank] = error

    threads = [threading.Thread(target=one, args=item, daemon=True) for item in functions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    return answers


def plan(rng):
    """Draw one scenario: a world, a pipeline, and who is lost in each of some iterations (by first rank)."""
    world = rng.randint(1, 12)
    kind = rng.choice(["shift", "gaps", "max", "divisible", "both", "tree", "tree", "tree", "tree"])
    scenario = {"world": world, "kind": kind, "cap": rng.randint(1, 12), "divisor": rng.randint(1, 4)}
    if kind == "tree":
        layers, size = [], world
        for depth in range(rng.randint(1, 3)):
            size = world if depth == 0 else max(1, size // rng.randint(1, 4))
            least = rng.choice([1, 1, 1, min(2, size), size])
            most = rng.choice([None, None, rng.randint(least, max(least, size))])
            flag = rng.choice([None, "RESERVE", "BACKFILL", "RESERVE|BACKFILL"])
            layers.append({"size": size, "min": least, "max": most, "flag": flag})
        scenario["layers"], scenario["filter"] = layers, rng.choice([0, 0, 0, 2])
    alive, lost = list(range(world)), []
    for _ in range(rng.randint(1, 4)):
        gone = sorted(rng.sample(alive, min(len(alive) - 1, rng.choice([0, 1, 1, 2, 3]))))
        alive = [r for r in alive if r not in gone]
        lost.append(gone)
    return scenario | {"lost": lost}


def pipeline(scenario, classes):
    """Build the assignment that a scenario names."""
    ra, compose = classes.ra, classes.Compose
    kind = scenario["kind"]
    if kind == "tree":
        flags = {"RESERVE": ra.LayerFlag.RESERVE, "BACKFILL": ra.LayerFlag.BACKFILL}
        layers = [
            ra.Layer(
                layer["min"],
                layer["max"],
                "root" if n == 0 else functools.partial(lambda size, state: f"g{state.rank // size}", layer["size"]),
                functools.reduce(lambda a, b: a | b, (flags[f] for f in layer["flag"].split("|")))
                if layer["flag"]
                else None,
            )
            for n, layer in enumerate(scenario["layers"])
        ]
        layers[0].key_or_fn = lambda state: "root"
        filtered = (lambda n: n // scenario["filter"] * scenario["filter"]) if scenario["filter"] else None
        return ra.Tree(layers, filtered)
    activate = {
        "max": lambda: [ra.MaxActiveWorldSize(scenario["cap"])],
        "divisible": lambda: [ra.ActiveWorldSizeDivisibleBy(scenario["divisor"])],
        "both": lambda: [ra.ActiveWorldSizeDivisibleBy(scenario["divisor"]), ra.MaxActiveWorldSize(scenario["cap"])],
    }.get(kind, lambda: [ra.ActivateAllRanks()])()
    moved = [ra.FillGaps() if kind == "gaps" else ra.ShiftRanks()]
    return compose(*activate, *moved)


def play(scenario, classes):
    """Return, for the start and each iteration, what every first rank has become."""
    world = scenario["world"]
    states, pipelines = states_of(world, classes), {r: pipeline(scenario, classes) for r in range(world)}
    answers = []
    for iteration, lost in enumerate([[], *scenario["lost"]]):
        store = classes.store(iteration)
        named = {states[r].rank for r in lost if r in states}
        acting = [r for r in states if r not in lost]
        done = together(
            {
                r: functools.partial(
                    pipelines[r], classes.ra.RankAssignmentCtx(classes.copy(states[r]), store, set(named))
                )
                for r in acting
            }
        )
        answer = {}
        for r in acting:
            found = done.get(r)
            if isinstance(found, classes.ra.RankDiscarded):
                answer[r] = "discarded"
            elif isinstance(found, Exception) or found is None:
                answer[r] = f"error {type(found).__name__}"
            else:
                s = found.state
                answer[r] = [s.rank, s.world_size, s.active_rank, s.active_world_size, s.mode.name]
        states = {r: done[r].state for r in acting if isinstance(answer[r], list)}
        for state in states.values():
            state.advance()
        answers.append(answer)
        if not states:
            break
    return answers


def copied(state):
    """A state of its own."""
    return dataclasses.replace(state)


def peer_classes():
    """Gather what `play` needs of the peer; its store gets its own barrier back, which torch 2.13's shadows."""
    import torch.distributed as dist

    ra = importlib.import_module(f"{PEER}.inprocess.rank_assignment")
    store = importlib.import_module(f"{PEER}.inprocess.store")
    state = importlib.import_module(f"{PEER}.inprocess.state")
    compose = importlib.import_module(f"{PEER}.inprocess.compose")

    class Memory(store.StoreMixin, dist.HashStore):
        def __init__(self):
            super().__init__()
            self.set_timeout(datetime.timedelta(seconds=2))

    class Classes:
        pass

    found = Classes()
    found.ra, found.State, found.Compose, found.copy = ra, state.State, compose.Compose, copied
    found.store = lambda iteration: Memory()
    return found


def scenarios(count, seed=7):
    rng = random.Random(seed)
    return [plan(rng) for _ in range(count)]


def main() -> int:
    version = importlib.metadata.version("nvidia-resiliency-ext")
    surface = {"version": version, "modules": {name: of_module(name, PEER) for name in MODULES}}
    classes = peer_classes()
    plays = [{"scenario": scenario, "answers": play(scenario, classes)} for scenario in scenarios(600)]
    TABLES.mkdir(parents=True, exist_ok=True)
    (TABLES / "surface.json").write_text(json.dumps(surface, indent=1, sort_keys=True) + "\n")
    lines = ",\n".join(json.dumps(p, sort_keys=True, separators=(",", ":")) for p in plays)
    (TABLES / "assignments.json").write_text("[\n" + lines + "\n]\n")
    names = sum(len(found) for found in surface["modules"].values())
    print(f"NVRx {version}: {names} names of {len(MODULES)} modules, {len(plays)} scenarios of rank assignment")
    checkpoint = {"version": version, "modules": {name: of_module(name, PEER) for name in CHECKPOINT_MODULES}}
    CHECKPOINT_TABLE.parent.mkdir(parents=True, exist_ok=True)
    CHECKPOINT_TABLE.write_text(json.dumps(checkpoint, indent=1, sort_keys=True) + "\n")
    names = sum(len(found) for found in checkpoint["modules"].values())
    print(f"NVRx {version}: {names} names of {len(CHECKPOINT_MODULES)} modules of checkpointing")
    launcher = {"version": version, "modules": {name: of_module(name, PEER) for name in LAUNCHER_MODULES}}
    launcher["flags"] = launcher_flags()
    LAUNCHER_TABLE.parent.mkdir(parents=True, exist_ok=True)
    LAUNCHER_TABLE.write_text(json.dumps(launcher, indent=1, sort_keys=True) + "\n")
    names = sum(len(found) for found in launcher["modules"].values())
    print(f"NVRx {version}: {names} names and {len(launcher['flags'])} flags of its launcher")
    return 0


if __name__ == "__main__":
    sys.exit(main())
