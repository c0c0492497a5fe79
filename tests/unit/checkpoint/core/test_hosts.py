"""Who stands where, and when a host is given up."""

import pytest

from everstep.checkpoint.core.hosts import BEAT_S, JUMP_S, LOST_S, Hosts, Silence, arrange


@pytest.mark.parametrize(
    ("identities", "names", "homes"),
    [
        (["a x"], ("a",), [0]),
        (["a x", "a x", "b x"], ("a", "b"), [0, 0, 1]),
        (["b x", "a x", "b x"], ("b", "a"), [0, 1, 0]),  # the host of rank 0 leads
        (["a 1", "a 2", "a 1"], ("a#1", "a#2"), [0, 1, 0]),  # containers of one machine
        (["", "a"], ("?", "a"), [0, 1]),
    ],
)
def test_ranks_of_one_identity_stand_together_and_that_of_rank_0_leads(identities, names, homes):
    hosts = arrange(dict(enumerate(identities)))
    assert hosts.names == names
    assert [hosts.home[rank] for rank in range(len(homes))] == homes
    assert hosts.several == (len(names) > 1)
    assert Hosts.from_json(hosts.to_json()) == hosts
    assert sorted(rank for host in range(len(names)) for rank in hosts.ranks(host)) == list(range(len(homes)))
    assert hosts.ranks(0)[0] == 0


def looked(silence, *times):
    lost = False
    for now in times:
        silence, lost = silence.look(now)
    return lost


def test_a_host_is_given_up_when_it_has_said_nothing_for_so_long_and_not_before():
    silence = Silence(0.0, 0.0)
    beats = [BEAT_S * n for n in range(1, 100)]
    assert not looked(silence, *[at for at in beats if at < LOST_S])
    assert looked(silence, *[at for at in beats if at <= LOST_S])
    heard, _ = silence.look(BEAT_S)
    assert not looked(heard.heard(2 * BEAT_S), *[at for at in beats[1:] if at < LOST_S + 2 * BEAT_S])


def test_a_time_in_which_we_did_not_run_is_not_the_other_s_silence():
    """A keeper that was stopped, or a machine that slept: what has come meanwhile is read after it looks."""
    silence, lost = Silence(0.0, 0.0).look(LOST_S * 10)
    assert not lost
    assert not looked(silence, LOST_S * 10 + BEAT_S + JUMP_S / 2)
