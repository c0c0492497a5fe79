"""Where agents meet, as torchrun's flags say it."""

import pytest

from everstep.errors import UsageError
from everstep.launcher.nodes.core.endpoint import endpoint_of

FLAGS = {"rdzv_backend": "static", "rdzv_endpoint": "", "node_rank": 0, "master_addr": "127.0.0.1", "master_port": None}


def read(**flags):
    return endpoint_of(FLAGS | flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("127.0.0.1", 29500, True)),
        ({"node_rank": 1, "master_addr": "n0", "master_port": "1234"}, ("n0", 1234, False)),
        ({"rdzv_endpoint": "n0:1234"}, ("n0", 1234, True)),
        ({"rdzv_endpoint": "n0"}, ("n0", 29500, True)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "n0:5"}, ("n0", 5, None)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "n0:5", "node_rank": None}, ("n0", 5, None)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "n0:5", "rdzv_conf": "is_host=true"}, ("n0", 5, True)),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "n0:5", "rdzv_conf": "is_host=0"}, ("n0", 5, False)),
    ],
)
def test_what_torchruns_flags_mean(flags, expected):
    found = read(**flags)
    assert (found.host, found.port, found.hosts) == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"rdzv_backend": "etcd"}, "knows static and c10d"),
        ({"rdzv_backend": "c10d"}, "needs --rdzv-endpoint"),
        ({"node_rank": None}, "needs --node-rank"),
        ({"rdzv_endpoint": "n0:x"}, "a port of 1 to 65535"),
        ({"rdzv_endpoint": ":80"}, "HOST:PORT"),
        ({"rdzv_endpoint": "n0:70000"}, "a port of 1 to 65535"),
        ({"rdzv_conf": "speed=9"}, "known are"),
        ({"rdzv_conf": "join_timeout"}, "NAME=VALUE"),
        ({"rdzv_conf": "join_timeout=-1"}, "more than 0"),
        ({"rdzv_conf": "join_timeout=soon"}, "more than 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags, said):
    with pytest.raises(UsageError, match=said):
        read(**flags)


def test_how_long_is_waited():
    assert (read().connect_s, read().join_s) == (60, 600)
    found = read(rdzv_conf="join_timeout=20,read_timeout=3")
    assert (found.connect_s, found.join_s) == (3, 20)
    assert read(rdzv_conf="timeout=7").connect_s == 7
