"""What is read of what py-spy prints."""

import json

import pytest

from everstep.launcher.agent.spy import read

THREAD = {
    "pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "active": True, "owns_gil": True,
    "frames": [
        {"name": "inner", "filename": "/a/t.py", "line": 3},
        {"name": "<module>", "filename": "/a/t.py", "line": 9},
    ],
}  # fmt: skip


def test_its_frames_come_innermost_first_and_ours_innermost_last():
    found = read(json.dumps([THREAD | {"thread_name": "x", "os_thread_id": 8}, THREAD]).encode())
    assert found[0] == {
        "name": "MainThread", "first": True, "frames": [["/a/t.py", 9, "<module>"], ["/a/t.py", 3, "inner"]]
    }  # fmt: skip
    assert [thread["first"] for thread in found] == [True, False]


def test_threads_of_ours_are_left_out():
    assert read(json.dumps([THREAD | {"thread_name": "everstep-ticker"}]).encode()) == []


@pytest.mark.parametrize("text", [b"", b"Error: no", b"{}", b"3", b"[3]", b"null", b'[{"thread_name": "a"}]', b"\xff"])
def test_anything_else_is_nothing(text):
    assert read(text) == []
