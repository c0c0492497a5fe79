"""E30: the end of a rank is not the end of its sockets; a peer that trusts them waits for strangers."""

import os
import time

import pytest

pytestmark = pytest.mark.procs
HELD_S = 1.0


def one_dies_and_its_child_lives(rank, port):
    """Rank 1 has a child that inherited its sockets, as a DataLoader has, and dies; rank 0 is in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, None), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        if os.fork() == 0:
            time.sleep(HELD_S)
            os._exit(0)
        os._exit(9)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return [time.monotonic() - began, str(error)]
    return None


def test_a_peer_sees_the_end_only_when_the_last_holder_of_the_sockets_ends(forks):
    """Why deaths are told by the agent, which holds a pidfd, and why a stop severs (test_abort.py)."""
    (seconds, text), _ = (
        each.get("value") or each.get("died") for each in forks.outcomes(one_dies_and_its_child_lives)
    )
    assert HELD_S / 2 < seconds < HELD_S + 5
    assert "Connection closed by peer" in text
