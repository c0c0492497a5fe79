"""Who is told that a restart will not be exact."""

import pytest
import torch.distributed as dist
from torch import nn

from everstep.training.exact import rebuilt_in_another_order


@pytest.fixture(scope="module")
def wrapped():
    """A DDP with and one without a single layout of buckets."""
    group = dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {
        one: nn.parallel.DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=one) for one in (True, False)
    }
    del group
    dist.destroy_process_group()


@pytest.mark.parametrize(("one_layout", "world", "told"), [(False, 3, True), (False, 2, False), (True, 4, False)])
def test_ddp_is_told_from_three_ranks_on(wrapped, one_layout, world, told):
    text = rebuilt_in_another_order({"model": wrapped[one_layout], "other": object()}, world)
    assert bool(text) == told
    assert not told or ("model" in text and "find_unused_parameters=True" in text)
