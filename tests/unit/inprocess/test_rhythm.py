"""What is seen of a loop that says nothing of its steps: torch's own optimizers and collectives, one process."""

import os
import sys
import threading

import pytest

pytest.importorskip("torch", reason="needs torch, which is not installed here")

import torch
import torch.distributed as dist
from torch.distributed import all_reduce

from everstep.inprocess.rhythm import BEFORE, Rhythm
from everstep.process.page import Page


class Ticks:
    at = 100.0

    def now(self):
        return self.at


@pytest.fixture
def page():
    fd = Page.create("test")
    made = Page(fd)
    os.close(fd)
    yield made
    made.close()


@pytest.fixture
def rhythm(page):
    made = Rhythm(page, Ticks())
    yield made
    made.close()


def call(rhythm, function):
    """As the wrapper does."""
    rhythm.begin()
    function()


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def optimizer(cls=torch.optim.SGD):
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return cls(model.parameters(), lr=0.1)


def average(x):
    all_reduce(x)


def test_an_optimizer_s_step_is_a_turn(page, rhythm):
    """Two of them step in each; the page has the turns of the loop."""
    one, two = optimizer(), optimizer(torch.optim.AdamW)

    def train():
        for turn in range(4):
            assert page.read().turns == turn
            one.step()
            two.step()
            assert rhythm.inside(sys._getframe())
        assert not rhythm.inside(sys._getframe()), "the loop is left"

    for _ in range(2):  # a loop around the wrapped call is not the function's own
        call(rhythm, train)
        assert (page.read().turns, page.read().turned_s) == (4, 100.0)
    rhythm.begin()
    assert (page.read().turns, page.read().turned_s) == (0, 0.0)


def test_a_line_of_collectives_is_a_turn_once_it_has_called_several(page, rhythm, world):
    """Also where the function was imported before we came; a world's questions are no collectives."""
    x = torch.ones(1)

    def train():
        for turn in range(BEFORE + 3):
            assert page.read().turns == (turn if turn > BEFORE else 0)
            dist.get_rank()
            all_reduce(x)
            dist.barrier()
            assert rhythm.inside(sys._getframe()) == (turn >= BEFORE)
        assert not rhythm.inside(sys._getframe())

    call(rhythm, train)
    assert page.read().turns == BEFORE + 3


def test_what_steps_with_an_optimizer_is_counted_by_that_alone(page, rhythm, world):
    rhythm.begin()
    x = torch.ones(1)
    for _ in range(3 * BEFORE):
        all_reduce(x)
    assert page.read().turns == 3 * BEFORE
    one = optimizer()
    one.step()
    assert page.read().turns == 1
    for _ in range(3 * BEFORE):
        all_reduce(x)
    assert page.read().turns == 1
    rhythm.begin()
    for _ in range(3 * BEFORE):
        all_reduce(x)
    assert page.read().turns == 0, "the process is known to use one"


def test_a_library_s_calls_and_other_threads_are_not_counted(page, rhythm, world):
    rhythm.begin()
    lines = "def gathers(x, all_reduce):\n    for _ in range(50): all_reduce(x)\n"
    library = {}
    exec(compile(lines, "/v/lib/python3.11/site-packages/shards/gather.py", "exec"), library)
    library["gathers"](torch.ones(1), all_reduce)
    one, x = optimizer(), torch.ones(1)

    def elsewhere():
        for _ in range(20):
            average(x)
            one.step()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert page.read().turns == 0


def test_torch_is_given_back_as_it_was(page, world):
    asked = dist.distributed_c10d._rank_not_in_group
    made = Rhythm(page, Ticks())
    made.begin()
    made.begin()
    made.close()
    assert dist.distributed_c10d._rank_not_in_group is asked
    optimizer().step()
    for _ in range(20):
        average(torch.ones(1))
    assert page.read().turns == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_compiled_is_let_be(page, rhythm, world):
    """A graph that was whole without us is whole with us, and a compiled step steps."""
    rhythm.begin()

    @torch.compile(backend="eager", fullgraph=True)
    def sums(x):
        if not dist.distributed_c10d._rank_not_in_group(None):
            x = x + 1
        all_reduce(x)
        return x

    assert sums(torch.ones(1)).item() == 2
    one = optimizer()
    before = one.param_groups[0]["params"][0].clone()
    torch.compile(one.step, backend="eager")()
    assert not torch.equal(before, one.param_groups[0]["params"][0])
