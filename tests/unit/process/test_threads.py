"""What a process tells of where its threads stand."""

import threading

import pytest

from everstep.process import threads
from everstep.process.threads import MOST_BESIDE, MOST_FRAMES, MOST_TEXT, MOST_THREADS, bounded, inner

OURS = f"{threads._HERE}/training/wrapped.py"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (["s.py", "t.py"], ["s.py", "t.py"]),
        ([OURS, "<frozen runpy>", "/usr/lib/runpy.py", "s.py", "t.py"], ["s.py", "t.py"]),
        ([OURS, "s.py", OURS, OURS, "train.py"], ["s.py", "train.py"]),
        (["s.py", OURS, "train.py", OURS, "torch.py"], ["s.py", "train.py", OURS, "torch.py"]),
        (["s.py", OURS, "train.py", OURS], ["s.py", "train.py", OURS]),
        (["s.py", OURS], ["s.py", OURS]),
        ([OURS, OURS], [OURS, OURS]),
        ([], []),
    ],
)
def test_what_runs_the_script_and_what_wraps_the_function_is_left_out(files, left):
    assert [file for file, _, _ in inner([[file, 1, "f"] for file in files])] == left


def test_each_thread_is_told_of_with_its_place_the_first_one_first_and_none_of_ours():
    stands, go = [], threading.Event()

    def wait_here(number):
        stands.append(number)
        go.wait()

    names = ["loader", "everstep-ticker", "other"]
    made = [threading.Thread(target=wait_here, args=(n,), name=name) for n, name in enumerate(names)]
    for thread in made:
        thread.start()
    try:
        while len(stands) < len(made):
            pass
        found = threads.told(made[2].ident)
    finally:
        go.set()
        for thread in made:
            thread.join()
    assert found[0]["name"] == "other"
    assert [thread["first"] for thread in found] == [True] + [False] * (len(found) - 1)
    assert {"loader", "MainThread"} <= {thread["name"] for thread in found}
    assert "everstep-ticker" not in {thread["name"] for thread in found}
    file, line, function = next(frame for frame in found[0]["frames"] if "wait_here" in frame[2])
    assert file.endswith("test_threads.py")
    assert line > 1
    assert function.endswith("wait_here")


@pytest.mark.parametrize(
    "said",
    [3, "ab", [3], [{}], [{"name": "a", "first": True}], [{"name": "a", "first": True, "frames": [["f", 1]]}],
     [{"name": "a", "first": True, "frames": [["f", "x", "g"]]}], [{"name": "a", "first": True, "frames": 3}]],
)  # fmt: skip
def test_what_another_process_says_is_read_and_not_believed(said):
    with pytest.raises((LookupError, TypeError, ValueError)):
        threads.heard(said)


def test_what_another_process_tells_comes_as_it_was_and_no_longer():
    told = threads.told(threading.get_ident())
    assert threads.heard(told) == told
    long = [{"name": "a" * 999, "first": True, "frames": [["f" * 999, 1, "g" * 999]] * 999}] * 99
    found = threads.heard(long)
    assert len(found) == MOST_THREADS
    assert {len(thread["frames"]) for thread in found} == {MOST_FRAMES}
    assert len(found[0]["frames"][0][0]) == len(found[0]["frames"][0][2]) == MOST_TEXT


def test_a_stack_without_end_and_threads_without_end_are_cut():
    deep = {"name": "n" * 999, "first": False, "frames": [["f", n, "x"] for n in range(500)]}
    found = bounded([deep] * 100 + [deep | {"first": True}])
    assert len(found) == MOST_THREADS
    assert len(found[0]["name"]) == MOST_TEXT
    assert [len(thread["frames"]) for thread in found] == [MOST_FRAMES] + [MOST_BESIDE] * (MOST_THREADS - 1)
    assert found[0]["frames"][-1] == ["f", 499, "x"], "the innermost are kept"
