"""E23, raw: what the obvious helper does to a training run by being called. If this fails, torch has got better."""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict


def trained(look):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    look(model, optimizer)
    for _ in range(5):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach(), int(optimizer.state[model.weight]["step"])


def test_dcps_helper_steps_the_live_optimizer():
    weight, steps = trained(lambda *_: None)
    looked_at, counted = trained(get_state_dict)
    assert (steps, counted) == (5, 6)
    assert not looked_at.equal(weight)
