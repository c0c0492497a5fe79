"""What `Run` refuses, and what it hands on."""

import pytest
import torch

from everstep.errors import UsageError
from everstep.events import StepDone
from everstep.process.page import Phase
from everstep.training.alone import AloneParts, NoKeeper
from everstep.training.run import Run


class Watched(AloneParts):
    """Parts that remember what was said."""

    def __init__(self):
        super().__init__(0, torch.device("cpu"))
        self.events, self.phases = [], []

    def emit(self, event, *, at_s=None):
        self.events.append(event)

    def enter_phase(self, phase, *more, **named):
        self.phase = phase
        self.phases.append((phase, *more))


@pytest.fixture
def run():
    return Run(Watched(), rank=0, world_size=1, local_rank=0, generation=0)


def test_a_second_loop_is_refused(run):
    assert list(run.steps(3)) == [1, 2, 3]
    with pytest.raises(UsageError, match="twice in one run"):
        run.steps(3)


def test_a_number_of_steps_below_none_is_refused(run):
    with pytest.raises(UsageError, match=r"steps\(-1\)"):
        run.steps(-1)
    assert list(run.steps(0)) == []


def test_steps_end_where_the_loader_has_an_empty_epoch(run):
    with pytest.raises(RuntimeError, match="no batch in a whole epoch"):
        list(run.steps(3, []))


def test_leave_to_pickle_is_handed_on_and_left_out_it_is_not_given(run):
    told = []

    class Asked(NoKeeper):
        def open(self, state, loader, asked):
            told.append((sorted(state), asked.allow_pickle))

    run._parts.keeper = Asked()
    assert list(run.steps(1, allow_pickle=True, box=1)) == [1]
    run = Run(run._parts, rank=0, world_size=1, local_rank=0, generation=0)
    assert list(run.steps(1)) == [1]
    assert told == [(["box"], True), ([], False)]


def test_epochs_roll_over(run):
    assert list(run.steps(5, ["a", "b"])) == [(1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")]


def test_what_a_step_logs_is_that_steps_and_exact(run):
    for step in run.steps(3):
        if step != 2:
            run.log(loss=torch.tensor(step / 3, dtype=torch.float64), other=step)
    done = [e for e in run._parts.events if isinstance(e, StepDone)]
    assert [e.step for e in done] == [1, 2, 3]
    assert [dict(e.values or {}) for e in done] == [{"loss": 1 / 3, "other": 1.0}, {}, {"loss": 1.0, "other": 3.0}]


def test_a_step_is_told_after_its_snapshot_and_where_that_fails_too(run):
    told = []

    class Full(NoKeeper):
        def take(self, step):
            told.append((step, len(run._parts.events)))
            if step == 3:
                raise MemoryError

    run._parts.keeper = Full()
    with pytest.raises(MemoryError):
        list(run.steps(5))
    assert [e.step for e in run._parts.events if isinstance(e, StepDone)] == [1, 2, 3]
    assert told == [(1, 0), (2, 1), (3, 2)]


def test_a_phase_ends_where_it_ends_and_by_an_error_too(run):
    with run.phase("eval", limit=5.0):
        assert run._parts.phase == Phase.DECLARED
    with pytest.raises(ZeroDivisionError), run.paused():
        raise ZeroDivisionError
    assert [phase for phase, *_ in run._parts.phases] == [Phase.DECLARED, Phase.FIRST, Phase.PAUSED, Phase.FIRST]


def test_what_is_kept_is_made_once(run):
    made = []
    for _ in range(2):
        assert run.keep("a test's own", lambda: made.append(1) or "thing") == "thing"
    assert made == [1]
