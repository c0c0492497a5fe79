"""What `everstep run` shows while a job trains: a bar where stderr is a terminal, plain lines where it is not.

Rule 1: it never holds up the agent. Nothing is written unless the descriptor says that it takes bytes, in small pieces;
what does not fit waits in a short queue, and a frame that is no longer true is dropped, never a line about a fault.
Rule 2: it has no thread and no clock. The agent feeds it and calls `tick`; time comes as an argument.
Rule 3: a closed pipe ends the display, not the job.
The goodput shown is a running estimate (retained steps x median time of rank 0's steps / time so far), and none while
few steps are known; the report's is exact. A fault's line comes with the first new step after it on all ranks and says
how long after the fault that was; where none comes for a while, or steps are not told of, when the ranks were back.
"""

import os
import select
import signal
from collections import deque
from dataclasses import dataclass
from io import StringIO
from statistics import median

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from everstep.events import FaultNoticed, GenerationStarted, Notice, ProcessEnded, Record, RunEnded, RunStarted
from everstep.goodput.core import words

FRAME_S = 0.25
PLAIN_S = 5.0
PIECE = 512
QUEUE_BYTES = 64 * 1024
SAMPLES = 512
FEWEST = 4
"""Step times that a goodput is estimated from, at least: the first ones are longer than the rest."""
LATE_S = 20.0
"""So long a fault's line waits for the first new step."""
BAR = 28
BAR_LEAST = 8


class Outlet:
    """Bytes to a descriptor, only as fast as it takes them; after an error, nowhere."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._waiting: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def backlog(self) -> int:
        """Bytes that wait."""
        return sum(len(piece) for piece in self._waiting)

    def put(self, text: str) -> None:
        """Queue text and write what can be written now; text beyond the queue's limit is dropped."""
        data = text.encode(errors="replace")
        if not self.closed and self.backlog + len(data) <= QUEUE_BYTES:
            self._waiting.extend(data[i : i + PIECE] for i in range(0, len(data), PIECE))
        self.flush()

    def flush(self) -> None:
        """Write while the descriptor is ready. POLLOUT promises room for a small piece, so the write cannot wait."""
        try:
            while self._waiting and not self.closed:
                ready = self._poll.poll(0)
                if not ready:
                    return
                if not ready[0][1] & select.POLLOUT:
                    self.close()
                    return
                piece = self._waiting.popleft()
                written = os.write(self.fd, piece)
                if written < len(piece):
                    self._waiting.appendleft(piece[written:])
        except OSError:
            self.close()

    def close(self) -> None:
        """Nobody reads any more."""
        self.closed = True
        self._waiting.clear()


@dataclass(slots=True)
class _Fault:
    """A fault whose line has not been told. `at` is its instant as far as the agent knows: for silence its begin."""

    at: float
    kind: str
    rank: int | None
    step: int | None
    text: str
    silent_s: float | None = None
    status: int | None = None
    world_size: int = 0  # before it
    answer: GenerationStarted | None = None  # the roster after it
    entered: float = 0.0


class Progress:
    """A telemetry sink and the display behind it. All calls come on the agent's one thread."""

    def __init__(self, fd: int = 2, *, terminal: bool | None = None, width: int | None = None) -> None:
        self.out = Outlet(fd)
        self.terminal = os.isatty(fd) if terminal is None else terminal
        self.step = 0
        self.total: int | None = None
        self.loss: float | None = None
        self.survived = 0
        self._began: float | None = None
        self._first_step: int | None = None
        self._last: tuple[float, int] | None = None  # of this generation
        self._paces: deque[float] = deque(maxlen=SAMPLES)  # seconds from step to step
        self._step_s: deque[float] = deque(maxlen=SAMPLES)  # of steps alone
        self._floor = 0  # what the present generation began from
        self._faults: list[_Fault] = []
        self._came: dict[int, float] = {}  # when each rank has done the first new step
        self._advised = self._closed = False
        self._ends: dict[int, int] = {}
        self._world = 0
        self.heard_of: int | None = None  # of so many ranks; None: of all
        self._wrapped = True
        self._shown = float("-inf")
        self._code: int | None = None
        self._frame = StringIO()
        self._live: Live | None = None
        if self.terminal:
            console = Console(file=self._frame, force_terminal=True, width=width, highlight=False)
            self._live = Live(
                console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, transient=False
            )

    # ------------------------------------------------------------------------------------ what is fed

    def write(self, record: Record) -> None:
        """Take one of the agent's own events (see telemetry.Sink)."""
        event, now = record.event, record.stamp.mono_s
        match event:
            case RunStarted(world_size=world, wrapped=wrapped):
                self._began, self._world, self._wrapped = now, world, wrapped
            case FaultNoticed():
                self._noticed(event, now)
            case ProcessEnded(child_rank=rank, status=status) if rank is not None:
                self._ended(rank, status)
            case GenerationStarted():
                self._survived(event, now)
            case Notice(text=text, closing=True):
                self.close(now)
                self.say(text)
            case Notice(text=text):
                self.say(text)
            case RunEnded(code=code):
                self._code = code
            case _:
                pass

    def begun(self, step: int, total: int, now: float) -> None:
        """The loop of a generation begins after `step`."""
        self.step, self.total, self._last = step, total, (now, step)
        self._first_step = step if self._first_step is None else min(self._first_step, step)
        self.tick(now)

    def progress(self, step: int, loss: float | None, step_s: float, now: float) -> None:
        """Rank 0 has done `step`, which took `step_s` seconds by itself; called a few times a second at most."""
        if self._last is not None and step > self._last[1] and now > self._last[0]:
            self._paces.append((now - self._last[0]) / (step - self._last[1]))
        self._last = (now, step)
        self._step_s.append(step_s)
        self.step = step
        self.loss = loss if loss is not None else self.loss
        self.tick(now)

    @property
    def awaited(self) -> int | None:
        """The first new step after the faults that are not told yet; None where there is none to wait for."""
        return max(((fault.step or 0) + 1 for fault in self._faults), default=None) if self.total else None

    def came(self, rank: int, step: int, at_s: float) -> None:
        """`rank` has done the step that is awaited, or a later one where that was done before the fault after all."""
        awaited = self.awaited
        if awaited is None or step < awaited or any(fault.answer is None for fault in self._faults):
            return
        self._came[rank] = at_s
        if len(self._came) == (self.heard_of or self._world):
            last = max(self._came.values())
            for fault in self._faults:
                self.say(_told(fault, f"first new step {last - fault.at:.2f} s after the fault"))
            self._faults.clear()

    def say(self, text: str) -> None:
        """Show a sentence above the bar."""
        if self._live is not None and self._live.is_started:
            self._live.console.print(f"everstep: {text}", markup=False, soft_wrap=True)
            self._send(self._take())
        else:
            self._send(f"everstep: {text}\n")

    # ------------------------------------------------------------------------------------ what is shown

    def tick(self, now: float) -> None:
        """Time has passed: show what has changed, if it is due and the terminal keeps up."""
        self.out.flush()
        self._tell_late(now - LATE_S)
        if self._closed or self.out.closed or self.out.backlog or self.total is None:
            return
        if now - self._shown < (FRAME_S if self._live is not None else PLAIN_S):
            return
        self._shown = now
        if self._live is None:
            self._send(f"everstep: {self.status(now)}\n")
            return
        if not self._live.is_started:
            self._live.start()
            self._live.console.show_cursor(True)  # an agent that is killed must not leave a terminal without one
        self._live.update(self._bar(now), refresh=True)
        self._send(self._take())

    def close(self, now: float) -> None:
        """Show the last state and leave the terminal as it was. Once: what is said later stands below it."""
        if self._closed:
            self.out.flush()
            return
        self._tell_late(now)
        self._closed = True
        if self._live is not None and self._live.is_started:
            self._live.update(self._bar(now), refresh=True)
            self._live.stop()
            self._send(self._take())
        elif self.total is not None:
            self._send(f"everstep: {self.status(now)}\n")
        self.out.flush()

    def status(self, now: float) -> str:
        """The line of the moment."""
        total = f"/{self.total}" if self.total else ""
        return ", ".join([f"step {self.step}{total}", *self._figures(now)])

    def _figures(self, now: float) -> list[str]:
        figures: list[str] = []
        if self.loss is not None:
            figures.append(f"loss {self.loss:.4f}")
        pace = self._pace()
        if pace:
            figures.append(f"{1 / pace:.1f} steps/s")
        goodput = self.goodput(now)
        if goodput is not None:
            figures.append(f"goodput {goodput:.0%}".replace("%", " %"))
        if self.survived:
            figures.append(f"{words.count(self.survived, 'fault')} survived")
        return figures

    def _pace(self) -> float | None:
        return median(self._paces) if self._paces else None

    def goodput(self, now: float) -> float | None:
        """Retained steps x median time of a step alone / time since the run began: an estimate."""
        if len(self._step_s) < FEWEST or self._began is None or now <= self._began or self._first_step is None:
            return None
        return min(1.0, (self.step - self._first_step) * median(self._step_s) / (now - self._began))

    def _bar(self, now: float) -> Table:
        """One line, however narrow the terminal is: first the bar gives way, then figures from the end."""
        assert self._live is not None
        step = f"step {self.step}" + (f"/{self.total}" if self.total else "")
        figures = self._figures(now)
        room = self._live.console.width - 1 - len(step)
        while figures and len(" · ".join(figures)) + 1 > room:
            figures.pop()
        text = " · ".join(figures)
        room -= len(text) + 2
        cells: list[str | ProgressBar] = [step, text] if text else [step]
        if room >= BAR_LEAST:
            total = float(self.total) if self.total else None
            cells.insert(1, ProgressBar(total=total, completed=float(self.step), width=min(BAR, room), pulse=False))
        table = Table.grid(padding=(0, 1), expand=False)
        for _ in cells:
            table.add_column(no_wrap=True)
        table.add_row(*cells)
        return table

    def _take(self) -> str:
        text = self._frame.getvalue()
        self._frame.seek(0)
        self._frame.truncate()
        return text

    def _send(self, text: str) -> None:
        self.out.put(text)

    # ------------------------------------------------------------------------------------ faults

    def _noticed(self, event: FaultNoticed, now: float) -> None:
        silent_s = None if event.last_mark_s is None else now - event.last_mark_s
        if event.kind == "stall":
            self._advise(event, silent_s)
        if self.total is not None:
            self.step = max(self.step, event.step or 0)
        step = event.step if self.total is None else max(event.step or 0, self._floor)  # it may not have restored yet
        fault = _Fault(now, event.kind, event.injured_rank, step, event.text, silent_s, world_size=self._world)
        if event.kind in ("stall", "wedged") and event.last_mark_s is not None:
            fault.at = event.last_mark_s
        open_ones = [known for known in self._faults if known.answer is None]
        if open_ones and event.kind == "exception":
            return  # a peer's complaint about the same fault
        if open_ones:  # a death seen later names the cause better
            fault.at = min(fault.at, open_ones[0].at)
            self._faults.remove(open_ones[0])
        if event.injured_rank is not None:
            fault.status = self._ends.pop(event.injured_rank, None)
        self._faults.append(fault)

    def _ended(self, rank: int, status: int) -> None:
        for fault in self._faults:
            if fault.rank == rank and fault.answer is None:
                fault.status = status
                return
        self._ends[rank] = status

    def _survived(self, event: GenerationStarted, now: float) -> None:
        self._world, self._last = event.world_size, None
        self._came.clear()
        self._ends.clear()
        for fault in [known for known in self._faults if known.answer is None]:
            self.survived += 1
            fault.answer, fault.entered = event, now
            if self.total is None or (fault.step or 0) >= self.total:  # no step comes, or we are not told
                self._tell_entered(fault)
        if event.number and self.total is not None and event.decided:
            self.step = self._floor = event.restore_step or 0

    def _tell_late(self, entered_before: float) -> None:
        for fault in [known for known in self._faults if known.answer is not None]:
            if fault.entered <= entered_before:
                self._tell_entered(fault)

    def _tell_entered(self, fault: _Fault) -> None:
        self._faults.remove(fault)
        back = f"{fault.entered - fault.at:.2f} s"
        entered = f"ranks entered again {back} after the fault"
        self.say(_told(fault, entered) if self._wrapped else _of_script(fault, back))

    def _advise(self, event: FaultNoticed, silent_s: float | None) -> None:
        """Once a job: what to do where it was no hang."""
        if self._advised:
            return
        self._advised = True
        rank = "a rank" if event.injured_rank is None else f"rank {event.injured_rank}"
        mend = 'run.phase("name") or run.paused() around it, or a longer --soft-timeout'
        if event.text.startswith(_OF_A_MONITOR):
            mend = f"a longer timeout of its rank monitor ({event.text})"
        self.say(f"{rank} made no progress{_for(silent_s)}, which is taken for a hang; if it was only slow: {mend}")


_OF_A_MONITOR = ("no heartbeat", "no first heartbeat", "no section", "section ")
"""How a fault is told that a script's own rank monitor has named."""


def _told(fault: _Fault, back: str) -> str:
    """One line about a fault and what it cost: step 41: rank 1 killed (SIGKILL); a spare took over, …"""
    event = fault.answer
    assert event is not None
    rank = "a rank" if fault.rank is None else f"rank {fault.rank}"
    why = next((why for member, _, _, why in event.members if member == fault.rank), "kept")
    all_kept = all(why == "kept" for _, _, _, why in event.members)
    kept = f"{'every process' if all_kept else 'its process'} kept"
    how = {"kept": kept, "spare": "a spare took over"}.get(why, "a new process took over")
    if event.world_size < fault.world_size:
        how = f"no replacement came, {words.count(event.world_size, 'rank')} go on"
    step = f"step {(fault.step or 0) + 1}"  # the one in flight
    lost = max(0, (fault.step or 0) - (event.restore_step or 0))
    source = f", state from {event.restored_from}" if event.restored_from else ""
    cost = f", {words.count(lost, 'step')} lost" if event.decided else ""  # else nodes have still to agree
    return f"{step}: {rank} {_what(fault)}; {how}{source}, {back}{cost}{_which(event)}"


def _of_script(fault: _Fault, back: str) -> str:
    """The same of a script without the library, whose steps nobody knows."""
    rank = "a rank" if fault.rank is None else f"rank {fault.rank}"
    which = "" if fault.answer is None else _which(fault.answer)
    return f"{rank} {_what(fault)}; all ranks begin anew after {back}{which}"


def _which(event: GenerationStarted) -> str:
    return "" if event.allowed is None else f" (restart {event.number} of {event.allowed})"


def _what(fault: _Fault) -> str:
    if fault.kind == "death" and "lack of memory" in fault.text:
        return f"was {fault.text.partition(': it has')[0]}"
    if fault.kind == "death" and fault.status is not None and fault.status < 0:
        return f"killed ({_signal(-fault.status)})"
    if fault.kind == "death" and fault.status is not None:
        return f"ended with code {fault.status}"
    name = {
        "exception": "raised an exception", "death": "died", "stall": f"made no progress{_for(fault.silent_s)}",
        "wedged": "could not be reached and was killed", "left": "left",
    }.get(fault.kind, fault.kind)  # fmt: skip
    text = fault.text.strip().splitlines()
    return f"{name} ({text[-1][:80]})" if text and fault.kind == "exception" else name


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {words.seconds(seconds)}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
