"""Local checkpoints without a process: states apart from their tensors, groups of any world, one rank's files."""

import collections
import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint import utils
from everstep.checkpoint.local.basic_state_dict import BasicTensorAwareStateDict, dict_list_map_inplace, nested_values
from everstep.checkpoint.local.ckpt_managers.base_manager import CheckpointingException, SameMachineReplicationException
from everstep.checkpoint.local.ckpt_managers.local_manager import LocalCheckpointManager
from everstep.checkpoint.local.replication.group_utils import ExchangePlan, GroupWrapper, batched, parse_group_sequence
from everstep.checkpoint.local.replication.torch_device_utils import TensorPlaceholder, get_default_device_from_type
from everstep.checkpoint.local.replication.utils import zip_strict
from everstep.errors import UsageError

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Optimizer:
    step: int
    moments: dict


def state():
    return {
        "w": torch.nn.Parameter(torch.ones(2, 3)), "pair": Pair(torch.zeros(2), [torch.tensor(3)]), "n": 7,
        "deque": collections.deque([torch.ones(1)], 3), "opt": Optimizer(4, {"m": torch.ones(2)}),
        "ordered": collections.OrderedDict(b=torch.ones(1), a=1), "tuple": (torch.empty(0), "x"),
    }  # fmt: skip


def test_any_nesting_on_the_host_is_taken_apart_and_put_together_and_the_given_state_is_left_alone():
    given_state = state()
    aware = BasicTensorAwareStateDict(given_state)
    tensors = aware.pop_tensors()
    assert len(tensors) == 7
    assert aware.is_hollow
    assert given_state["opt"].moments["m"].tolist() == [1, 1]
    with pytest.raises(UsageError, match="out already"):
        aware.pop_tensors()
    with pytest.raises(UsageError, match="7 tensors, and 1"):
        aware.insert_tensors(tensors[:1])
    aware.insert_tensors([tensor + 1 for tensor in tensors])
    found = aware.state_dict
    assert type(found["w"]) is torch.nn.Parameter
    assert found["pair"] == Pair(found["pair"].a, [torch.tensor(4)])
    assert found["opt"].moments["m"].tolist() == [2, 2]
    assert (found["opt"].step, found["deque"].maxlen, list(found["ordered"])) == (4, 3, ["b", "a"])
    aware.pop_tensors()
    aware.init_tensors()
    assert [tensor.shape for tensor in aware.tensors] == [tensor.shape for tensor in tensors]
    assert len(aware.values()) == 3


def test_copies_are_copies_on_the_host_too():
    live = torch.ones(2)
    aware = BasicTensorAwareStateDict({"w": live})
    aware.copy_tensors_to_cpu(non_blocking=True)
    live.zero_()
    aware.restore_tensor_device()
    assert aware.state_dict["w"].tolist() == [1, 1]
    preloaded = utils.preload_tensors({"w": (live, [live])})
    live.add_(5)
    assert preloaded["w"][1][0].tolist() == [0, 0]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 200))
def test_every_world_is_served_and_where_it_divides_as_nvrx_serves_it(jump, factor, world):
    groups = parse_group_sequence(jump, factor, world)
    assert sorted(rank for group in groups for rank in group) == list(range(world))
    if world % (jump * factor) == 0:
        expected = [group for first in range(jump) for group in batched(range(first, world, jump), factor)]
        assert groups == sorted(expected)
    if factor > 1 and world > 1:
        assert min(map(len, groups)) > 1
    if world >= factor > 1:
        assert max(map(len, groups)) < 4 * factor


def test_what_makes_no_groups_is_refused():
    with pytest.raises(UsageError, match="replication_jump=0"):
        parse_group_sequence(0, 2, 4)
    with pytest.raises(UsageError, match="n must be at least 1"):
        next(batched("abc", 0))
    with pytest.raises(UsageError, match="not str"):
        GroupWrapper.wrap("x")
    assert list(batched("abcde", 2)) == [("a", "b"), ("c", "d"), ("e",)]
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        zip_strict([1], [1, 2])


def test_a_plan_says_what_a_rank_brings():
    plan = ExchangePlan(GroupWrapper())
    plan.plan(sender=0, receiver=1, id_="a")
    plan.plan(1, 0, "b")
    assert [entry.id_ for entry in plan.entries] == ["a", "b"]
    assert plan.required_ids() == {"a"}
    assert plan.required_ids(1) == {"b"}
    with pytest.raises(UsageError, match="has not"):
        GroupWrapper().execute_plan(plan, {})


def test_a_world_of_one_needs_no_process_group(tmp_path):
    manager = LocalCheckpointManager(tmp_path, "job", keep=2)
    assert manager.find_latest() == -1
    with pytest.raises(CheckpointingException, match="find_latest"):
        manager.load()
    for n, iteration in enumerate((1, 2, 9_999_999, 10_000_000)):
        manager.save(BasicTensorAwareStateDict({"w": torch.full((3,), float(n))}), iteration)
    names = sorted(os.listdir(tmp_path / "job/0"))
    assert names == ["iter_10000000_0_local.pt", "iter_9999999_0_local.pt"]
    with pytest.raises(CheckpointingException, match="counted from 0"):
        manager.save(BasicTensorAwareStateDict({}), -1) if manager.find_latest() < -1 else manager._ckpt_id(-1)
    with pytest.raises(CheckpointingException, match="not newer"):
        manager.save(BasicTensorAwareStateDict({}), 10_000_000)
    (tmp_path / "job/0/.iter_0000005_0_local.pt.0123456789abcdef.tmp").write_bytes(b"half")
    (tmp_path / "job/0/notes.txt").write_text("mine")
    again = LocalCheckpointManager(tmp_path, "job")
    assert again.find_latest() == 10_000_000
    found, id_ = again.load()
    assert (found.state_dict["w"].tolist(), id_) == ([3, 3, 3], (10_000_000, 0, "job"))
    assert sorted(os.listdir(tmp_path / "job/0")) == [*names, "notes.txt"]


def test_a_wounded_file_is_never_handed_out_and_the_iteration_before_is(tmp_path, capfd):
    manager = LocalCheckpointManager(tmp_path)
    for iteration in (1, 2):
        manager.save(BasicTensorAwareStateDict({"w": torch.full((300,), float(iteration))}), iteration)
    newest = tmp_path / "0/iter_0000002_0_local.pt"
    whole = newest.read_bytes()
    for wounded, latest in ((whole[:900], 1), (whole.replace(whole[700:708], b"\1" * 8, 1), 2), (b"", 1)):
        newest.write_bytes(wounded)
        fresh = LocalCheckpointManager(tmp_path)
        assert fresh.find_latest() == latest
        assert fresh.load()[0].state_dict["w"].tolist() == [1.0] * 300
    assert "its bytes were changed" in capfd.readouterr().err
    os.unlink(tmp_path / "0/iter_0000001_0_local.pt")
    newest.write_bytes(whole.replace(whole[700:708], b"\1" * 8, 1))
    fresh = LocalCheckpointManager(tmp_path)
    fresh.find_latest()
    with pytest.raises(CheckpointingException, match="sound on all ranks"):
        fresh.load()


def test_a_state_that_cannot_be_saved_leaves_what_was_there(tmp_path):
    manager = LocalCheckpointManager(tmp_path)
    manager.save(BasicTensorAwareStateDict({"w": torch.ones(3)}), 1)
    with pytest.raises((TypeError, AttributeError)):
        manager.save(BasicTensorAwareStateDict({"w": lambda: 1}), 2)
    assert os.listdir(tmp_path / "0") == ["iter_0000001_0_local.pt"]
    assert LocalCheckpointManager(tmp_path).find_latest() == 1


def test_small_helpers():
    left = {"a": torch.ones(2), "l": [1, torch.zeros(1)], "only": 1}
    right = {"a": torch.ones(2), "l": [2, torch.zeros(1), 3], "other": 2}
    assert utils.diff(left, left) == ([], [], [])
    assert utils.diff(left, right) == ([("only",)], [("other",), ("l", 2)], [(("l", 0), int, int)])
    assert utils.dict_list_map_outplace(lambda x: x + 1, {"a": [1, 2]}) == {"a": [2, 3]}
    changed = {"a": [1, {"b": 2}]}
    assert dict_list_map_inplace(lambda x: x * 10, changed) is changed
    assert changed == {"a": [10, {"b": 20}]}
    assert list(nested_values({"a": [1, (2, 3)]})) == [1, 2, 3]
    seen = []
    utils.wrap_for_async(lambda state, n: seen.append((state, n)))("s", n=1)
    assert seen == [("s", 1)]
    logger = SimpleNamespace(log=lambda *told: seen.append(told), debug=lambda *told: seen.append(told))
    with utils.debug_time("outer", logger), utils.debug_time("inner"):
        utils.debug_msg("here")
    assert seen[1][1:] == ("outer.inner", "here")
    assert [told[2] for told in seen[2:]] == ["outer.inner", "outer"]
    assert "3" in str(SameMachineReplicationException((3, 0, "")))
    placeholder = TensorPlaceholder(torch.ones(2, 3).t())
    assert placeholder.restore(torch.zeros(3, 2)).shape == placeholder.restore().shape
    with pytest.raises(UsageError, match="is expected"):
        placeholder.restore(torch.zeros(2))
    assert get_default_device_from_type("cpu").type == "cpu"
    with pytest.raises(ValueError, match="no device of type"):
        get_default_device_from_type("cuda" if not torch.cuda.is_available() else "xpu")
