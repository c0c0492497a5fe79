"""An unwrapped script that has a handler for SIGTERM comes to it before its ranks begin anew, as under torchrun."""

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.long]

SCRIPT = """
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
def tidy(number, frame):
    note("tidies", attempt=attempt)
    time.sleep(0.5)
    note("tidied", attempt=attempt)
    sys.exit(0)
signal.signal(signal.SIGTERM, tidy)
note("begins", attempt=attempt)
while attempt == 0 and not os.path.exists("ready"):
    if rank == 0: open("ready", "w").close()
    time.sleep(0.02)
if attempt == 0 and rank == 1:
    time.sleep(0.5)
    raise ValueError("fault")
while attempt == 0: time.sleep(0.05)
note("ends", attempt=attempt)
"""


def test_a_peer_s_fault_lets_a_rank_tidy_up_and_its_good_end_counts_for_nothing(start):
    ended = start(SCRIPT, "--nproc-per-node", "2", "--max-restarts", "1", wrapped=False).ended()
    assert ended.code == 0, ended.err
    assert [n["rank"] for n in ended.of("tidied")] == [0]
    assert sorted((n["rank"], n["attempt"]) for n in ended.of("ends")) == [(0, 1), (1, 1)]
    assert "(restart 1 of 1)" in ended.err
