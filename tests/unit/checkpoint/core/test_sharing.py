"""Who overlaps whom in memory, said in a way that does not depend on where the memory lies."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.core.sharing import ALIGNED, Extent, shared

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=12)


def extents(given_spans, base: int, device: str = "cpu") -> list[Extent]:
    return [Extent(n, device, base + begin, base + begin + size) for n, (begin, size) in enumerate(given_spans)]


@given(spans)
def test_groups_are_what_hangs_together(given_spans):
    found = shared(extents(given_spans, 4096))
    bytes_of = [set(range(begin, begin + size)) for begin, size in given_spans]
    for n, mine in enumerate(bytes_of):
        assert (n in found) == any(mine & other for m, other in enumerate(bytes_of) if m != n)
        for m, other in enumerate(bytes_of):
            if mine & other and m != n:
                assert found[n][0] == found[m][0]
                assert found[n][1] - found[m][1] == given_spans[n][0] - given_spans[m][0]
    for n, (_, begin, size) in found.items():
        assert 0 <= begin <= begin + given_spans[n][1] <= size


@given(spans, st.integers(1, 1000))
def test_it_does_not_matter_where_the_memory_lies(given_spans, pages):
    assert shared(extents(given_spans, ALIGNED)) == shared(extents(given_spans, ALIGNED * pages))


def test_two_devices_share_nothing_and_neighbours_neither():
    assert shared([*extents([(0, 8)], 64), Extent(1, "cuda:0", 64, 72)]) == {}
    assert shared(extents([(0, 8), (8, 8)], 64)) == {}
    assert shared(extents([(0, 8), (0, 16), (8, 8)], 64)) == {0: (0, 0, 16), 1: (0, 0, 16), 2: (0, 8, 16)}


def test_groups_are_counted_in_the_order_of_their_members():
    found = shared(extents([(40, 8), (0, 8), (4, 8), (44, 2)], 64))
    assert [found[n][0] for n in range(4)] == [0, 1, 1, 0]
