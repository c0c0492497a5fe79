"""What an operator sees of the memory tier."""

from types import SimpleNamespace

from everstep.checkpoint.shelf import Shelf
from everstep.checkpoint.shelf_shown import rows


def buffers(rank, *steps, size=10):
    segments = {n: SimpleNamespace(step_hint=lambda step=step: step) for n, step in enumerate(steps)}
    return SimpleNamespace(rank=rank, segments=segments, bytes=size)


def test_the_newest_step_of_which_all_ranks_here_have_a_snapshot():
    shown = rows([buffers(0, 7, 9, 8), buffers(1, 7, 0, 8), buffers(1, 3)])
    assert shown == [{"tier": "memory", "what": "kept", "step": 8, "bytes": 30}]


def test_nothing_while_a_rank_has_none():
    assert rows([buffers(0, 7), buffers(1, 0, 0)]) == []
    assert rows([]) == []
    assert Shelf().shown() == []
