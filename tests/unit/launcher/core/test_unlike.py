"""What torchrun's flags ask for that is otherwise here."""

import pytest

from everstep.errors import UsageError
from everstep.launcher.core.unlike import REFUSED, grace_s, notices, refuse

USUAL = {"monitor_interval": 0.1, "start_method": "spawn", "event_log_handler": "null", "nodes": 1}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_is_refused_by_its_flag(name):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is torchrun's") as refused:
        refuse({name: ["x"]})
    assert refused.value.exit_code == 64
    for nothing in ({}, {name: None}, {name: []}, {name: False}):
        refuse(nothing)


@pytest.mark.parametrize("given", ["SIGTERM,SIGINT,SIGHUP,SIGQUIT", "SIGTERM", " SIGINT, SIGTERM ", "", None])
def test_signals_that_end_the_job_may_be_named(given):
    refuse({"signals_to_handle": given})


@pytest.mark.parametrize("given", ["SIGUSR1", "SIGTERM,SIGUSR2", "SIGTERM;SIGINT"])
def test_a_signal_that_is_not_heard_is_refused_by_its_name(given):
    with pytest.raises(UsageError, match="hears no other signal"):
        refuse({"signals_to_handle": given})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"monitor_interval": "0.1"}, []),
        ({"monitor_interval": 5.0}, ["--monitor-interval 5.0 changes nothing"]),
        ({"start_method": "fork"}, ["--start-method fork changes nothing"]),
        ({"event_log_handler": "console"}, ["--event-log-handler console changes nothing"]),
        ({"master_addr": "node1"}, ["--master-addr node1 changes nothing"]),
        ({"master_addr": "127.0.0.1", "local_addr": None}, []),
        ({"local_addr": "10.0.0.7"}, ["--local-addr 10.0.0.7 changes nothing"]),
        ({"master_addr": "node1", "local_addr": "10.0.0.7", "nodes": 2}, []),
        ({"rdzv_conf": "timeout=9"}, ["--rdzv-conf timeout=9 changes nothing"]),
        ({"rdzv_conf": "timeout=9", "nodes": 2}, []),
        ({"rdzv_conf": "timeout=9", "spare_nodes": 1}, []),
        ({"start_method": None, "monitor_interval": None}, []),
    ],
)
def test_a_flag_that_changes_nothing_says_so_and_why(change, words):
    told = notices(USUAL | change)
    assert len(told) == len(words)
    for text, begins in zip(told, words, strict=True):
        assert text.startswith(begins + ": ")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 15.0),
        ({"grace": None, "shutdown_timeout": None}, 15.0),
        ({"shutdown_timeout": "40"}, 40.0),
        ({"grace": 3.0, "shutdown_timeout": 40}, 3.0),
        ({"grace": 0, "shutdown_timeout": 40}, 0.0),
    ],
)
def test_torchrun_s_name_for_the_grace_time_is_heard(given, seconds):
    assert grace_s(given, 15.0) == seconds
