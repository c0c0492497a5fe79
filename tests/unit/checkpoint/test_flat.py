"""FSDP1: each rank's ranges of each parameter, under the parameter's name; nothing is gathered (M5, C7)."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from everstep.checkpoint import flat
from everstep.checkpoint.core import items
from everstep.checkpoint.core.layout import Pieces
from everstep.checkpoint.walk import StateWalk
from everstep.errors import StateMismatch

pytestmark = pytest.mark.filterwarnings("ignore")  # FSDP1 warns of the CPU, of NO_SHARD and of itself

FULL, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD


def plain(seed: int = 0) -> nn.Module:
    """Odd sizes, a parameter that lies in another order than its dimensions', a scalar row, a tie."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Conv2d(3, 5, 3), nn.LayerNorm(7), nn.Linear(5, 7), nn.BatchNorm1d(3))
    model[1].to(memory_format=torch.channels_last)
    model[3].weight = model[0].weight
    model.scale = nn.Parameter(torch.tensor([3.0]))
    return model


def wrapped(seed: int, nested: bool, **how) -> nn.Module:
    model = plain(seed)
    how = {"device_id": torch.device("cpu"), **how}
    if nested:
        for n in (1, 2):
            model[n] = FullyShardedDataParallel(model[n], **how)
    return FullyShardedDataParallel(model, **how)


def fill(whole: dict[str, torch.Tensor], section, sources, once: bool) -> None:
    """Put what a rank holds where it says that it belongs."""
    own = [n for n, leaf in enumerate(section.leaves) if leaf.alias_of is None]
    by_path = {section.leaves[n].path: source for n, source in zip(own, sources, strict=True)}
    for name, node in section.tree.items():
        for n in node.leaves if isinstance(node, Pieces) else ():
            leaf = section.leaves[n]
            assert leaf.whole_shape == tuple(whole[name].shape)
            place = tuple(slice(o, o + s) for o, s in zip(leaf.starts, leaf.shape, strict=True))
            assert not once or whole[name][place].isnan().all()
            whole[name][place] = by_path[leaf.alias_of or leaf.path]


@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
@pytest.mark.parametrize("strategy", [FULL, NONE], ids=["sharded", "not sharded"])
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_all_ranks_hold_is_each_parameter_once(world, orig, strategy, nested, as_rank):
    """C7: at most 2d-1 rectangles a rank, which tile the parameter; padding belongs to nobody."""
    expected = {name: value.detach() for name, value in plain().named_parameters(remove_duplicate=False)}
    found = {name: torch.full(value.shape, torch.nan) for name, value in expected.items()}
    for rank in range(world):
        as_rank(rank, world)
        model = wrapped(0, nested, use_orig_params=orig, sharding_strategy=strategy)
        layout, parts = StateWalk({"model": model}, rank=rank, world_size=world).collect()
        section = layout.section("model")
        assert set(section.tree) == set(plain().state_dict())
        for node in section.tree.values():
            assert not isinstance(node, Pieces) or len(node.leaves) <= max(1, 2 * len(node.shape) - 1)
        ties = [section.tree[f"{n}.weight"].leaves for n in (0, 3)]
        assert all(section.leaves[n].alias_of for n in ties[1])
        fill(found, section, parts[0].sources, once=strategy is FULL)
        names = {item.name for item in items.tensors(layout)}
        assert "model.4.running_mean" not in names  # its rank's own
        assert any(n.startswith("model.0.weight") for n in names) == bool(ties[0])
    assert all(found[name].equal(value) for name, value in expected.items())


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "original"])
def test_an_optimizer_s_state_is_told_by_the_model_s_parameters(orig, as_rank):
    found: dict[str, torch.Tensor] = {}
    for rank in range(3):
        as_rank(rank, 3)
        model = wrapped(0, False, use_orig_params=orig)
        optimizer = stepped(model, rank)
        walk = StateWalk({"model": model, "optimizer": optimizer}, rank=rank, world_size=3)
        layout, parts = walk.collect()
        section = layout.section("optimizer/state")
        for name, entry in section.tree.items():
            whole = dict(plain().named_parameters())[name]
            held = found.setdefault(name, torch.full(whole.shape, torch.nan))
            fill({"exp_avg": held}, _only(section, entry), parts[1].sources, once=True)
            step = section.leaves[entry["step"].leaf]
            assert (step.replicated, step.per_rank, step.shape) == (False, False, ())  # of whoever holds a part
    assert set(found) == {name for name, _ in plain().named_parameters()}
    assert all(not value.isnan().any() for value in found.values())


def _only(section, entry):
    """The section as if there were nothing but one entry's exp_avg."""
    return type(section)(section.name, {"exp_avg": entry["exp_avg"]}, section.leaves)


def stepped(model, seed: int) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        if parameter.numel():
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("strategy", [FULL, NONE], ids=["sharded", "not sharded"])
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("rank", range(3))
def test_each_rank_s_state_comes_back_to_the_bit(rank, orig, strategy, as_rank, keep):
    as_rank(rank, 3)
    how = {"use_orig_params": orig, "sharding_strategy": strategy}

    def build(seed):
        model = wrapped(seed, True, **how)
        return {"model": model, "optimizer": stepped(model, seed)}

    saved = build(1)
    kept = keep(saved, rank=rank, world_size=3)
    other = build(2)
    assert keep(other, rank=rank, world_size=3) != kept
    kept.restore(StateWalk(other, rank=rank, world_size=3))
    assert keep(other, rank=rank, world_size=3) == kept
    fresh = wrapped(3, True, **how)
    unstepped = {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())}
    kept.restore(StateWalk(unstepped, rank=rank, world_size=3))
    assert keep(unstepped, rank=rank, world_size=3) == kept
    walk = StateWalk(other, rank=rank, world_size=3)
    before = walk.collect()[1]
    assert [a is b for a, b in zip(before, walk.collect()[1], strict=True)][:2] == [True, True]


def test_another_cut_or_another_wrapper_is_named_before_anything_is_written(as_rank, keep):
    as_rank(0, 2)
    kept = keep({"model": wrapped(0, False)}, world_size=2)
    before = wrapped(1, True)
    values = [p.detach().clone() for p in before.parameters()]
    with pytest.raises(StateMismatch, match=r"model/.* was saved as float32\[.*\], of it .* and is float32\["):
        kept.restore(StateWalk({"model": before}, world_size=2))
    assert all(a.equal(b) for a, b in zip(values, before.parameters(), strict=True))
    with pytest.raises(StateMismatch, match="was saved as the pieces of an FSDP1 shard and is a tensor here"):
        kept.restore(StateWalk({"model": plain()}, world_size=2))
    with pytest.raises(StateMismatch, match="was saved as one tensor and is a range of FSDP1 here"):
        keep({"model": plain()}, world_size=2).restore(StateWalk({"model": before}, world_size=2))


def test_an_optimizer_s_tensor_that_cannot_be_told_apart_is_refused(as_rank):
    as_rank(0, 2)
    model = wrapped(0, False, use_orig_params=False)
    optimizer = stepped(model, 0)
    next(iter(optimizer.state.values()))["factored"] = torch.ones(3)
    with pytest.raises(TypeError, match=r"optimizer/state/.*/factored has the shape \[3\] beside an FSDP1 parameter"):
        StateWalk({"model": model, "optimizer": optimizer}, world_size=2).collect()


def without(name):
    return lambda handle: delattr(handle.flat_param, name)


def info(**change):
    def change_first(handle):
        infos = handle.flat_param._shard_param_infos
        at = next(n for n, each in enumerate(infos) if each.in_shard)
        handle.flat_param._shard_param_infos = (*infos[:at], infos[at]._replace(**change), *infos[at + 1 :])

    return change_first


def extended(handle):
    handle.flat_param._param_extensions = [object(), *handle.flat_param._param_extensions[1:]]


def restrided(handle):
    parameter = handle.flat_param
    at = next(n for n, shape in enumerate(parameter._shapes) if len(shape) == 2)
    parameter._contiguities = [c and n != at for n, c in enumerate(parameter._contiguities)]
    parameter._strides = [(9, 1) if n == at else stride for n, stride in enumerate(parameter._strides)]


UNSOUND = {
    "a missing list": (without("_shard_param_infos"), "has no _shard_param_infos"),
    "a short list": (lambda h: setattr(h.flat_param, "_fqns", h.flat_param._fqns[1:]), "differ in length"),
    "a range too long": (info(numel_in_shard=10**6), "none of"),
    "a range outside": (info(offset_in_shard=10**6), "outside of this rank's part"),
    "an end before its begin": (info(intra_param_end_idx=-1), "none of"),
    "tensor parallelism": (extended, "sharded already"),
    "a gap in a parameter": (restrided, "does not lie densely"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_version_in_which_this_is_unsound_is_refused_with_a_word(name, as_rank):
    """C7: refused, not gathered."""
    as_rank(0, 2)
    model = wrapped(0, False)
    spoil, told = UNSOUND[name]
    spoil(model._handle)
    with pytest.raises(TypeError, match=rf"FSDP1 module of torch .*{told}.*Use fully_shard"):
        StateWalk({"model": model}, world_size=2)


def test_no_state_dict_is_called_and_nothing_is_sent(as_rank, monkeypatch):
    """M5."""
    as_rank(1, 2)
    model = wrapped(0, True)
    optimizer = stepped(model, 0)
    for name in ("all_gather_into_tensor", "all_gather_single", "all_gather", "broadcast", "all_reduce"):
        if hasattr(torch.distributed, name):
            monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: pytest.fail(name))
    for kind in (FullyShardedDataParallel, torch.optim.Optimizer):
        monkeypatch.setattr(kind, "state_dict", lambda *_, **__: pytest.fail("state_dict"))
    StateWalk({"model": model, "optimizer": optimizer}, rank=1, world_size=2).collect()


def test_a_parameter_that_was_given_other_memory_is_read_there(as_rank, keep):
    """FSDP1 takes it over in the next forward; until then the flat parameter is old."""
    as_rank(0, 2)
    model = wrapped(0, False, use_orig_params=True)
    walk = StateWalk({"model": model}, world_size=2)
    walk.collect()
    parameter = next(p for p in model.parameters() if p.numel() > 1)
    parameter.data = parameter.detach() * 2
    name = next(n for n, p in model.named_parameters() if p is parameter).replace("_fsdp_wrapped_module.", "")
    layout, parts = walk.collect()
    section = layout.section("model")
    own = [n for n, leaf in enumerate(section.leaves) if leaf.alias_of is None]
    found = torch.cat([parts[0].sources[own.index(n)].flatten() for n in section.tree[name].leaves])
    assert found.equal(parameter.detach())


def test_names_are_those_inside_the_wrappers():
    assert flat.clean("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.weight") == "a.b.weight"
    assert list(itertools.chain(flat.flats("x", iter([("", nn.Linear(1, 1))])))) == []
