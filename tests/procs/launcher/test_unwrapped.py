"""A script that wraps nothing and fails at one place: put off longer each time, and ended with its story."""

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(120), pytest.mark.long]

FAILS = """
import json, os, sys, time
with open(os.environ["NOTES"], "a") as f:
    f.write(json.dumps({"what": "begun", "rank": int(os.environ["RANK"]), "at": time.monotonic()}) + "\\n")
if os.environ["RANK"] == "1":
    raise ValueError("always")
time.sleep(600)
"""


def test_a_fault_that_repeats_at_one_place_is_put_off_and_the_end_tells_all_attempts(start):
    ended = start(FAILS, "--nproc-per-node", "2", "--max-restarts", "2", wrapped=None).ended()
    assert ended.code == 1
    begun = [note["at"] for note in ended.of("begun") if note["rank"] == 1]
    assert len(begun) == 3
    assert begun[2] - begun[1] >= 1.0
    assert "the same fault again, at the same place: the next attempt begins in 1 s" in ended.err
    assert "all 2 restarts that --max-restarts allows are used" in ended.err
    assert "in generations 0-2" in ended.err
    assert "ValueError: always" in ended.err
