"""What a loop paid for its checkpoints: loops that are reckoned instead of run, of which the right answer is known."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.experiments.core import checkpoints
from everstep.experiments.core.checkpoints import (
    LABELS,
    MODES,
    Window,
    rate,
    row,
    size,
    slowest,
    stretch,
    verdict,
    word,
)

STEP, WRITE, COPY = 0.1, 1.0, 0.001


class Reckoned:
    """A loop whose every step, copy and write takes just so long. `way`: sync | wait | coalesce | never."""

    def __init__(self, way, interval, write, copy, step):
        self.way, self.interval, self.write, self.copy, self.step_s = way, interval, write, copy, step
        self.now, self.number, self.free_at = 2 * (write + copy), 3 * interval - 1, 0.0
        self.ends, self.saves, self.waiting = [], [], None
        self.durable = [(interval, write), (2 * interval, 2 * write)]

    def step(self):
        self.number, self.now = self.number + 1, self.now + self.step_s
        self.disk()

    def save(self):
        begun = self.now
        if self.way == "sync":
            self.now += self.write
            self.durable.append((self.number, self.now))
        elif self.way == "wait":
            self.now = max(self.now, self.free_at) + self.copy
            self.begin_write(self.number)
        else:
            self.now, self.waiting = self.now + self.copy, self.number
        self.saves.append((self.number, begun, self.now))
        self.disk()

    def disk(self):
        if self.way == "coalesce" and self.waiting is not None and self.now >= self.free_at:
            self.begin_write(self.waiting)
            self.waiting = None

    def begin_write(self, number):
        self.free_at = self.now + self.write
        self.durable.append((number, self.free_at))

    def run(self, least_s):
        self.step()
        self.save()
        opened = self.now
        while True:
            self.step()
            self.ends.append((self.number, self.now))
            if self.number % self.interval == 0:
                self.save()
                if self.now - opened >= least_s:
                    return


def loop(way, interval, least_s=6.0, *, write=WRITE, copy=COPY, step=STEP):
    made = Reckoned(way, interval, write, copy, step)
    made.run(least_s)
    return Window(
        bare=((10, 10 * step), (10, 10 * step)), before=((interval, 0.0), (2 * interval, write + copy)),
        ends=tuple(made.ends), saves=tuple(made.saves), durable=tuple(made.durable), write_s=write + copy, copy_s=copy,
        holds=(made.durable[-1][0],), claimed=made.durable[-1][0],
    )  # fmt: skip


@given(st.sampled_from([1, 3, 10, 40, 100]), st.floats(0.01, 3.0))
def test_a_save_that_is_waited_for_costs_its_write_in_each_interval(interval, write):
    found = row("torch.save", interval, [loop("sync", interval, write=write)], "done")
    free = interval * STEP
    assert found["efficiency"] == pytest.approx(free / (free + write))
    assert found["achieved"] in (interval, None)
    assert found["age_steps"] == interval
    assert found["whole"]


@given(st.sampled_from([1, 3, 10, 40, 100]), st.floats(0.01, 3.0))
def test_a_save_that_waits_for_the_one_before_costs_what_the_interval_does_not_hide(interval, write):
    found = row("dcp.async_save-thread", interval, [loop("wait", interval, write=write)], "done")
    free = interval * STEP
    assert found["efficiency"] == pytest.approx(free / (max(free, write) + COPY), rel=1e-6)
    assert found["step_s"] == pytest.approx(STEP)


@given(st.sampled_from([1, 3, 10, 40, 100]), st.floats(0.01, 3.0), st.floats(0.0, 0.01))
def test_a_saver_that_coalesces_keeps_the_budget_at_every_interval_and_speed(interval, write, copy):
    window = loop("coalesce", interval, max(6.0, 4 * write), write=write, copy=copy)
    found = row("everstep", interval, [window], "done")
    assert found["efficiency"] == pytest.approx(interval * STEP / (interval * STEP + copy))
    assert found["age_s"] <= found["age_budget_s"] + STEP + copy  # the disk of this model is looked at once a step
    if found["age_s"] <= found["age_budget_s"]:
        assert verdict(found)[0]


def test_the_achieved_interval_is_that_of_what_became_durable():
    assert row("everstep", 1, [loop("coalesce", 1)], "done")["achieved"] == pytest.approx(10, abs=1)
    assert row("everstep", 20, [loop("coalesce", 20)], "done")["achieved"] == 20


def test_what_is_durable_after_the_window_counts_only_where_nothing_else_does():
    window = loop("wait", 3)
    late = (window.saves[-1][0], window.end_s + 9)
    assert late[0] not in window.seen_durable()
    alone = dataclasses.replace(window, durable=(*window.durable[:3], late))
    assert alone.seen_durable() == [window.saves[0][0], late[0]]


def test_a_saver_that_skips_everything_is_found_out_by_its_age():
    found = row("everstep-skip", 1, [loop("never", 1)], "done")
    assert found["efficiency"] > 0.98
    kept, why = verdict(found)
    assert not kept
    assert "the newest durable one" in why


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"holds": (8, 9), "claimed": 8}, "the checkpoint of step 8 holds state of step 8 and 9"),
        ({"holds": (7,), "claimed": 8}, "the checkpoint of step 8 holds state of step 7"),
        ({"holds": (), "claimed": 8}, "step 8 was said to be durable and cannot be read"),
        ({"holds": (), "claimed": None}, "nothing was durable"),
        ({"durable": ()}, "nothing was durable"),
    ],
)
def test_a_checkpoint_that_is_none_is_missed_however_fast_it_was(change, said):
    found = row("everstep", 1, [dataclasses.replace(loop("coalesce", 1), **change)], "done")
    kept, why = verdict(found)
    assert not kept
    assert said in why


def test_a_slow_copy_is_allowed_on_the_cpu_and_not_on_cuda():
    found = row("everstep", 1, [loop("coalesce", 1, copy=0.02)], "done")
    assert verdict(found)[0]
    assert not verdict(found, "cuda")[0]
    slower = row("everstep", 1, [dataclasses.replace(loop("coalesce", 1, copy=0.02), copy_s=0.001)], "done")
    assert "promised 98.50%" in verdict(slower)[1]


def test_windows_of_several_rounds_are_one_row():
    fast, slow = loop("coalesce", 1), loop("sync", 1)
    found = row("everstep", 1, [fast, slow], "done")
    assert (found["windows"], found["steps"]) == (2, len(fast.ends) + len(slow.ends))
    assert found["efficiencies"][0] > 0.98 > 0.1 > found["efficiencies"][1]
    assert found["blocked_s"] == pytest.approx(found["wall_s"] * (1 - found["efficiency"]))


def test_of_several_ranks_the_slowest_is_the_row_and_what_the_last_saw_durable_its_age():
    fast, slow = loop("coalesce", 1), loop("wait", 1)
    late = dataclasses.replace(fast, durable=tuple((step, at + 0.5) for step, at in fast.durable))
    found = row("everstep", 1, [slowest([fast, late])], "done")
    assert found["efficiency"] == pytest.approx(row("everstep", 1, [fast], "done")["efficiency"])
    assert found["age_s"] == pytest.approx(row("everstep", 1, [late], "done")["age_s"])
    assert found["age_s"] > row("everstep", 1, [fast], "done")["age_s"]
    for ranks in ([fast, slow], [slow, fast]):
        assert slowest(ranks).saves == slow.saves
    lost = dataclasses.replace(fast, durable=fast.durable[:3])
    assert slowest([fast, lost]).durable == fast.durable[:3], "what one rank has not is no checkpoint of the job"
    assert slowest([fast]) == fast


@pytest.mark.parametrize(
    ("of_one", "said"),
    [
        ({"holds": (7,)}, "holds state of step 7 and"),
        ({"holds": ()}, "cannot be read"),
        ({"claimed": None, "holds": ()}, "nothing was durable"),
    ],
)
def test_a_checkpoint_that_is_none_on_one_rank_is_none(of_one, said):
    good = loop("coalesce", 1)
    for ranks in ([good, dataclasses.replace(good, **of_one)], [dataclasses.replace(good, **of_one), good]):
        found = row("everstep", 1, [slowest(ranks)], "done")
        assert not found["whole"]
        assert said in found["holds"]


def test_a_row_without_figures_has_all_keys_and_says_why():
    found = row("nvrx", 1, [], "needs CUDA")
    assert set(found) == set(row("nvrx", 1, [loop("wait", 1)], "done"))
    assert found["efficiency"] is None
    assert verdict(found) is None
    assert verdict(row("everstep", 1, [], "no end within 9 s")) == (False, "no figure: no end within 9 s")
    assert verdict(row("everstep-block", 1, [loop("wait", 1)], "done")) is None


def test_a_window_is_the_same_after_json():
    window = loop("wait", 3)
    assert Window.from_json(json.loads(json.dumps(dataclasses.asdict(window)))) == window


@pytest.mark.parametrize(
    ("text", "found"),
    [("64MB", 64_000_000), ("1.5GiB", 3 << 29), ("10 kB", 10_000), ("10KB", 10_000), ("7", 7), ("7B", 7)],
)
def test_sizes_are_read_as_they_are_meant(text, found):
    assert size(text) == found


@pytest.mark.parametrize(("text", "found"), [("64kB/s", 64_000), ("10MB/s", 10_000_000), ("1GiB", 1 << 30)])
def test_bandwidths_too(text, found):
    assert rate(text) == found


@pytest.mark.parametrize("text", ["1B/s", "7", "63kB/s"])
def test_a_bandwidth_at_which_one_write_lasts_is_refused(text):
    with pytest.raises(ValueError, match="64kB/s or more"):
        rate(text)


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "0", "10mb", "10 XB", "1e9", "10MB/s", "nan", "10Mbit"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="give a size as"):
        size(text)


def test_a_bandwidth_may_be_unlimited():
    assert rate("unlimited") is None
    with pytest.raises(ValueError, match="or unlimited"):
        rate("fast")


def test_a_loop_is_looked_at_for_four_writes_or_as_long_as_was_said():
    assert stretch(64_000_000, 10_000_000, 0.05)[0] == pytest.approx(25.6)
    assert stretch(64_000_000, None, 0.05)[0] == 2.0
    assert stretch(64_000_000, 10_000_000, 0.05, 3.0) == (3.0, 1.0)
    assert stretch(64_000_000, 10_000_000, 0.01, 0.3) == (0.3, 0.3)
    assert checkpoints.estimate(2, [1, 10], 3, 0.05, 1000, None) == pytest.approx(
        3 * checkpoints.estimate(2, [1, 10], 1, 0.05, 1000, None)
    )


def test_a_word_says_why_there_is_no_figure():
    assert word("nvrx", "AssertionError: Torch not compiled with CUDA enabled") == "needs CUDA"
    assert word("nvrx", "RuntimeError: Found no NVIDIA driver on your system") == "needs CUDA"
    assert word("dcp.save", "RuntimeError: no CUDA") == "RuntimeError: no CUDA"
    assert word("dcp.save", "") == "it ended without a word"
    assert set(LABELS) == set(MODES)
