"""Without an agent, and on a machine that does not fit: what is said."""

import pytest
import torch

from everstep.errors import ConfigurationError
from everstep.training.alone import device_of


def test_gloo_works_on_the_cpu():
    assert device_of("gloo", 3) == torch.device("cpu")


def test_a_rank_without_a_gpu_of_its_own_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match="at most 1 ranks here"):
        device_of("nccl", 1)
