"""Where the end point listens."""

import pytest

from everstep.errors import UsageError
from everstep.launcher.control.core.place import LOOPBACK, Place, place_of


@pytest.mark.parametrize(
    ("flag", "variable", "place"),
    [
        (None, None, LOOPBACK),
        ("none", None, None),
        (None, "none", None),
        ("127.0.0.1:9000", "none", Place("127.0.0.1", 9000)),
        (None, "10.0.0.7:0", Place("10.0.0.7", 0)),
        ("0.0.0.0", None, Place("0.0.0.0", 0)),
        ("[::1]:80", None, Place("::1", 80)),
        ("[::1]", None, Place("::1", 0)),
    ],
)
def test_the_flag_comes_before_the_variable_and_loopback_is_where_nothing_is_said(flag, variable, place):
    assert place_of({"control_endpoint": flag}, variable) == place
    assert Place("127.0.0.1", 0) == LOOPBACK


@pytest.mark.parametrize("text", [":80", "a:b", "a:70000", "a:-1"])
def test_what_cannot_be_meant_is_refused_with_what_can(text):
    with pytest.raises(UsageError, match="ADDRESS:PORT"):
        place_of({"control_endpoint": text}, None)
