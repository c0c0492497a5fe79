"""What every implementation of a protocol must do: one list of checks that the real thing and the double both pass.

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    def test_conforms(check):
        check(open_store)

`open_store()` returns a new connection to one and the same store; each check uses keys of its own.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from everstep.errors import StoreError, UsageError
from everstep.store.api import MAX_VALUE, Store

OpenStore = Callable[[], Store]
SHORT_S, LONG_S = 0.02, 20.0
"""A deadline that is meant to pass, and one that is not."""


@contextmanager
def refused(kind: type[Exception], mend: str) -> Generator[None]:
    """Expect an error of this kind whose message holds `mend`."""
    try:
        yield
    except kind as error:
        assert mend in str(error), f"{mend!r} is not in {error}"  # noqa: PT017 - the suite needs no pytest
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def _elsewhere(do: Callable[[], object]) -> None:
    """Run `do` on another thread, and raise here what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001 - handed to the owner of the thread
            raised.append(error)

    thread = threading.Thread(target=run, name="conformance")
    thread.start()
    thread.join(LONG_S)
    if raised:
        raise raised[0]


def what_is_set_is_read(open_store: OpenStore) -> None:
    """Any bytes come back, through another connection too; a later value replaces an earlier one."""
    ours, theirs = open_store(), open_store()
    assert ours.get("read/a") is None
    for value in (b"x", bytes(range(256)), b"\x00", "schön".encode()):
        ours.set("read/a", value)
        assert ours.get("read/a") == value
        assert theirs.get("read/a") == value


def create_happens_once(open_store: OpenStore) -> None:
    """The first value stands for ever; the winner, asking again after a lost reply, still sees itself win."""
    ours, theirs = open_store(), open_store()
    assert ours.create("once/a", b"mine") == b"mine"
    assert theirs.create("once/a", b"theirs") == b"mine"
    assert ours.create("once/a", b"mine") == b"mine"
    assert ours.get("once/a") == b"mine"
    theirs.set("once/b", b"was set")
    assert ours.create("once/b", b"mine") == b"was set"
    assert ours.create("once/bytes", b"\xff\x00\xfe") == b"\xff\x00\xfe"


def create_after_delete_is_new(open_store: OpenStore) -> None:
    """A deleted key is as one that never was: so a key that decides something is not deleted while it is read."""
    ours = open_store()
    assert ours.create("again/a", b"1") == b"1"
    assert ours.delete("again/a")
    assert not ours.delete("again/a")
    assert ours.get("again/a") is None
    assert ours.create("again/a", b"2") == b"2"


def swap_replaces_what_is_known(open_store: OpenStore) -> None:
    """Only exactly that; who knows an older value learns the present one, and where nothing stands, that."""
    ours, theirs = open_store(), open_store()
    assert ours.swap("swap/a", b"1", b"2") is None
    assert ours.get("swap/a") is None
    ours.set("swap/a", b"1")
    assert theirs.swap("swap/a", b"1", b"2 by them") == b"2 by them"
    assert ours.swap("swap/a", b"1", b"2 by us") == b"2 by them"
    assert theirs.swap("swap/a", b"1", b"2 by them") == b"2 by them"
    assert ours.swap("swap/a", b"2 by them", b"\xff\x00\xfe") == b"\xff\x00\xfe"
    assert ours.get("swap/a") == b"\xff\x00\xfe"
    with refused(UsageError, "write another"):
        ours.swap("swap/a", b"1", b"1")
    with refused(UsageError, "write at least a byte"):
        ours.swap("swap/a", b"", b"1")


def many_creators_one_winner(open_store: OpenStore) -> None:
    """Of eight that race, all see the same winner, and it is one of them."""
    stores, seen = [open_store() for _ in range(8)], dict[int, bytes]()
    start = threading.Barrier(8)

    def race(number: int, store: Store) -> None:
        start.wait(LONG_S)
        seen[number] = store.create("race/a", b"writer %d" % number)

    threads = [threading.Thread(target=race, args=pair) for pair in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(seen) == len(stores)
    assert len(set(seen.values())) == 1
    assert seen[0] in {b"writer %d" % number for number in range(8)}


def empty_and_huge_values_are_refused(open_store: OpenStore) -> None:
    """Before anything is sent, so that the connection stays well; the largest that is allowed passes."""
    ours = open_store()
    for call in (ours.set, ours.create):
        with refused(UsageError, "write at least a byte"):
            call("size/a", b"")
        with refused(UsageError, f"more than {MAX_VALUE}"):
            call("size/a", bytes(MAX_VALUE + 1))
    assert ours.get("size/a") is None
    largest = bytes(range(256)) * (MAX_VALUE // 256)
    ours.set("size/largest", largest)
    assert ours.get("size/largest") == largest
    assert ours.create("size/once", largest) == largest


def wait_sees_keys_come(open_store: OpenStore) -> None:
    """All of them, whoever writes them, before or after the wait begins."""
    ours, theirs = open_store(), open_store()
    theirs.set("wait/a", b"1")
    assert ours.wait(["wait/a"], timeout_s=LONG_S)

    def come() -> None:
        store = theirs.clone()
        store.set("wait/b", b"2")
        store.create("wait/c", b"3")
        store.close()

    thread = threading.Thread(target=come, name="conformance")
    thread.start()
    assert ours.wait(["wait/a", "wait/b", "wait/c"], timeout_s=LONG_S)
    thread.join(LONG_S)


def wait_ends_without_keys(open_store: OpenStore) -> None:
    """False, and the connection is well."""
    ours = open_store()
    ours.set("late/a", b"1")
    assert not ours.wait(["late/a", "late/b"], timeout_s=SHORT_S)
    assert ours.get("late/a") == b"1"
    assert not ours.wait(["late/b"], timeout_s=SHORT_S)
    ours.set("late/b", b"2")
    assert ours.wait(["late/a", "late/b"], timeout_s=SHORT_S)


def what_is_gathered_comes_in_order(open_store: OpenStore) -> None:
    """All values in the order that was asked for, or nothing where one of them has not come; the connection is well."""
    ours = open_store()
    keys = [f"gather/{number}" for number in range(300)]
    for number, key in enumerate(keys):
        ours.set(key, b"%d" % number)
    assert ours.gather(keys[::-1], timeout_s=LONG_S) == tuple(b"%d" % number for number in range(300))[::-1]
    assert ours.gather([*keys, "gather/never"], timeout_s=SHORT_S) is None
    assert ours.get("gather/0") == b"0"


def keys_are_listed_by_prefix(open_store: OpenStore) -> None:
    """Sorted, whole, and without those that were deleted."""
    ours = open_store()
    for key in ("list/b", "list/a", "list/c", "listless"):
        ours.set(key, b"1")
    ours.delete("list/c")
    assert ours.list("list/") == ("list/a", "list/b")
    assert set(ours.list("list")) == {"list/a", "list/b", "listless"}
    assert {"list/a", "listless"} <= set(ours.list())


def another_thread_takes_a_clone(open_store: OpenStore) -> None:
    """A connection has one owner; a clone sees the same store."""
    ours = open_store()
    ours.set("owner/a", b"1")
    with refused(StoreError, "take a clone()"):
        _elsewhere(lambda: ours.get("owner/a"))

    def use_clone() -> None:
        clone = ours.clone()
        assert clone.get("owner/a") == b"1"
        clone.close()

    _elsewhere(use_clone)
    assert ours.get("owner/a") == b"1"


def a_connection_is_owned_by_who_calls_first(open_store: OpenStore) -> None:
    """It may be opened on one thread and used on another."""
    ours = open_store()
    _elsewhere(lambda: ours.set("first/a", b"1"))
    with refused(StoreError, "take a clone()"):
        ours.get("first/a")


def severing_ends_a_wait(open_store: OpenStore) -> None:
    """At once, from another thread, and for good; other connections go on."""
    ours, theirs = open_store(), open_store()
    waiting = threading.Event()
    ended: list[StoreError] = []

    def wait() -> None:
        assert ours.get("sever/a") is None
        waiting.set()
        try:
            ours.wait(["sever/never"], timeout_s=LONG_S)
        except StoreError as error:
            ended.append(error)

    thread = threading.Thread(target=wait, name="conformance")
    thread.start()
    assert waiting.wait(LONG_S)
    ours.sever()
    thread.join(LONG_S)
    assert "severed" in str(ended[0])
    theirs.set("sever/a", b"1")
    assert theirs.get("sever/a") == b"1"


def _every_call(store: Store) -> tuple[Callable[[], object], ...]:
    return (
        lambda: store.get("gone/a"),
        lambda: store.set("gone/a", b"2"),
        lambda: store.create("gone/b", b"2"),
        lambda: store.swap("gone/a", b"1", b"2"),
        lambda: store.wait(["gone/a"]),
        lambda: store.gather(["gone/a"]),
        lambda: store.delete("gone/a"),
        lambda: store.list(),
    )


def what_is_severed_or_closed_refuses(open_store: OpenStore) -> None:
    """Every call says so, and both may be done twice."""
    ours, theirs = open_store(), open_store()
    for store, how, end in ((ours, "severed", ours.sever), (theirs, "closed", theirs.close)):
        store.set("gone/a", b"1")
        end()
        end()
        for call in _every_call(store):
            with refused(StoreError, how):
                call()
        store.close()
    assert open_store().get("gone/a") == b"1"


STORE_CHECKS: tuple[Callable[[OpenStore], None], ...] = (
    what_is_set_is_read,
    create_happens_once,
    create_after_delete_is_new,
    swap_replaces_what_is_known,
    many_creators_one_winner,
    empty_and_huge_values_are_refused,
    wait_sees_keys_come,
    wait_ends_without_keys,
    what_is_gathered_comes_in_order,
    keys_are_listed_by_prefix,
    another_thread_takes_a_clone,
    a_connection_is_owned_by_who_calls_first,
    severing_ends_a_wait,
    what_is_severed_or_closed_refuses,
)
