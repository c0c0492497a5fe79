"""A training job that never ran: the ledger that its processes would have written, on a simulated clock.

For tests of whatever reads a ledger, and for pictures. All ranks do a step together, as collectives make them; every
duration is given, every random choice comes from the seed. It knows nothing of how a ledger is judged.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.events import (
    Arrived,
    Category,
    Event,
    FaultInjected,
    FaultNoticed,
    GenerationStarted,
    ProcessEnded,
    ProcessStarted,
    Record,
    Restored,
    RunEnded,
    RunStarted,
    SpanClosed,
    SpanOpened,
    Stamp,
    StepDone,
    StopBegun,
    TierEvent,
)

AGENT = 100
FIRST_WORKER = 1000
SIGKILL = 9


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    """One fault: in `step`, after `part` of it; a part of 1 is the boundary, when the step is done on all ranks."""

    step: int
    rank: int
    type: str = "exception"  # exception | hang | sigkill
    part: float = 0.5


@dataclass
class SimulatedRun:
    """What the job is like. All times are seconds."""

    ranks: int = 2
    steps: int = 20
    step_s: float = 1.0
    data_s: float = 0.0
    snapshot_s: float = 0.0
    startup_s: float = 2.0
    rebuild_s: float = 0.0
    restore_s: float = 0.0
    notice_s: float = 0.001
    stop_s: float = 0.004
    regroup_s: float = 0.01
    hang_limit_s: float = 3.0
    jitter: float = 0.0  # share by which durations vary
    checkpoint_every: int = 10
    memory_tier: bool = True
    spares: int = 1
    spans: bool = True  # False: workers record steps alone
    injected: bool = True  # False: the faults are nature's
    faults: Sequence[SimulatedFault] = ()
    seed: int = 0
    job: str = "simulated"
    began_mono_s: float = 5000.0
    began_wall_s: float = 1_790_000_000.0
    boot_id: str = "5eed5eed"
    records: list[Record] = field(default_factory=list[Record], init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._now = self.began_mono_s
        self._pids = [FIRST_WORKER + rank for rank in range(self.ranks)]
        self._standby = [FIRST_WORKER + self.ranks + i for i in range(self.spares)]
        self._next_pid = FIRST_WORKER + self.ranks + self.spares
        self._generation = 0
        self._due = sorted(self.faults, key=lambda f: (f.step, f.part))
        self._why = ["started"] * self.ranks

    # ---------------------------------------------------------------------------------------- words

    def _say(self, event: Event, at: float, rank: int | None = None, pid: int | None = None, role: str = "") -> None:
        slot = rank
        pid = pid if pid is not None else (AGENT if rank is None else self._pids[rank])
        role = role or ("agent" if rank is None else "worker")
        generation = None if rank is None else self._generation
        wall = self.began_wall_s + at - self.began_mono_s
        stamp = Stamp(mono_s=at, wall_s=wall, boot_id=self.boot_id, pid=pid, role=role, slot=slot, rank=rank,
                      generation=generation)  # fmt: skip
        self.records.append(Record(stamp, event))

    def _span(self, rank: int, category: Category, start: float, end: float, step: int | None = None) -> None:
        if self.spans and end > start:
            self._say(SpanOpened(category=category.value, step=step), start, rank)
            self._say(SpanClosed(category=category.value), end, rank)

    def _about(self, seconds: float) -> float:
        return seconds * (1 + self.jitter * self._random.uniform(-1, 1))

    def _started(self, name: str, pid: int, at: float, slot: int | None) -> None:
        self._say(ProcessStarted(name=name, child_pid=pid, incarnation=f"{self.boot_id}.{pid}.1", child_slot=slot), at)

    # ---------------------------------------------------------------------------------------- the job

    def run(self) -> list[Record]:
        """Play the job to its end and return its records."""
        self._say(
            RunStarted(job=self.job, argv=("train_llama.py", "--model", "tiny"), world_size=self.ranks,
                       spares=self.spares), self._now,
        )  # fmt: skip
        born = self._now + self.startup_s / 2
        for rank, pid in enumerate(self._pids):
            self._started(f"worker-{rank}", pid, born, rank)
        for i, pid in enumerate(self._standby):
            self._started(f"spare-{self.ranks + i}", pid, born, self.ranks + i)
        self._now += self.startup_s
        done = 0
        source: str | None = None
        while True:
            self._enter(done, source)
            fault, done = self._train(done)
            if fault is None:
                break
            done, source = self._recover(fault, done)
        self._end(done)
        return self.records

    def _enter(self, restored: int, source: str | None) -> None:
        """A roster, and every rank's way from it to its first step."""
        members = tuple((rank, rank, self._pids[rank], self._why[rank]) for rank in range(self.ranks))
        self._say(
            GenerationStarted(epoch=0, number=self._generation, world_size=self.ranks, members=members,
                              restore_step=restored or None, restored_from=source, reason="simulated"), self._now,
        )  # fmt: skip
        start = self._now
        grouped = start + self._about(self.regroup_s)
        ready = grouped
        for rank in range(self.ranks):
            own = start + (0.8 * (grouped - start) if self._why[rank] == "spare" else 0.0)
            self._span(rank, Category.REGROUP, own, grouped)
            built = grouped + self._about(self.rebuild_s)
            whole = built
            if restored:
                whole = built + self._about(self.restore_s)
                self._span(rank, Category.RESTORE, built, whole)
                self._say(Restored(step=restored, tier=source or "memory", bytes=40_000_000, seconds=whole - built),
                          whole, rank)  # fmt: skip
            ready = max(ready, whole)
        self._now = ready

    def _train(self, done: int) -> tuple[SimulatedFault | None, int]:
        """Do steps until a fault is due or all are done; return the fault and the last step done everywhere."""
        while done < self.steps:
            step = done + 1
            fault = self._due[0] if self._due and self._due[0].step <= step else None
            begun = self._now
            waits = [self._about(self.data_s) for _ in range(self.ranks)]
            end = begun + max(waits) + self._about(self.step_s)
            if fault is not None and fault.part < 1:
                self._harm(fault, begun, waits, begun + max(waits) + fault.part * (end - begun - max(waits)))
                return fault, done
            self._step(step, begun, waits, end)
            done = step
            if fault is not None:
                self._harm(fault, begun, waits, self._now)
                return fault, done
        return None, done

    def _step(self, step: int, begun: float, waits: list[float], end: float) -> None:
        snapped = [end + self._about(self.snapshot_s) for _ in range(self.ranks)]
        for rank, wait in enumerate(waits):
            self._span(rank, Category.DATA_WAIT, begun, begun + wait, step)
            self._span(rank, Category.STEP, begun + wait, end, step)
            values = {"loss": self.loss(step) + 0.01 * rank}
            size, took = (20_000_000, self.snapshot_s) if self.memory_tier else (0, 0.0)
            self._say(
                StepDone(step=step, seconds=end - begun - wait, values=values, snapshot_bytes=size, snapshot_s=took),
                end,
                rank,
            )
            self._span(rank, Category.SNAPSHOT, end, snapped[rank], step)
        self._now = max(snapped)
        if self.checkpoint_every and step % self.checkpoint_every == 0:
            event = TierEvent(tier="disk", what="committed", step=step, bytes=160_000_000, seconds=0.8 * self.step_s)
            self._say(event, self._now, pid=FIRST_WORKER - 1, role="writer")

    @staticmethod
    def loss(step: int) -> float:
        """The loss of a step: the same whenever it is done."""
        wobble = math.sin(step * 12.9898) * 43758.5453
        return 2.1 + 3.4 * math.exp(-step / 90) + 0.25 * (wobble - math.floor(wobble) - 0.5)

    def _harm(self, fault: SimulatedFault, begun: float, waits: list[float], at: float) -> None:
        """The step in flight, and the fault in it."""
        if fault.part < 1 and self.spans:
            for rank, wait in enumerate(waits):
                self._span(rank, Category.DATA_WAIT, begun, begun + wait, fault.step)
                self._say(SpanOpened(category=Category.STEP.value, step=fault.step), begun + wait, rank)
        if self.injected:
            position = "boundary" if fault.part == 1 else "forward"
            event = FaultInjected(fault=len(self.faults) - len(self._due), type=fault.type, step=fault.step,
                                  injured_rank=fault.rank, position=position)  # fmt: skip
            self._say(event, at, fault.rank)
        self._now = at

    def _recover(self, fault: SimulatedFault, done: int) -> tuple[int, str | None]:
        """Notice, stop, arrive; return the state that the next generation begins from."""
        self._due.pop(0)
        kind, by = {"exception": ("exception", "worker"), "hang": ("stall", "page"), "sigkill": ("death", "pidfd")}[
            fault.type
        ]
        mark = self._now
        noticed = mark + (self.hang_limit_s if fault.type == "hang" else self._about(self.notice_s))
        if fault.type == "sigkill":
            ended = ProcessEnded(name=f"worker-{fault.rank}", child_pid=self._pids[fault.rank], status=-SIGKILL,
                                 expected=False, child_slot=fault.rank, child_rank=fault.rank)  # fmt: skip
            self._say(ended, mark + (noticed - mark) / 2)
        self._say(
            FaultNoticed(number=self._generation, kind=kind, noticed_by=by, injured_rank=fault.rank, step=done,
                         text=f"{fault.type} by the simulation", last_mark_s=mark if kind != "exception" else None),
            noticed,
        )  # fmt: skip
        stopped = noticed
        for rank in range(self.ranks):
            self._why[rank] = "kept"
            if rank == fault.rank and fault.type == "sigkill":
                continue
            self._say(StopBegun(number=self._generation), noticed + self.stop_s / 4, rank)
            arrived = noticed + self._about(self.stop_s)
            self._say(Arrived(number=self._generation + 1), arrived, rank)
            stopped = max(stopped, arrived)
        self._now = stopped + self._about(self.regroup_s) / 2
        if fault.type == "sigkill":
            self._replace(fault.rank, stopped)
        self._generation += 1
        return self._restorable(done)

    def _replace(self, rank: int, stopped: float) -> None:
        """A spare takes the rank; where none is left, a new process is started and waited for."""
        if self._standby:
            self._pids[rank], self._why[rank] = self._standby.pop(0), "spare"
            pid = self._fresh_pid()
            slot = pid - FIRST_WORKER
            self._standby.append(pid)
            self._started(f"spare-{slot}", pid, self._now + self.startup_s / 10, slot)
            return
        self._pids[rank], self._why[rank] = self._fresh_pid(), "started"
        self._started(f"worker-{rank}", self._pids[rank], stopped, rank)
        self._now = stopped + self.startup_s

    def _fresh_pid(self) -> int:
        self._next_pid += 1
        return self._next_pid

    def _restorable(self, done: int) -> tuple[int, str | None]:
        if self.memory_tier:
            return done, "memory" if done else None
        step = done - done % self.checkpoint_every if self.checkpoint_every else 0
        return step, "disk" if step else None

    def _end(self, done: int) -> None:
        for rank in range(self.ranks):
            self._span(rank, Category.COMPLETION, self._now, self._now + 0.02)
            gone = ProcessEnded(name=f"worker-{rank}", child_pid=self._pids[rank], status=0, expected=True,
                                child_slot=rank, child_rank=rank)  # fmt: skip
            self._say(gone, self._now + 0.05)
        self._say(RunEnded(code=0, reason=f"all {done} steps are done on all {self.ranks} ranks"), self._now + 0.1)

    # ---------------------------------------------------------------------------------------- the folder

    def write(self, folder: Path) -> Path:
        """Play the job if it has not been, write its run folder as its processes would, and return it."""
        if not self.records:
            self.run()
        (folder / "events").mkdir(parents=True, exist_ok=True)
        by_process: dict[str, list[str]] = {}
        for record in self.records:
            by_process.setdefault(f"{record.stamp.role}-{record.stamp.pid}", []).append(record.to_json())
        for name, lines in by_process.items():
            (folder / "events" / f"{name}.jsonl").write_text("\n" + "\n".join(lines))
        return folder


def showcase(seed: int = 42) -> SimulatedRun:
    """A run with four ranks and five faults, one of which falls back to an old checkpoint's worth of steps."""
    return SimulatedRun(
        ranks=4, steps=240, step_s=0.12, data_s=0.006, snapshot_s=0.002, startup_s=3.1, rebuild_s=0.09, restore_s=0.02,
        hang_limit_s=1.4, jitter=0.25, checkpoint_every=50, spares=1, seed=seed,
        faults=[
            SimulatedFault(38, 2, "exception", 0.3), SimulatedFault(71, 1, "sigkill", 0.6),
            SimulatedFault(118, 3, "hang", 0.5), SimulatedFault(160, 0, "sigkill", 0.8),
            SimulatedFault(203, 0, "exception", 1.0),
        ],
    )  # fmt: skip
