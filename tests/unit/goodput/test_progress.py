"""The live display: what it says, and that nothing holds up the agent."""

import os
import re
from dataclasses import replace

import pytest

from everstep.events import FaultNoticed, GenerationStarted, Notice, ProcessEnded, Record, RunStarted, Stamp
from everstep.goodput.progress import LATE_S, Progress


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            continue


def told(read):
    try:
        return os.read(read, 1 << 20).decode()
    except BlockingIOError:
        return ""


def event(at, what):
    return Record(Stamp(mono_s=at, wall_s=at, boot_id="a", pid=1, role="agent"), what)


STARTED = RunStarted(job="j", argv=(), world_size=2, spares=1)


def roster(number, why="kept", restore=None, source=None, allowed=None):
    return GenerationStarted(
        epoch=0, number=number, world_size=2, members=((0, 0, 10, "kept"), (1, 1, 11, why)), restore_step=restore,
        restored_from=source, allowed=allowed,
    )  # fmt: skip


def play(progress):
    progress.write(event(0.0, STARTED))
    progress.write(event(2.0, roster(0)))
    progress.begun(0, 100, 2.0)
    for step in range(1, 41):
        progress.progress(step, 5.0 - step / 20, 0.2, 2.0 + step * 0.25)
    progress.write(event(12.30, ProcessEnded(name="worker-1", child_pid=11, status=-9, expected=False, child_rank=1)))
    progress.write(event(12.30, FaultNoticed(number=0, kind="death", noticed_by="pidfd", injured_rank=1, step=40)))
    assert progress.awaited == 41
    progress.write(event(12.38, roster(1, "spare", 40, "memory")))
    progress.begun(40, 100, 12.40)
    progress.came(0, 41, 12.63)
    progress.came(1, 41, 12.65)
    assert progress.awaited is None
    for step in range(41, 61):
        progress.progress(step, 3.0, 0.2, 12.40 + (step - 40) * 0.25)


def test_plain_lines_where_there_is_no_terminal(pipe):
    read, write = pipe
    progress = Progress(write, terminal=False)
    play(progress)
    progress.close(18.0)
    lines = told(read).splitlines()
    fault = (
        "step 41: rank 1 killed (SIGKILL); a spare took over, state from memory, first new step 0.35 s after the fault"
    )
    assert f"everstep: {fault}, 0 steps lost" in lines
    status = [line for line in lines if "/100" in line]
    assert len(status) <= 5  # one in five seconds, and the last
    assert status[-1] == "everstep: step 60/100, loss 3.0000, 4.0 steps/s, goodput 67 %, 1 fault survived"
    assert "\x1b" not in "".join(lines)


def test_a_bar_where_there_is_one(pipe):
    read, write = pipe
    progress = Progress(write, terminal=True, width=100)
    play(progress)
    progress.close(18.0)
    text = told(read)
    assert "step 60/100" in text
    assert "killed (SIGKILL)" in text
    assert "\x1b[2K" in text
    assert text.rstrip().endswith("\x1b[?25h")


@pytest.mark.sample(40)
@pytest.mark.parametrize("width", range(12, 130))
def test_the_bar_stays_on_one_line(pipe, width):
    read, write = pipe
    progress = Progress(write, terminal=True, width=width)
    play(progress)
    told(read)
    progress.tick(100.0)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", told(read))
    assert "\n" not in shown.rstrip("\n")
    assert shown.startswith("step 60/100"[: width - 1])
    assert len(shown) < width
    assert ("1 fault survived" in shown) == (width > 71)
    assert "━" in shown or width < 81


@pytest.mark.parametrize(
    ("notice", "why", "line"),
    [
        (FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=1, step=6, text="at\nKeyError: 3"),
         "kept", "step 7: rank 1 raised an exception (KeyError: 3); every process kept, {back} 0.50 s after the fault, "
         "6 steps lost"),
        (FaultNoticed(number=0, kind="stall", noticed_by="page", injured_rank=1, step=6, last_mark_s=1.5),
         "kept", "step 7: rank 1 made no progress for 3.50 s; every process kept, {back} 4.00 s after the fault, "
         "6 steps lost"),
        (FaultNoticed(number=0, kind="wedged", noticed_by="page", injured_rank=1, step=None),
         "spare", "step 1: rank 1 could not be reached and was killed; a spare took over, {back} 0.50 s after the "
         "fault, 0 steps lost"),
        (FaultNoticed(number=0, kind="death", noticed_by="pidfd", injured_rank=1, step=6),
         "started", "step 7: rank 1 died; a new process took over, {back} 0.50 s after the fault, 6 steps lost"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("steps", [True, False])
def test_a_line_for_each_kind_of_fault(pipe, notice, why, line, steps):
    """With the first new step where the job tells of steps, else when the ranks are back."""
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.5, STARTED))
    if steps:
        progress.begun(0, 10, 1.0)
        told(read)
    progress.write(event(5.0, notice))
    progress.write(event(5.2 if steps else 5.5, roster(1, why)))
    if steps:
        awaited = progress.awaited
        assert awaited == (notice.step or 0) + 1
        progress.begun(0, 10, 5.3)
        progress.came(0, awaited, 5.5)
        progress.came(1, awaited, 5.4)
    shown = [text for text in told(read).splitlines() if "taken for a hang" not in text]
    back = "first new step" if steps else "ranks entered again"
    assert shown == [f"everstep: {line.format(back=back)}"]


@pytest.mark.parametrize(
    "text", ["section 'save' is open for 9.1 s, idle; limit 9.0 s", "no heartbeat for 3.1 s, idle"]
)
def test_where_a_script_has_given_itself_a_limit_that_is_what_to_raise(pipe, text):
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.5, STARTED))
    hang = FaultNoticed(number=0, kind="stall", noticed_by="page", injured_rank=1, text=text, last_mark_s=1.5)
    progress.write(event(5.0, hang))
    assert f"if it was only slow: a longer timeout of its rank monitor ({text})" in told(read)


def test_a_second_fault_on_the_way_back_lengthens_the_first(pipe):
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, STARTED))
    progress.begun(0, 10, 1.0)
    told(read)
    for at in (5.0, 6.0):
        progress.write(
            event(at, FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=0, step=3, text="e"))
        )
        progress.write(event(at + 0.1, roster(int(at) - 4, "kept", 3, "memory")))
        progress.begun(3, 10, at + 0.2)
        progress.came(0, 4, at + 0.3)  # and rank 1 does not come to it
    progress.came(1, 4, 6.5)
    assert re.findall(r"new step (.*) s after", told(read)) == ["1.50", "0.50"]
    assert progress.survived == 2


@pytest.mark.parametrize("how", ["late", "close", "last step"])
def test_a_new_step_that_does_not_come_is_not_waited_for_in_silence(pipe, how):
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, STARTED))
    progress.begun(0, 10, 1.0)
    done = 10 if how == "last step" else 3
    progress.write(
        event(5.0, FaultNoticed(number=0, kind="death", noticed_by="pidfd", injured_rank=1, step=done, text=""))
    )
    progress.write(event(5.5, roster(1, "spare", done, "memory")))
    if how == "late":
        progress.tick(5.5 + LATE_S - 1)
        assert "took over" not in told(read)
        progress.tick(5.5 + LATE_S)
    elif how == "close":
        progress.close(6.0)
    assert "a spare took over, state from memory, ranks entered again 0.50 s after the fault" in told(read)


def test_the_last_step_that_is_known_stands_before_the_closing_words_and_nothing_after_them(pipe):
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, STARTED))
    progress.begun(0, 40, 1.0)
    progress.progress(1, None, 0.1, 1.1)
    told(read)
    progress.write(
        event(1.3, FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=1, step=6, text="e"))
    )
    progress.write(event(1.4, Notice(text="three faults alike", level="error", closing=True)))
    progress.tick(9.0)
    progress.close(9.0)
    assert told(read).splitlines() == ["everstep: step 6/40, 10.0 steps/s", "everstep: three faults alike"]


def test_a_healthy_slow_step_has_a_remedy_that_is_told_once(pipe):
    read, write = pipe
    progress = Progress(write, terminal=False)
    for at in (5.0, 15.0):
        progress.write(
            event(at, FaultNoticed(number=0, kind="stall", noticed_by="page", injured_rank=1, last_mark_s=at - 3.5))
        )
    line = told(read)
    assert line.count("\n") == 1
    assert "rank 1 made no progress for 3.50 s" in line
    assert all(way in line for way in ('run.phase("name")', "run.paused()", "--soft-timeout"))


def test_a_peer_s_complaint_does_not_hide_the_death(pipe):
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(
        event(5.0, FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=0, step=3, text="reset"))
    )
    progress.write(event(5.1, ProcessEnded(name="w", child_pid=11, status=-11, expected=False, child_rank=1)))
    progress.write(event(5.1, FaultNoticed(number=0, kind="death", noticed_by="pidfd", injured_rank=1, step=3)))
    progress.write(event(5.4, roster(1, "spare", 3)))
    assert told(read) == (
        "everstep: step 4: rank 1 killed (SIGSEGV); a spare took over, ranks entered again 0.40 s after the fault, "
        "0 steps lost\n"
    )


def test_notices_are_shown(pipe):
    read, write = pipe
    Progress(write, terminal=False).write(event(1.0, Notice(text="limits learned: 3.2 s")))
    assert told(read) == "everstep: limits learned: 3.2 s\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_pipe_that_nobody_empties_never_blocks_and_keeps_memory_bounded(pipe, terminal):
    """A write into a full pipe would wait for ever here; the test's own time limit would end it."""
    read, write = pipe
    progress = Progress(write, terminal=terminal, width=100)
    progress.begun(0, 120, 0.0)
    for at in range(120):
        progress.progress(at, 1.0, 0.1, at * 6.0)
        progress.say("x" * 2000)
    assert 0 < progress.out.backlog <= 64 * 1024
    assert len(told(read)) > 0
    progress.tick(1e6)
    assert len(told(read)) > 0


def test_a_closed_pipe_ends_the_display_and_nothing_else(pipe):
    read, write = pipe
    os.close(read)
    progress = Progress(write, terminal=False)
    play(progress)
    progress.close(18.0)
    assert progress.out.closed
    assert progress.out.backlog == 0


def test_goodput_counts_a_rolled_back_step_once(pipe):
    _, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, STARTED))
    progress.begun(0, 40, 0.0)
    for step in range(1, 21):
        progress.progress(step, None, 1.0, float(step))
    progress.write(event(20.0, FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=0, step=20)))
    progress.write(event(20.0, roster(1, "kept", 10, "disk")))
    progress.begun(10, 40, 20.0)
    for step in range(11, 41):
        progress.progress(step, None, 1.0, 10.0 + step)
    assert progress.goodput(50.0) == pytest.approx(40 / 50, abs=0.01)


def test_goodput_is_of_steps_alone_and_of_no_few(pipe):
    """Steps of 5 ms between which start-up, waits and faults took seconds are no goodput of 100 %."""
    _, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, STARTED))
    progress.begun(0, 40, 3.0)
    for step in range(1, 4):
        progress.progress(step, None, 0.005, 3.0 + step * 0.7)
        assert progress.goodput(3.0 + step * 0.7) is None
    progress.progress(4, None, 0.005, 6.0)
    assert progress.goodput(6.0) == pytest.approx(4 * 0.005 / 6.0)


def test_of_a_script_without_the_library_no_step_is_told(pipe):
    """A peer's complaint came first; its steps, and what is lost, nobody knows."""
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, RunStarted(job="j", argv=(), world_size=2, spares=0, wrapped=False)))
    progress.write(event(5.0, FaultNoticed(number=0, kind="exception", noticed_by="worker", injured_rank=0)))
    progress.write(event(5.1, ProcessEnded(name="w", child_pid=11, status=-9, expected=False, child_rank=1)))
    progress.write(event(5.1, FaultNoticed(number=0, kind="death", noticed_by="agent node-0", injured_rank=1)))
    progress.write(event(5.4, roster(1, "started")))
    assert told(read) == "everstep: rank 1 killed (SIGKILL); all ranks begin anew after 0.40 s\n"


def test_a_restart_of_so_many_that_are_allowed_says_which_it_is(pipe):
    """LA-12."""
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, RunStarted(job="j", argv=(), world_size=2, spares=0, wrapped=False)))
    progress.write(event(5.0, FaultNoticed(number=1, kind="exception", noticed_by="worker", injured_rank=0)))
    progress.write(event(5.4, roster(2, "started", allowed=3)))
    assert told(read).endswith("all ranks begin anew after 0.40 s (restart 2 of 3)\n")


def test_what_a_stopped_process_cost_is_counted_from_its_last_sign(pipe):
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, STARTED))
    progress.write(event(2.0, roster(0)))
    progress.begun(0, 100, 2.0)
    progress.progress(40, 3.0, 0.2, 12.0)
    wedged = FaultNoticed(number=0, kind="wedged", noticed_by="agent", injured_rank=1, step=40, last_mark_s=12.0)
    progress.write(event(17.0, wedged))
    progress.write(event(17.2, roster(1, "spare", 40, "memory")))
    progress.begun(40, 100, 17.3)
    progress.came(0, 41, 17.5)
    progress.came(1, 41, 17.5)
    progress.close(18.0)
    assert "first new step 5.50 s after the fault, 0 steps lost" in told(read)


def test_what_is_lost_is_not_said_before_nodes_have_agreed(pipe):
    read, write = pipe
    progress = Progress(write, terminal=False)
    progress.write(event(0.0, STARTED))
    progress.write(event(2.0, roster(0)))
    progress.begun(0, 100, 2.0)
    progress.progress(40, 3.0, 0.2, 12.0)
    progress.write(event(12.0, FaultNoticed(number=0, kind="death", noticed_by="agent", injured_rank=1, step=40)))
    progress.write(event(12.2, replace(roster(1, "spare"), decided=False)))
    progress.begun(40, 100, 12.3)
    progress.came(0, 41, 12.5)
    progress.came(1, 41, 12.5)
    progress.close(13.0)
    text = told(read)
    assert "a spare took over, first new step 0.50 s after the fault" in text
    assert "lost" not in text


def test_a_fault_before_the_state_is_restored_is_told_at_the_step_that_it_began_from(pipe):
    read, write = pipe
    progress = Progress(write, terminal=False)
    play(progress)
    progress.write(event(18.0, FaultNoticed(number=1, kind="death", noticed_by="pidfd", injured_rank=1, step=60)))
    progress.write(event(18.1, roster(2, "spare", 60, "memory")))
    progress.write(event(18.2, FaultNoticed(number=2, kind="death", noticed_by="pidfd", injured_rank=0, step=0)))
    progress.write(event(18.3, roster(3, "spare", 60, "memory")))
    progress.begun(60, 100, 18.4)
    progress.came(0, 61, 18.6)
    progress.came(1, 61, 18.6)
    progress.close(19.0)
    text = told(read)
    assert "step 61: rank 0 died" in text
    assert "step 1:" not in text
