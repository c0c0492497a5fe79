"""Whatever a training script does to its state between two snapshots, the next one holds the state as it is then.

A walk keeps what it found and looks whether it still holds. Here everything is changed that a script can reach, at
random and one after another, on one walk that lives through all of it; each snapshot is held against the walk of a
newcomer, which keeps nothing, and against the objects' own state dicts after a restore.
"""

import collections
import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from everstep.checkpoint.core.segment import Header


class Box:
    """A loader, say, that hands out its own insides."""

    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


class Counting(nn.Linear):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = nn.Sequential(Counting(3, 3), nn.BatchNorm1d(3))
        self.last = nn.Linear(3, 3, bias=False)
        self.register_buffer("table", torch.arange(6.0).view(2, 3))
        self.register_buffer("waves", torch.tensor([[1 + 2j, 3 - 4j], [0j, -1j]]))
        self.part_of = torch.tensor([1 + 2j, 3 - 4j])
        self.register_buffer("part", self.part_of.imag)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def build() -> dict:
    model = Net()
    optimizer = torch.optim.AdamW(
        [{"params": [*model.first.parameters()]}, {"params": [*model.inner.parameters()], "lr": 0.5}]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    box = Box({"at": 0, "deep": [{"seen": [1, 2]}], "flag": False, "tail": collections.deque([1], 3)})
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "box": box}


# What a script can do. Each takes the state and a source of choices.


def step(s, rng):
    for parameter in s["model"].parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.is_floating_point() else None
    try:
        s["optimizer"].step()
    except RuntimeError:  # what was done before has left a parameter with another's moments: torch's own refusal
        s["optimizer"].state.clear()


def write_in_place(s, rng):
    with torch.no_grad():
        rng.choice([*s["model"].parameters(), *s["model"].buffers()]).add_(1)


def new_data(s, rng):
    parameter = rng.choice([*s["model"].parameters()])
    parameter.data = parameter.data.clone() + 1


def same_memory_transposed(s, rng):
    weight = s["model"].first.weight
    weight.data = weight.data.t()


def same_memory_transposed_in_place(s, rng):
    s["model"].table.t_()


def same_memory_shorter(s, rng):
    s["model"].table.resize_(1, 3) if rng.random() < 0.5 else s["model"].table.resize_(2, 3).zero_()


def same_memory_another_dtype(s, rng):
    table = s["model"].table
    table.data = table.data.contiguous().view(torch.int32 if table.dtype == torch.float32 else torch.float32)


def same_memory_conjugate(s, rng):
    s["model"].waves.data = s["model"].waves.data.conj()


def same_memory_negative(s, rng):
    model = s["model"]
    model.part.data = (model.part_of if model.part.is_neg() else model.part_of.conj()).imag


def new_memory_in_the_storage(s, rng):
    with torch.no_grad():
        s["model"].last.weight.set_(torch.randn(4, 3)[1:])


def swap_two_tensors(s, rng):
    a, b = nn.Parameter(torch.randn(3, 3)), s["model"].last.weight
    torch.utils.swap_tensors(a, b)


def new_parameter(s, rng):
    s["model"].last.weight = nn.Parameter(torch.randn(3, 3))


def new_submodule(s, rng):
    s["model"].last = nn.Linear(3, 3, bias=rng.random() < 0.5)


def new_submodule_inside(s, rng):
    s["model"].inner[1] = nn.BatchNorm1d(3)


def counted(s, rng):
    s["model"].inner[0].seen += 1


def more_parameters(s, rng):
    s["model"].register_parameter(f"more{rng.randrange(3)}", nn.Parameter(torch.randn(2)))


def fewer_parameters(s, rng):
    for n in range(3):
        s["model"]._parameters.pop(f"more{n}", None)


def absent_or_there(s, rng):
    s["model"].absent = torch.ones(1) if s["model"].absent is None else None


def persistent_or_not(s, rng):
    model = s["model"]
    was = "scratch" in model._non_persistent_buffers_set
    model.register_buffer("scratch", model._buffers.pop("scratch"), persistent=was)


def tie_or_untie(s, rng):
    model = s["model"]
    model.last.weight = (
        model.first.weight if model.last.weight is not model.first.weight else nn.Parameter(torch.ones(3, 3))
    )


def rename(s, rng):
    held = s["model"].first._buffers
    if "a" in held:
        held["b"] = held.pop("a")
    else:
        held.pop("b", None)
        s["model"].first.register_buffer("a", torch.ones(2))


def new_dict_of_parameters(s, rng):
    module = s["model"].first
    module.__dict__["_parameters"] = {name: nn.Parameter(p.detach() + 1) for name, p in module._parameters.items()}


def learning_rate(s, rng):
    rng.choice(s["optimizer"].param_groups)["lr"] = rng.choice(
        [0.0, -0.0, 0, False, 1, True, 1.0, 0.1, math.nan, 2**70]
    )


def other_betas(s, rng):
    group = rng.choice(s["optimizer"].param_groups)
    group["betas"] = rng.choice([(0.9, 0.99), [0.9, 0.99], (0.9, 0), (0.9, 0.0), (0.9, False), (np.float64(0.9), 0.99)])


def tensor_rate(s, rng):
    group = s["optimizer"].param_groups[0]
    if isinstance(group.get("rate"), torch.Tensor) and rng.random() < 0.7:
        group["rate"].add_(1)
    else:
        group["rate"] = torch.tensor(0.5)


def no_tensor_rate(s, rng):
    s["optimizer"].param_groups[0].pop("rate", None)


def list_in_group(s, rng):
    s["optimizer"].param_groups[1].setdefault("notes", []).append(rng.random())


def tuple_with_a_list(s, rng):
    s["optimizer"].param_groups[1].setdefault("pair", (1, [2]))[1].append(3)


def group_key_goes_and_another_comes(s, rng):
    group = s["optimizer"].param_groups[1]
    group["new" if group.pop("old", None) else "old"] = 1
    if "old" in group:
        group.pop("new", None)


def group_keys_reordered(s, rng):
    group = s["optimizer"].param_groups[0]
    group["lr"] = group.pop("lr")


def another_group(s, rng):
    known = {id(p) for g in s["optimizer"].param_groups for p in g["params"]}
    fresh = [p for p in s["model"].parameters() if id(p) not in known and p.is_floating_point()]
    if fresh and len(s["optimizer"].param_groups) < 5:
        s["optimizer"].add_param_group({"params": fresh[:1]})


def parameters_swapped_in_group(s, rng):
    s["optimizer"].param_groups[0]["params"].reverse()


def groups_swapped(s, rng):
    s["optimizer"].param_groups.reverse()


def new_list_of_groups(s, rng):
    optimizer = s["optimizer"]
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


def optimizer_state_loaded(s, rng):
    own = copy.deepcopy(s["optimizer"].state_dict())
    for entry in own["state"].values():
        for value in entry.values():
            if isinstance(value, torch.Tensor):
                value.add_(1)
    s["optimizer"].load_state_dict(own)


def optimizer_state_reset(s, rng):
    s["optimizer"].state = collections.defaultdict(dict)


def optimizer_state_cleared(s, rng):
    s["optimizer"].state.clear()


def new_entry(s, rng):
    state = s["optimizer"].state
    for parameter in list(state)[:1]:
        state[parameter] = {k: v.clone() + 1 if isinstance(v, torch.Tensor) else v for k, v in state[parameter].items()}


def moments_given_to_other_parameters(s, rng):
    state = s["optimizer"].state
    parameters, entries = list(state), list(state.values())
    state.clear()
    state.update(zip(parameters[::-1], entries, strict=True))


def other_list_of_parameters(s, rng):
    group = s["optimizer"].param_groups[0]
    group["params"] = group["params"][::-1]


def new_moment(s, rng):
    for entry in list(s["optimizer"].state.values())[-1:]:
        entry["exp_avg"] = torch.randn_like(entry["exp_avg"]) if "exp_avg" in entry else torch.randn(2)


def plain_value_in_state(s, rng):
    for entry in list(s["optimizer"].state.values())[:1]:
        if rng.random() < 0.5:
            entry["count"] = entry.get("count", 0) + 1
        else:
            entry.pop("count", None)


def moments_swapped(s, rng):
    for entry in list(s["optimizer"].state.values())[:1]:
        if "exp_avg" in entry and "exp_avg_sq" in entry:
            entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"]


def scheduler_steps(s, rng):
    s["scheduler"].last_epoch += 1
    s["scheduler"]._last_lr = [rng.random()]


def scheduler_changes(s, rng):
    s["scheduler"].gamma = rng.choice([1, 1.0, True, 0.5, (1,), [1], "1", None, math.inf, b"1"])


LOOKALIKES = [
    0, 0.0, -0.0, False, None, "", b"", [], (), {}, set(), 1, 1.0, True, "1", b"1", 1 + 0j, bytearray(b"1"), 2**2000,
    np.float64(1.0), np.int64(1), np.array(1.0), np.ones(1), torch.ones(1), {1: 2}, {"1": 2}, {"!": 2}, {True: 2},
    {1.0: 2}, collections.OrderedDict(a=1), {"a": 1}, collections.Counter("a"), [1, (2,)], [1, [2]], math.nan,
    -math.nan,
]  # fmt: skip


def box_value(s, rng):
    s["box"].value["at"] = copy.deepcopy(rng.choice(LOOKALIKES))


def box_inside(s, rng):
    s["box"].value["deep"][0]["seen"].append(copy.deepcopy(rng.choice(LOOKALIKES)))
    del s["box"].value["deep"][0]["seen"][:-3]


def box_reordered(s, rng):
    s["box"].value["flag"] = s["box"].value.pop("flag")


def box_without_the_deque(s, rng):
    if s["box"].value.pop("tail", None) is None:
        s["box"].value["tail"] = collections.deque([1, rng.random()], 3)


def box_tensor_written(s, rng):
    held = s["box"].value.setdefault("held", torch.zeros(2))
    held.add_(1)


def box_tensor_gone(s, rng):
    s["box"].value.pop("held", None)


def box_grows(s, rng):
    s["box"].value["long"] = list(range(rng.randrange(2000)))


DRAWS = [
    random.random, lambda: random.gauss(0, 1), np.random.random, np.random.standard_normal, lambda: torch.rand(1),
    lambda: random.seed(1), lambda: np.random.seed(1), lambda: torch.manual_seed(1),
]  # fmt: skip


def draws(s, rng):
    rng.choice(DRAWS)()


def nothing(s, rng):
    pass


CHANGES = [value for value in list(globals().values())
           if getattr(value, "__code__", None) and value.__code__.co_varnames[:2] == ("s", "rng")]  # fmt: skip


def told(value) -> object:
    """What a value is, to the bit, told without any code of ours."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return "tensor", str(value.dtype), tuple(value.shape), plain.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value).__name__, [(told(k), told(v)) for k, v in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value).__name__, [told(v) for v in value], getattr(value, "maxlen", None)
    if isinstance(value, float):
        return "float", np.float64(value).tobytes()
    return type(value).__name__, repr(value)


def whole(s) -> dict:
    """The state by the objects' own word; an optimizer's by parameter, without the numbers that it gives them."""
    optimizer = s["optimizer"]
    groups = [{k: v for k, v in sorted(g.items()) if k != "params"} for g in optimizer.param_groups]
    return {
        "model": told(dict(s["model"].state_dict())),
        "moments": [told(optimizer.state.get(p)) for g in optimizer.param_groups for p in g["params"]],
        "groups": told(groups),
        "scheduler": told(s["scheduler"].state_dict()),
        "box": told(s["box"].value),
        "python": random.getstate(),
        "numpy": told(list(np.random.get_state())),
        "torch": told(torch.get_rng_state()),
    }


def spoil(s) -> None:
    """Write over everything that a restore is to bring back."""
    with torch.no_grad():
        for tensor in [*s["model"].parameters(), *s["model"].buffers()]:
            tensor.zero_()
        for entry in s["optimizer"].state.values():
            for value in entry.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(7)
    for group in s["optimizer"].param_groups:
        group["lr"] = 77.0
    s["model"].inner[0].seen = -1
    s["box"].value = {}
    s["scheduler"].last_epoch = 99
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)


def held(worker, taken):
    """What lies in the buffer: the description, and each leaf's bytes."""
    (buffer,) = [b.buffers[taken.buffer] for b in worker._sets.values() if taken.buffer in b.buffers]
    header = buffer.header()
    assert isinstance(header, Header)
    assert header.step == taken.step
    text = bytes(buffer.bytes[header.meta_offset : header.meta_offset + header.meta_bytes])
    return text, [bytes(buffer.payload(header, leaf)) for leaf in buffer.layout(header).leaves()]


def live_through(bench, keep, seed: int, changes: int) -> None:
    rng = random.Random(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    b = bench()
    (worker,) = b.enter()
    s = build()
    worker.bind(s)
    history = []
    for n in range(changes):
        for _ in range(rng.choice([1, 1, 1, 3])):
            change = rng.choice(CHANGES)
            history.append(change.__name__)
            change(s, rng)
        taken = worker.take(n)
        text, leaves = held(worker, taken)
        fresh = keep(s)
        assert text == fresh.text, history
        assert leaves == [bytes(fresh.payload(leaf)) for leaf in fresh.layout.leaves()], history
        if rng.random() < 0.2:
            expected = whole(s)
            spoil(s)
            b.enter()
            worker.bind(s)
            assert worker.restore().step == n
            worker.restore_generators()
            assert whole(s) == expected, history
            history.append("| restored |")


@pytest.mark.sample(14)
@pytest.mark.parametrize("seed", range(40))
def test_the_next_snapshot_holds_the_state_as_it_is(bench, keep, seed):
    live_through(bench, keep, seed, 25)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_the_next_snapshot_holds_the_state_as_it_is_at_length(bench, keep, seed):
    live_through(bench, keep, seed, 60)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_single_change_goes_unseen(bench, keep, change):
    """Each by itself after a quiet step, when all that is kept is in use; and again."""
    rng = random.Random(3)
    b = bench()
    (worker,) = b.enter()
    s = build()
    worker.bind(s)
    step(s, rng)
    for n in range(1, 9):
        if n % 2 == 0:
            change(s, rng)
        text, leaves = held(worker, worker.take(n))
        fresh = keep(s)
        assert text == fresh.text
        assert leaves == [bytes(fresh.payload(leaf)) for leaf in fresh.layout.leaves()]
