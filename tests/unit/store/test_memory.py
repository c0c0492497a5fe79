import subprocess
import sys
import threading

import pytest

from everstep.errors import StoreError, StoreTimeout
from everstep.store import MemoryStore, Store
from everstep.store.memory import Health, MemoryHost
from everstep.testing.conformance import STORE_CHECKS, refused


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_conforms(check):
    host = MemoryHost()
    check(lambda: MemoryStore(host))


def test_is_a_store():
    store: Store = MemoryStore()
    store.set("a", b"1")
    assert store.get("a") == b"1"


@pytest.mark.parametrize(("health", "error"), [(Health.FROZEN, StoreTimeout), (Health.DEAD, StoreError)])
def test_a_sick_host(health, error):
    host = MemoryHost()
    store = MemoryStore(host)
    store.set("a", b"1")
    host.become(health)
    for call in (lambda: store.get("a"), lambda: store.set("a", b"2"), lambda: store.create("b", b"1")):
        with pytest.raises(error):
            call()
    host.become(Health.WELL)
    assert store.get("a") == b"1"


def test_a_host_that_freezes_ends_a_wait():
    host = MemoryHost()
    ended = []

    def wait():
        try:
            MemoryStore(host).wait(["never"], timeout_s=20)
        except StoreTimeout as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    host.become(Health.FROZEN)
    thread.join(20)
    assert "does not answer" in str(ended[0])


def test_the_suite_s_own_expectation_fails_where_nothing_is_raised():
    with pytest.raises(AssertionError, match="no StoreError"), refused(StoreError, "x"):
        pass
    with pytest.raises(AssertionError, match="is not in"), refused(StoreError, "x"):
        raise StoreError("y")


def test_importing_the_store_leaves_torch_out():
    code = "import sys, everstep.store, everstep.faults.commands; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
