"""What `everstep run` shows while a job trains: a bar where stderr is a terminal, plain lines where it is not.

Rule 1: it never holds up the agent. Nothing is written unless the descriptor says that it takes bytes, in small pieces;
what does not fit waits in a short queue, and a frame that is no longer true is dropped, never a line about a fault.
Rule 2: it has no thread and no clock. The agent feeds it and calls `tick`; time comes as an argument.
Rule 3: a closed pipe ends the display, not the job.
The goodput shown is a running estimate (retained steps x median step time so far / time so far); the report's is exact.
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
    """A fault that has not been answered by a roster yet."""

    at: float
    kind: str
    rank: int | None
    step: int | None
    text: str
    silent_s: float | None = None
    status: int | None = None


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
        self._last: tuple[float, int] | None = None
        self._paces: deque[float] = deque(maxlen=SAMPLES)
        self._faults: list[_Fault] = []
        self._ends: dict[int, int] = {}
        self._world = 0
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
            case RunStarted(world_size=world):
                self._began, self._world = now, world
            case FaultNoticed():
                self._noticed(event, now)
            case ProcessEnded(child_rank=rank, status=status) if rank is not None:
                self._ended(rank, status)
            case GenerationStarted():
                self._survived(event, now)
            case Notice(text=text):
                self.say(text)
            case RunEnded(code=code):
                self._code = code
            case _:
                pass

    def progress(self, step: int, total: int | None, loss: float | None, now: float) -> None:
        """A worker has done `step` of `total`; called a few times a second at most."""
        if self._last is not None and step > self._last[1] and now > self._last[0]:
            self._paces.append((now - self._last[0]) / (step - self._last[1]))
        if self._first_step is None:
            self._first_step = step - 1 if self._last is None else self._last[1]
        if self._last is None or step != self._last[1]:
            self._last = (now, step)
        self.step, self.total = step, total if total is not None else self.total
        self.loss = loss if loss is not None else self.loss
        self.tick(now)

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
        if self.out.closed or self.out.backlog or self._last is None:
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
        """Show the last state and leave the terminal as it was."""
        if self._live is not None and self._live.is_started:
            self._live.update(self._bar(now), refresh=True)
            self._live.stop()
            self._send(self._take())
        elif self._last is not None:
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
        """Retained steps x median step time / time since the run began: an estimate."""
        pace = self._pace()
        if pace is None or self._began is None or now <= self._began or self._first_step is None:
            return None
        return min(1.0, (self.step - self._first_step) * pace / (now - self._began))

    def _bar(self, now: float) -> Table:
        table = Table.grid(padding=(0, 1), expand=False)
        done = float(self.step)
        bar = ProgressBar(total=float(self.total) if self.total else None, completed=done, width=28, pulse=False)
        total = f"/{self.total}" if self.total else ""
        table.add_row(f"step {self.step}{total}", bar, " · ".join(self._figures(now)))
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
        fault = _Fault(now, event.kind, event.injured_rank, event.step, event.text, silent_s)
        if self._faults and event.kind == "exception":
            return  # a peer's complaint about the same fault
        if self._faults:  # a death seen later names the cause better
            fault.at = self._faults[0].at
            self._faults.clear()
        if event.injured_rank is not None:
            fault.status = self._ends.pop(event.injured_rank, None)
        self._faults.append(fault)

    def _ended(self, rank: int, status: int) -> None:
        for fault in self._faults:
            if fault.rank == rank:
                fault.status = status
                return
        self._ends[rank] = status

    def _survived(self, event: GenerationStarted, now: float) -> None:
        for fault in self._faults:
            self.survived += 1
            self.say(_told(fault, event, now))
        self._faults.clear()
        self._ends.clear()
        if event.number and self._last is not None:
            self.step = event.restore_step or 0
            self._last = None if event.restore_step is None else (now, event.restore_step)
            self._first_step = 0 if self._first_step is None else min(self._first_step, self.step)


def _told(fault: _Fault, event: GenerationStarted, now: float) -> str:
    """One line about a fault and what it cost: step 41: rank 1 killed (SIGKILL); a spare took over in 0.08 s, …"""
    rank = "a rank" if fault.rank is None else f"rank {fault.rank}"
    why = next((why for member, _, _, why in event.members if member == fault.rank), "kept")
    all_kept = all(why == "kept" for _, _, _, why in event.members)
    kept = f"{'every process' if all_kept else 'its process'} kept, on after"
    how = {"kept": kept, "spare": "a spare took over in"}.get(why, "a new process took over in")
    step = f"step {(fault.step or 0) + 1}"  # the one in flight
    lost = max(0, (fault.step or 0) - (event.restore_step or 0))
    source = f" from {event.restored_from}" if event.restored_from else ""
    return f"{step}: {rank} {_what(fault)}; {how} {now - fault.at:.2f} s{source}, {words.count(lost, 'step')} lost"


def _what(fault: _Fault) -> str:
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
