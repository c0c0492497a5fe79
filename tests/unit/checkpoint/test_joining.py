"""How ranks meet in a store that others have met in before."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from everstep.checkpoint import joining

PREFIX = "everstep/checkpointer/0"


def held(store, world_size, told):
    """A whole meeting, as rank 0 has it."""
    called = joining._call(store, PREFIX)
    others = joining._wait(store, [f"{called}/at/{rank}" for rank in range(1, world_size)])
    joining._answer(store, called, [joining.json.loads(one) for one in others], told)
    return called


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as made:
        yield made


def test_a_rank_that_comes_before_rank_0_is_not_taken_in_by_what_an_earlier_attempt_has_left(pool):
    """torchrun's agents may keep one store for all attempts: the keeper that is named there is gone."""
    store = dist.HashStore()
    first = [pool.submit(joining._come, store, PREFIX, {"rank": rank}) for rank in (1, 2)]
    held(store, 3, {"name": "old"})
    assert [one.result(30)[1] for one in first] == [{"name": "old"}] * 2
    early = pool.submit(joining._come, store, PREFIX, {"rank": 1})
    old = store.get(f"{PREFIX}/meeting").decode()
    while store.get(f"{PREFIX}/{old}/at/1") == b"" or b"nonce" not in store.get(f"{PREFIX}/{old}/at/1"):
        assert not early.done()
    late = pool.submit(held, store, 3, {"name": "new"})
    third = pool.submit(joining._come, store, PREFIX, {"rank": 2})
    called = late.result(30)
    assert early.result(30) == (called, {"name": "new"})
    assert third.result(30) == (called, {"name": "new"})
