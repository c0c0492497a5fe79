"""The store as its agent holds it: whose complaint ends which store, and what is told meanwhile."""

import pytest

from everstep.launcher.agent.stores import Stores


class Child:
    """A store's process."""

    def __init__(self, number):
        self.pid, self.killed, self.expected_end = 1000 + number, False, False

    def kill(self):
        self.killed = True

    def send(self, message):
        pass


class Node:
    """Loop and nursery in one: processes are made at once, nothing is later."""

    barren_for = ""

    def __init__(self):
        self.children, self.notices, self.failures = [], [], []
        self.stores = Stores(self, self, ("127.0.0.1", 0), lambda: None, lambda code, text: self.failures.append(text))
        self.stores.start()

    def later(self, delay_s, call):
        pass

    def order(self, name, order, said, gone):
        self.said, self.gone = said, gone
        self.children.append(Child(len(self.children)))
        return self.children[-1]

    def notice(self, text):
        self.notices.append(text)

    def serve(self, port):
        self.said(self.children[-1], {"kind": "store.ready", "host": "127.0.0.1", "port": port}, [])

    def bury(self):
        self.gone(self.children[-1], -9)


@pytest.fixture
def node():
    made = Node()
    made.serve(4001)
    return made


def complaint(port):
    return f"StoreError: store 127.0.0.1:{port} cannot be reached: Connection refused; is its host running?"


def test_a_complaint_ends_the_store_and_nobody_is_sent_there_any_more(node):
    node.stores.suspect(complaint(4001))
    assert (node.children[0].killed, node.stores.address) == (True, None)
    node.bury()
    node.serve(4002)
    assert node.stores.address == ("127.0.0.1", 4002)
    assert (len(node.children), node.failures) == (2, [])


def test_the_same_complaint_of_another_rank_does_not_end_its_successor(node):
    node.stores.suspect(complaint(4001))
    node.stores.suspect(complaint(4001))
    node.bury()
    node.stores.suspect(complaint(4001))  # the next one has not said where it is
    node.serve(4002)
    node.stores.suspect(complaint(4001))
    assert [child.killed for child in node.children] == [True, False]
    assert node.stores.address == ("127.0.0.1", 4002)


@pytest.mark.parametrize("text", ["ValueError: store 127.0.0.1:4001 is a bad name", "RuntimeError: the loss is nan"])
def test_what_is_no_complaint_of_a_store_ends_none(node, text):
    node.stores.suspect(text)
    assert not node.children[0].killed


def test_a_complaint_that_names_no_address_is_of_the_present_one(node):
    node.stores.suspect("StoreTimeout: nothing was answered")
    assert node.children[0].killed


def test_complaints_are_no_false_starts(node):
    for port in range(4001, 4011):
        node.stores.suspect(complaint(port))
        node.bury()
        node.serve(port + 1)
    assert node.failures == []
