"""The trials with real processes, under ours alone: NVRx's side needs its environment, and minutes."""

import pytest

from everstep.errors import UsageError
from everstep.experiments.bench import launch, weaknesses
from everstep.experiments.core.weaknesses import TRIALS, End

pytest.importorskip("torch")
pytestmark = [pytest.mark.procs, pytest.mark.timeout(280)]


def trial(case):
    (found,) = [t for t in TRIALS if t.case == case]
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "kept", "counted"), [("W9", 4, None), ("W22", 2, 0.0)])
def test_a_trial_is_run_and_told_as_it_went(tmp_path, case, kept, counted):
    (impl,) = weaknesses.ours(trial(case))
    found = weaknesses.one(tmp_path, (trial(case), impl))
    assert (found.over, found.kept, found.end, found.left) == (1, kept, End.DONE, 0)
    assert found.counted == counted
    assert found.returned == kept


def test_who_watches_is_found_and_its_death_is_its_ranks(tmp_path):
    bare = launch.choose(weaknesses.OURS, None, "bare")
    found = weaknesses.one(tmp_path, (trial("W6"), bare))
    assert (found.kept, found.end) == (1, End.DONE)


def test_what_there_is_not_is_refused():
    with pytest.raises(UsageError, match="W99"):
        weaknesses.chosen(["W2", "W99"])
    assert [t.case for t in weaknesses.chosen(["W14", "W2"])] == ["W2", "W14 swallowed", "W14 autocast"]
