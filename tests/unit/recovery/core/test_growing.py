"""A mapping that grows in place is a value all the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.recovery.core.growing import Growing

entries = st.lists(st.tuples(st.integers(0, 9), st.integers()), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 100), entries), max_size=20))
def test_whichever_version_grows_none_changes_and_the_first_value_stands(grown):
    """Each step adds to any version there is, not only to the newest; plain dictionaries say what must come out."""
    versions, plain = [Growing()], [{}]
    for which, more in grown:
        at = which % len(versions)
        versions.append(versions[at].plus(more))
        plain.append({**dict(reversed(more)), **plain[at]})
        for version, expected in zip(versions, plain, strict=True):
            assert version == expected
            assert (len(version), set(version)) == (len(expected), set(expected))
            for key in range(10):
                assert (key in version) == (key in expected)
                assert version.get(key, "nothing") == expected.get(key, "nothing")


def test_the_newest_grows_without_a_copy_and_an_older_one_with_one():
    first = Growing([("a", 1)])
    second = first.plus([("b", 2)])
    assert second._entries is first._entries
    third = first.plus([("c", 3)])
    assert third._entries is not first._entries
    assert (first, second, third) == ({"a": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 3})
    with pytest.raises(KeyError):
        first["b"]


def test_it_may_grow_while_it_is_walked():
    names = Growing([("a", 1), ("b", 2)])
    for name in names:
        names = names.plus([(name * 2, 0)])
    assert list(names) == ["a", "b", "aa", "bb"]
