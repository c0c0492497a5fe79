"""What a rank's bits depend on, as it is now."""

import torch

from everstep.training import numerics


def test_a_change_of_threads_and_of_determinism_shows():
    before, threads = numerics.facts(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        torch.use_deterministic_algorithms(True)
        after = numerics.facts()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert {name for name in before if before[name] != after[name]} == {"threads", "deterministic algorithms"}
    assert numerics.facts() == before
    assert before["processor"] != ""
    assert all(isinstance(value, str) for value in before.values())


def test_no_device_is_touched_for_it():
    numerics.facts()
    assert not torch.cuda.is_initialized()
