"""The hub's books: one order for all, each rank once, leases that a sleeping machine does not end."""

from everstep.launcher.peers.core.books import JUMP_S, LEASE_S, WATCHERS_LEASE_S, Books


def told(rank, size=2, job="j/0", incarnation=None):
    return {"job": job, "rank": rank, "world_size": size, "incarnation": incarnation or f"b.{rank}.1"}


def both(now=0.0):
    books = Books("j/0", 2)
    assert [books.join(10, told(0), now), books.join(11, told(1), now)] == ["", ""]
    return books


def test_a_world_is_complete_when_every_rank_has_joined():
    books = Books("j/0", 2)
    assert (books.complete, books.missing) == (False, [0, 1])
    books.join(10, told(1), 0.0)
    assert (books.complete, books.missing) == (False, [0])
    books.join(11, told(0), 0.0)
    assert (books.complete, books.missing) == (True, [])


def test_who_does_not_belong_here_is_told_why():
    books = Books("j/0", 2)
    assert "another job" in books.join(1, told(0, job="j/1"), 0.0)
    assert "WORLD_SIZE" in books.join(1, told(0, size=3), 0.0)
    assert "WORLD_SIZE" in books.join(1, told(2), 0.0)
    assert "another job" in books.join(1, {"job": "j/0", "rank": 0, "world_size": 2}, 0.0)
    assert books.join(1, told(0), 0.0) == ""
    assert "same RANK" in books.join(2, told(0), 0.0)
    assert not books.complete


def test_whoever_is_lost_does_not_come_back():
    books = both()
    assert books.lose(10).rank == 0
    assert books.lose(10) is None
    assert "joined already" in books.join(12, told(0), 1.0)


def test_the_first_to_say_a_key_has_won():
    books = both()
    assert books.say({"is": "Published", "n": 1}, "roster/0")
    assert not books.say({"is": "Published", "n": 2}, "roster/0")
    assert books.say({"is": "Published", "n": 3}, "roster/1")
    assert books.say({"is": "Died"}, None)
    assert books.say({"is": "Died"}, None)


def test_who_comes_later_hears_what_was_said_before_and_nothing_is_kept_for_nobody():
    books = Books("j/0", 2)
    books.join(10, told(0), 0.0)
    books.say({"is": "Announced"}, None)
    assert books.facts == [{"is": "Announced"}]
    books.join(11, told(1), 0.0)
    books.facts.clear()
    books.say({"is": "Announced"}, None)
    assert books.facts == []


def test_silence_for_the_lease_is_a_loss():
    books = both(now=100.0)
    assert books.look(100.0) == []
    now = 100.0
    while now < 100.0 + LEASE_S:
        now += 0.5
        books.heard(11, now)
        assert books.look(now) == []
    now += 0.5
    books.heard(11, now)
    assert books.look(now) == [10]


def test_silence_in_which_the_hub_did_not_run_is_forgiven():
    books = both(now=100.0)
    books.look(100.0)
    assert books.look(100.0 + JUMP_S + 30.0) == []
    assert books.look(100.0 + JUMP_S + 30.5) == []


def test_a_watcher_gives_up_before_it_is_given_up():
    assert WATCHERS_LEASE_S + 2.0 < LEASE_S
