"""E20, the good half: where an interrupt passes whole, though C++ or somebody else's loop is on the stack."""

import io
import time

import pytest

pytestmark = pytest.mark.procs
AT_ONCE = 0.5


def _tensor_hook():
    import torch

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: time.sleep(60))
    y.sum().backward()


def _accumulated_hook():
    import torch

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda parameter: time.sleep(60))
    (x * 2).sum().backward()


def _module_hook():
    import torch

    model = torch.nn.Linear(2, 2)
    model.register_full_backward_hook(lambda *_: time.sleep(60))
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()


def _function_backward():
    import torch

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(60)
            return grad

    Slow.apply(torch.ones(2, requires_grad=True)).sum().backward()


def _sorted():
    sorted([2, 1], key=lambda n: time.sleep(60))


def _torch_save():
    import torch

    class Slow:
        def __reduce__(self):
            time.sleep(60)

    torch.save({"a": torch.ones(2), "b": Slow()}, io.BytesIO())


def _loader():
    from torch.utils.data import DataLoader

    class Slow:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            time.sleep(60)

    next(iter(DataLoader(Slow())))


def _optimizer_hook():
    import torch

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(60))
    optimizer.step()


PLACES = [
    _tensor_hook, _accumulated_hook, _module_hook, _function_backward, _sorted, _torch_save, _loader, _optimizer_hook,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__.strip("_"))
def test_an_interrupt_comes_out_whole_and_at_once(rig, place):
    import torch.utils.data

    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1).step()  # imports; one on the stack would rightly defer it
    chased = rig.run(place, after_s=0.2)
    assert chased.raised
    assert chased.seconds < AT_ONCE
    assert chased.verdicts == []
    x = torch.ones(2, requires_grad=True)  # and autograd is well afterwards
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
