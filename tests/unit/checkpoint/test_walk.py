"""What the walk reads it gives back to the bit, in place; what it cannot keep it refuses by name."""

import copy
import math
import random
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from everstep.checkpoint.core.layout import Layout
from everstep.checkpoint.walk import StateWalk
from everstep.errors import StateMismatch


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        return self.head(nn.functional.dropout(self.norm(self.emb(x)), 0.1))


class Box:
    """Anything with a state dict."""

    def __init__(self, value=None) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def train(model, optimizer, steps: int, scheduler=None) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 7, (6,))

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))
        if scheduler is not None:
            scheduler.step()
    return losses


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        alike = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        return alike and a.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).equal(
            b.contiguous().view(-1).view(torch.uint8)
        )  # fmt: skip
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and (a == b or (a != a and b != b))


NAN = torch.tensor([0x7FC0BEEF, -1], dtype=torch.int32).view(torch.float32)
TENSORS = {
    "0-dim int64": torch.tensor(2**62 + 1),
    "0-dim float32": torch.tensor(0.1),
    "0-dim bool": torch.tensor(True),
    "empty": torch.empty(0),
    "empty rows": torch.empty(3, 0, dtype=torch.float64),
    "bf16": torch.tensor([1.5, -0.0, math.inf], dtype=torch.bfloat16),
    "fp16": torch.tensor([1.5, math.nan], dtype=torch.float16),
    "float8 e4m3": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "float8 e5m2": torch.tensor([1.0, 2.0]).to(torch.float8_e5m2),
    "complex64": torch.tensor([1 + 2j, complex(-0.0, math.nan)]),
    "complex128": torch.tensor([1 + 2j], dtype=torch.complex128),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "nan payload": NAN,
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.arange(16.0).view(1, 4, 2, 2).to(memory_format=torch.channels_last),
    "parameter": nn.Parameter(torch.ones(2)),
    "inference": torch.inference_mode()(lambda: torch.ones(2))(),
    "array": np.arange(6, dtype=">i2").reshape(2, 3),
    "array 0-dim": np.array(1.5),
    "array empty": np.zeros((0, 2)),
    "array of dates": np.array(["2026-11-29"], "datetime64[D]"),
    "numpy scalar": np.float64(0.1),
    "numpy bool": np.bool_(True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_comes_back(name, keep):
    """CS-20."""
    value = TENSORS[name]
    box = Box([{"t": value}])
    kept = keep({"box": box})
    box.value = None
    kept.restore(StateWalk({"box": box}))
    back = box.value[0]["t"]
    assert same(value.detach() if isinstance(value, torch.Tensor) else value, back)
    assert keep({"box": box}) == kept


def test_conjugate_negative_and_strided_views_come_back_resolved(keep):
    base = torch.tensor([1 + 2j, 3 - 4j])
    box = Box({"conj": base.conj(), "neg": base.conj().imag, "every other": torch.arange(6.0)[::2]})
    kept = keep({"box": box})
    loaded = Box()
    kept.restore(StateWalk({"box": loaded}))
    assert loaded.value["conj"].equal(base.conj().resolve_conj())
    assert loaded.value["neg"].equal(torch.tensor([-2.0, 4.0]))
    assert loaded.value["every other"].equal(torch.tensor([0.0, 2.0, 4.0]))


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.ones(2).as_subclass(Wrapped), "a subclass of Tensor"),
        (np.array([object()]), "objects or records"),
        (np.zeros(1, [("a", int)]), "objects or records"),
        (Box(), "which a snapshot cannot hold exactly"),
        (lambda: 0, "state_dict"),
    ],
    ids=["sparse", "meta", "subclass", "objects", "records", "object", "function"],
)
def test_what_cannot_be_kept_is_refused_by_its_key(value, told, keep):
    with pytest.raises(TypeError, match="^box/value/deep/0 is a.*" + told):
        keep({"box": Box({"deep": [value]})})


def test_keys_that_print_alike_stay_apart(keep):
    box = Box(OrderedDict([(1, torch.ones(1)), ("1", torch.zeros(1)), (("a",), None), ("a/b", 1), ("..", 2)]))
    kept = keep({"box": box})
    loaded = Box()
    kept.restore(StateWalk({"box": loaded}))
    assert list(loaded.value) == [1, "1", ("a",), "a/b", ".."]
    assert (float(loaded.value[1]), float(loaded.value["1"])) == (1.0, 0.0)


def test_a_tie_is_stored_once_and_stays_a_tie(keep):
    """CS-18."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    kept = keep({"model": model, "optimizer": optimizer})
    head, emb = kept.leaf("model/head.weight"), kept.leaf("model/emb.weight")
    assert head.alias_of == "model/emb.weight"
    assert head.offset == emb.offset
    assert "head.weight" not in kept.layout.section("optimizer/state").tree
    other = Tied()
    stepped = torch.optim.AdamW(other.parameters())
    kept.restore(StateWalk({"model": other, "optimizer": stepped}))
    assert other.head.weight is other.emb.weight
    train(other, stepped, 1)
    assert other.head.weight.equal(other.emb.weight)


def test_non_persistent_and_absent_buffers_are_left_out_as_state_dict_does(keep):
    model = Tied()
    assert set(keep({"model": model}).layout.section("model").tree) == set(model.state_dict())


def test_extra_state_of_modules_comes_back(keep):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = nn.Sequential(Counting(2, 2))
    model[0].seen = 5
    kept = keep({"model": model})
    fresh = nn.Sequential(Counting(2, 2))
    kept.restore(StateWalk({"model": fresh}))
    assert fresh[0].seen == 5


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, history_size=3, max_iter=4),
}
SCHEDULERS = {
    "none": lambda o: None,
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CosineAnnealing": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


def build(optimizer: str, scheduler: str = "none") -> dict:
    torch.manual_seed(3)
    model = Tied()
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    state = {"model": model, "optimizer": made, "scheduler": SCHEDULERS[scheduler](made)}
    return {name: thing for name, thing in state.items() if thing is not None}


def run(state: dict, steps: int) -> list[float]:
    return train(state["model"], state["optimizer"], steps, state.get("scheduler"))


@pytest.mark.parametrize("stepped", [0, 2], ids=["into fresh", "into stepped"])
@pytest.mark.parametrize("saved_at", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_saved_at_any_step_goes_on_exactly(optimizer, saved_at, stepped, keep):
    """CL-09."""
    twin = build(optimizer)
    run(twin, saved_at)
    kept = keep(twin)
    expected = run(twin, 3)
    resumed = build(optimizer)
    run(resumed, stepped)
    kept.restore(StateWalk(resumed))
    assert keep(resumed) == kept
    assert run(resumed, 3) == expected
    assert keep(resumed) == keep(twin)


@pytest.mark.parametrize("scheduler", [s for s in SCHEDULERS if s != "none"])
def test_any_scheduler_goes_on_exactly(scheduler, keep):
    twin = build("SGD momentum", scheduler)
    run(twin, 3)
    kept = keep(twin)
    expected = run(twin, 3)
    resumed = build("SGD momentum", scheduler)
    kept.restore(StateWalk(resumed))
    assert run(resumed, 3) == expected
    assert keep(resumed) == keep(twin)


def test_a_scaler_goes_on_exactly(keep):
    def scaled(scaler: torch.amp.GradScaler, steps: int) -> float:
        for n in range(steps):
            parameter = nn.Parameter(torch.ones(1))
            optimizer = torch.optim.SGD([parameter], 0.1)
            scaler.scale((parameter * (math.inf if n == 1 else 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    twin = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    scaled(twin, 3)
    kept = keep({"scaler": twin})
    resumed = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    kept.restore(StateWalk({"scaler": resumed}))
    assert resumed.get_scale() == 2.0
    assert scaled(resumed, 5) == scaled(twin, 5)
    assert keep({"scaler": resumed}) == keep({"scaler": twin})


def test_an_empty_optimizer_state_really_empties_a_stepped_one(keep):
    fresh = build("AdamW amsgrad")
    kept = keep(fresh)
    stepped = build("AdamW amsgrad")
    run(stepped, 1)
    kept.restore(StateWalk(stepped))
    assert len(stepped["optimizer"].state) == 0


def test_reading_steps_nothing_and_writes_nothing(keep):
    """E23: a fresh optimizer stays fresh; no hook of a state dict runs."""
    state = build("AdamW amsgrad")
    state["optimizer"].register_state_dict_pre_hook(lambda *_: pytest.fail("state_dict was called"))
    state["model"].register_state_dict_pre_hook(lambda *_: pytest.fail("state_dict was called"))
    before = copy.deepcopy(dict(state["model"].named_parameters()))
    versions = [p._version for p in state["model"].parameters()]
    torch_state = torch.get_rng_state()
    keep(state)
    assert len(state["optimizer"].state) == 0
    assert versions == [p._version for p in state["model"].parameters()]
    assert all(same(v.detach(), before[k].detach()) for k, v in state["model"].named_parameters())
    assert torch.get_rng_state().equal(torch_state)


def test_live_tensors_are_written_where_they_are(keep):
    state = build("Adam")
    run(state, 2)
    kept = keep(state)
    pointers = [p.data_ptr() for p in state["model"].parameters()]
    moments = [s["exp_avg"] for s in state["optimizer"].state.values()]
    run(state, 1)
    kept.restore(StateWalk(state))
    assert pointers == [p.data_ptr() for p in state["model"].parameters()]
    assert all(a is b["exp_avg"] for a, b in zip(moments, state["optimizer"].state.values(), strict=True))


def test_all_generators_come_back(keep):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    random.gauss(0, 1)
    np.random.standard_normal()
    own = torch.Generator().manual_seed(4)

    def draw():
        return [
            random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal(),
            float(torch.rand(())), float(torch.rand((), generator=own)),
        ]  # fmt: skip

    kept = keep({"own": own})
    expected = draw()
    draw()
    kept.restore(StateWalk({"own": own}))
    assert draw() == expected


def test_parts_are_kept_until_something_moves():
    state = build("Adam")
    run(state, 1)
    walk = StateWalk(state)
    first = walk.collect()[1]
    run(state, 1)
    second = walk.collect()[1]
    assert walk.stable == 3  # the third: generators, read anew into memory that stays
    assert [a is b for a, b in zip(first, second, strict=True)][:2] == [True, True]
    model, optimizer = state["model"], state["optimizer"]
    for change in (
        lambda: setattr(model.norm.weight, "data", model.norm.weight.data.clone()),
        lambda: model.norm.register_buffer("more", torch.ones(1)),
        lambda: setattr(model, "added", nn.Linear(1, 1)),
        lambda: setattr(model.norm, "bias", nn.Parameter(torch.zeros(4))),
    ):
        before = walk.collect()[1][0]
        change()
        assert walk.collect()[1][0] is not before
    before = walk.collect()[1][1]
    optimizer.state[model.emb.weight]["exp_avg"] = torch.zeros(7, 4)
    assert walk.collect()[1][1] is not before


def test_wrappers_are_no_part_of_a_name(keep):
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    assert set(keep({"model": compiled}).layout.section("model").tree) == {"0.weight", "0.bias"}


def test_what_does_not_fit_is_named_before_anything_is_written(keep):
    kept = keep({"model": nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.Linear(3, 3))), "box": Box(1)})
    other = nn.Sequential(OrderedDict(a=nn.Linear(2, 4), c=nn.Linear(3, 3)))
    before = other.a.bias.detach().clone()
    with pytest.raises(StateMismatch) as error:
        kept.restore(StateWalk({"model": other, "more": Box()}, rank=0))
    text = str(error.value)
    assert "more is not in the saved state" in text
    assert "box was saved, but run.steps was not given it" in text
    assert "model/c.weight is missing in the saved state" in text
    assert "model/b.bias was saved and is not in the model" in text
    assert "model/a.weight was saved as float32[3, 2] and is float32[4, 2]" in text
    assert "built the same way" in text
    assert other.a.bias.equal(before)


def test_an_optimizer_over_other_parameters_is_named(keep):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = keep({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    for parameters, told in [
        (model[0].parameters(), "1.weight was saved and is not here"),
        ([{"params": model[0].parameters()}, {"params": model[1].parameters()}], "saved with 1 groups, here are 2"),
        (reversed(list(model.parameters())), "in another order"),
    ]:
        with pytest.raises(StateMismatch, match=told):
            kept.restore(StateWalk({"model": model, "optimizer": torch.optim.SGD(parameters, 0.1)}))


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam, torch.optim.RMSprop])
@pytest.mark.parametrize("stepped", [0, 2])
def test_an_optimizer_of_another_class_is_named_and_nothing_of_it_is_taken(keep, other, stepped):
    model, drawn = Tied(), Tied()
    saved = torch.optim.Adam(model.parameters(), 0.1)
    train(model, saved, stepped)
    kept = keep({"model": model, "optimizer": saved})
    live = other(drawn.parameters(), 0.5)
    weight, groups = drawn.emb.weight.detach().clone(), dict(live.param_groups[0])
    with pytest.raises(StateMismatch, match=f"saved by an object of the class Adam, and this one is {other.__name__}"):
        kept.restore(StateWalk({"model": drawn, "optimizer": live}))
    assert drawn.emb.weight.equal(weight)
    partial = StateWalk({"model": drawn, "optimizer": live}).restore_what_fits(kept.layout, kept.payload)
    assert partial.differing == (
        f"optimizer/state was saved by an object of the class Adam, and this one is {other.__name__}",
    )
    assert drawn.emb.weight.equal(model.emb.weight)
    assert live.param_groups[0] == groups
    assert not live.state


def test_a_scheduler_of_another_class_is_named_and_nothing_of_it_is_taken(keep):
    def build(make):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0)
        return {"optimizer": optimizer, "scheduler": make(optimizer)}

    kept = keep(build(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)))
    live = build(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    told = "scheduler was saved by an object of the class StepLR, and this one is ExponentialLR"
    with pytest.raises(StateMismatch, match=told):
        kept.restore(StateWalk(live))
    assert told in StateWalk(live).restore_what_fits(kept.layout, kept.payload).differing
    assert live["scheduler"].gamma == 0.5


def test_an_optimizer_whose_class_was_not_written_down_is_taken_as_it_always_was(keep):
    model = Tied()
    kept = keep({"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.1)})
    unsaid = Layout(0, 1, tuple(replace(section, kind="") for section in kept.layout.sections))
    assert b'"kind":"Adam"' in kept.layout.to_json()
    assert Layout.from_json(kept.layout.to_json()) == kept.layout
    assert b'"kind":"Adam"' not in unsaid.to_json()
    StateWalk({"model": model, "optimizer": torch.optim.Adam(model.parameters())}).restore(unsaid, kept.payload)


def test_an_object_that_refuses_its_own_state_is_named(keep):
    class Picky(Box):
        def load_state_dict(self, state):
            raise ValueError("not this one")

    kept = keep({"picky": Picky(1)})
    with pytest.raises(StateMismatch, match=r"picky: .*Picky\.load_state_dict refused.*not this one"):
        kept.restore(StateWalk({"picky": Picky()}))


@pytest.mark.parametrize("thing", [object(), 3, torch.utils.data.DataLoader([1])], ids=["object", "int", "DataLoader"])
def test_an_object_without_a_state_dict_is_refused(thing):
    with pytest.raises(TypeError, match=r"run.steps.thing=…. was given a .*has no state_dict"):
        StateWalk({"thing": thing})


@pytest.mark.parametrize("name", ["rng", "a/b", ""])
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(TypeError, match="choose another keyword"):
        StateWalk({name: Box()})


def test_state_beside_the_parameters_is_refused():
    state = build("SGD")
    state["optimizer"].state["shared"] = {"n": 1}
    with pytest.raises(TypeError, match="entry for 'shared', which is none of its parameters"):
        StateWalk(state).collect()


def test_two_models_share_an_optimizer_without_a_clash(keep):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*one.parameters(), *two.parameters()])
    (one(torch.ones(2)) + two(torch.ones(2))).sum().backward()
    optimizer.step()
    state = {"one": one, "two": two, "optimizer": optimizer}
    kept = keep(state)
    assert set(kept.layout.section("optimizer/state").tree) == {"one.weight", "one.bias", "two.weight", "two.bias"}
    kept.restore(StateWalk(state))
    assert keep(state) == kept


def test_plain_tensors_of_a_larger_world_belong_to_their_rank(keep):
    state = build("Adam")
    run(state, 1)
    for world in (1, 2):
        kept = keep(state, rank=0, world_size=world)
        facts = {(leaf.replicated, leaf.per_rank) for leaf in kept.layout.leaves() if leaf.path.startswith("model/")}
        assert facts == {(True, False)} if world == 1 else {(False, True)}


def test_the_estimate_covers_what_the_first_step_makes():
    for name in OPTIMIZERS:
        state = build(name)
        walk = StateWalk(state)
        estimate = walk.estimate()
        run(state, 3)
        layout, _ = walk.collect()
        assert 4096 + layout.payload_bytes + len(walk.encode(layout)) <= estimate, name


def test_what_only_the_optimizer_writes_may_be_copied_late():
    state = build("Adam")
    run(state, 1)
    model, optimizer = StateWalk(state).collect()[1][:2]
    late = {leaf.path for n, leaf in enumerate(x for x in model.section.leaves if not x.alias_of) if n in model.late}
    assert late == {"model/emb.weight", "model/norm.weight", "model/norm.bias"}
    assert len(optimizer.late) == len(optimizer.sources)
    state["model"].emb.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert not any(part.late for part in StateWalk(state).collect()[1])


def test_a_state_dict_that_hands_out_its_own_mutable_insides_is_read_anew(keep):
    class Careless(Box):
        def state_dict(self):
            return self.value

    careless = Careless({"names": ["a"], "raw": bytearray(b"1"), "seen": {1}})
    walk = StateWalk({"careless": careless})
    first = walk.encode(walk.collect()[0])
    careless.value["names"].append("b")
    second = walk.encode(walk.collect()[0])
    careless.value["raw"][0] = 50
    third = walk.encode(walk.collect()[0])
    careless.value["seen"].add(2)
    assert len({first, second, third, walk.encode(walk.collect()[0])}) == 4
