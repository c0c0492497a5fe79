"""Signals before there is a job."""

import signal

import pytest

from everstep.launcher import early


@pytest.fixture(autouse=True)
def restored():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigint_is_heard_where_a_shell_has_it_ignored():
    """As by what a script starts with `&`; `kill -INT` to it would be lost."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(early.Asked), early.heard():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGHUP),
        (signal.SIGUSR1, signal.SIGTERM),
    ],
)
def test_who_is_asked_to_end_before_the_job_begins_is_told_by_what(number, told):
    with pytest.raises(early.Asked) as asked, early.heard():
        signal.raise_signal(number)
    assert (asked.value.name, asked.value.number) == (number.name, told)
