"""`RankMonitorClient`: heartbeats and sections of a script, judged by its agent, under NVRx's names.

A heartbeat is a store into memory that the agent reads: nothing is sent, and no answer is waited for. A method may be
called on any thread, by one thread at a time. What is said belongs to a generation: where a wrapped function is begun
anew in the same process, the first call in the new one begins anew too: sections that the fault left open are closed.
"""

import logging
import os
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from everstep import environ
from everstep.clock import SYSTEM, Clock
from everstep.fault_tolerance import access
from everstep.fault_tolerance.access import RankMonitorClientError as RankMonitorClientError
from everstep.fault_tolerance.config import FaultToleranceConfig, limit
from everstep.fault_tolerance.core.timeouts import Seen
from everstep.fault_tolerance.data import HeartbeatTimeouts, RankInfo, SectionTimeouts, WorkloadAction
from everstep.fault_tolerance.data import WorkloadControlRequest as WorkloadControlRequest
from everstep.process.monitor import MOST_SECTIONS, Monitor
from everstep.process.page import Page

STEP, WARMUP = "step", "warmup"
"""NVRx HEAD's sections with a meaning: while a rank warms up, the limit of "warmup" holds for its steps."""


class RankMonitorClient:
    """Tells the agent of this rank that it is alive. One at a time a process."""

    CURRENT_TIMEOUTS_STATE_KEY: ClassVar[str] = "current_timeouts"

    def __init__(self, *, page: Page | None = None, clock: Clock = SYSTEM) -> None:
        """`page`, `clock`: for tests; a script leaves them out."""
        self.is_initialized = False
        self.rank_info: RankInfo | None = None
        self.cfg: FaultToleranceConfig | None = None
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self.section_timeouts: SectionTimeouts | None = None
        self.loaded_hb_timeouts: HeartbeatTimeouts | None = None
        self.loaded_section_timeouts: SectionTimeouts | None = None
        self.logger = logging.getLogger("RankMonitorClient")
        self._given, self._clock = page, clock
        self._now = clock.now
        self._generation = -1
        self._warmup = self._steps = 0

    # -- begin and end ---------------------------------------------------------------------------------------------

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Begin to be watched. From here on the initial and the out-of-section timeouts count.

        `num_warmup_iters`: so many openings of the section "step" have the limit of "warmup", where both are
        configured. RankMonitorClientError where this process is watched already, or where no agent watches it;
        RuntimeError where it has no rank.
        """
        if self.is_initialized:
            raise RankMonitorClientError("this RankMonitorClient is initialized already; shut it down first.")
        page = self._given or access.page()
        info = RankInfo.get_for_current_rank()
        cfg = access.settings()
        names = list(cfg.rank_section_timeouts)
        if len(names) > MOST_SECTIONS:
            raise RankMonitorClientError(
                f"{len(names)} sections are configured; {MOST_SECTIONS} at most can be watched."
            )
        access.take(page, self)
        self.rank_info, self.cfg, self._page, self._monitor = info, cfg, page, page.monitor
        self.logger.setLevel(cfg.log_level)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._warmup = cfg.num_warmup_iterations if num_warmup_iters is None else num_warmup_iters
        self._warmup *= STEP in names and cfg.rank_section_timeouts.get(WARMUP) is not None
        self._seen = Seen(names, self._now())
        self.hb_timeouts = HeartbeatTimeouts(cfg.initial_rank_heartbeat_timeout, cfg.rank_heartbeat_timeout, False)
        self.section_timeouts = SectionTimeouts(dict(cfg.rank_section_timeouts), cfg.rank_out_of_section_timeout)
        self._use_loaded()
        self._monitor.listen(access.listen(page))
        self._begin()
        self.is_initialized = True
        self._let_go = weakref.finalize(self, access.let_go, page)

    def _begin(self) -> None:
        """Watching begins in this generation."""
        now = self._now()
        self._generation = self._page.generation
        self._steps = 0
        self._seen.begin(now)
        self._monitor.begin(self._generation, os.getpid(), list(self._numbers), now)
        self._set()

    def shutdown_workload_monitoring(self) -> None:
        """Watching ends; nothing where it has not begun."""
        if self.is_initialized:
            self.is_initialized = False
            self._let_go()

    def _ready(self) -> Monitor:
        if not self.is_initialized:
            raise RankMonitorClientError(
                "this RankMonitorClient is not initialized: call init_workload_monitoring() first."
            )
        if self._page.generation != self._generation:
            self._begin()
        return self._monitor

    # -- signs of life ---------------------------------------------------------------------------------------------

    def send_heartbeat(self) -> None:
        """Tell that this rank makes progress; less than a microsecond, and never waits."""
        monitor, now = self._ready(), self._now()
        monitor.beat(self._seen.beat(now), now)

    def start_section(self, section: str) -> None:
        """Open a section that is configured and not open. Sections may overlap in any way."""
        monitor, number, now = self._ready(), self._number(section), self._now()
        if section in self._seen.open:
            raise RankMonitorClientError(f"section {section!r} is open already: end it before it is started again.")
        if self._warmup and section == STEP:
            self._warm(monitor, number)
        self._seen.opened(section, now)
        monitor.open(number, now)

    def _warm(self, monitor: Monitor, number: int) -> None:
        assert self.section_timeouts is not None
        self._steps += 1
        if self._steps <= self._warmup + 1:
            name = WARMUP if self._steps <= self._warmup else STEP
            monitor.limit(number, self.section_timeouts.section[name] or 0.0)

    def end_section(self, section: str) -> None:
        """Close a section that is open."""
        monitor, number, now = self._ready(), self._number(section), self._now()
        if section not in self._seen.open:
            raise RankMonitorClientError(f"section {section!r} is not open; start it before it is ended.")
        self._seen.closed(section, now)
        monitor.close((number,), now, last=not self._seen.open)

    def end_all_sections(self) -> None:
        """Close all that are open, be it none."""
        monitor, now = self._ready(), self._now()
        numbers = [self._numbers[name] for name in self._seen.open]
        for name in list(self._seen.open):
            self._seen.closed(name, now)
        monitor.close(numbers, now, last=True)

    def _number(self, section: str) -> int:
        if section not in self._numbers:
            known = ", ".join(self._numbers) or "none is"
            raise RankMonitorClientError(
                f"section {section!r} is not configured ({known}): name it with its timeout in rank_section_timeouts, "
                "or with `none` for no limit."
            )
        return self._numbers[section]

    # -- timeouts --------------------------------------------------------------------------------------------------

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Set limits of heartbeats from what all ranks have seen; a collective, where there is a process group.

        Not enough seen: False with `skip_if_not_ready`, else RankMonitorClientError. The same on all ranks.
        """
        self._ready()
        self._share()
        if not self._enough(self._seen.lacking(), skip_if_not_ready):
            return False
        assert self.hb_timeouts is not None
        assert self.cfg is not None
        self.hb_timeouts = self._seen.heartbeats(self.cfg.safety_factor, self.hb_timeouts)
        self._set()
        return True

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """The same of these sections (None: all), and of what is outside of all; the others keep their limits."""
        self._ready()
        selected = list(self._numbers if selected_sections is None else selected_sections)
        for name in selected:
            self._number(name)
        self._seen.look_outside(self._now())
        self._share()
        if not self._enough(self._seen.lacking(selected, outside=calc_out_of_section), skip_if_not_ready):
            return False
        assert self.section_timeouts is not None
        assert self.cfg is not None
        self.section_timeouts = self._seen.timeouts(
            self.cfg.safety_factor, selected, self.section_timeouts, outside=calc_out_of_section
        )
        self._set()
        return True

    def _share(self) -> None:
        """Take the longest intervals of all ranks."""
        import torch.distributed as dist  # noqa: PLC0415 - only who calculates needs it

        if dist.is_available() and dist.is_initialized():
            self._seen.take(access.longest(self._seen.give()))
        elif int(environ.get("WORLD_SIZE", "1") or 1) > 1:
            raise RankMonitorClientError(
                "timeouts are calculated over all ranks, and there is no process group: call init_process_group first."
            )

    def _enough(self, lacking: Iterable[str], skip: bool) -> bool:
        missing = ", ".join(lacking)
        if missing and not skip:
            raise RankMonitorClientError(
                f"not enough was seen for timeouts, on any rank: {missing} is missing. Calculate them later, or pass "
                "skip_if_not_ready=True."
            )
        return not missing

    def _set(self) -> None:
        """Have the agent judge by the present limits, at once."""
        beats, sections = self.hb_timeouts, self.section_timeouts
        assert beats is not None
        assert sections is not None
        limits = [sections.section[name] or 0.0 for name in self._numbers]
        self._monitor.limits(beats.initial or 0.0, beats.subsequent or 0.0, sections.out_of_section or 0.0, limits)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the calculated timeouts, JSON-able, the same on all ranks."""
        beats = self.hb_timeouts or self.loaded_hb_timeouts
        sections = self.section_timeouts or self.loaded_section_timeouts
        found: dict[str, Any] = {}
        if beats is not None and beats.were_calculated and beats.are_valid:
            found["heartbeat"] = asdict(beats)
        if sections is not None and (sections.calculated_sections or sections.is_out_of_section_calculated):
            told = asdict(sections)
            found["section"] = told | {"calculated_sections": sorted(told["calculated_sections"])}
        return {self.CURRENT_TIMEOUTS_STATE_KEY: found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take calculated timeouts up: at once, or where monitoring begins later. ValueError where it is no such state.

        What was configured then, and not calculated, is not taken: the present settings hold.
        """
        try:
            told = state.get(self.CURRENT_TIMEOUTS_STATE_KEY, {})
            beats = HeartbeatTimeouts(**told["heartbeat"]) if "heartbeat" in told else None
            sections = SectionTimeouts(**told["section"]) if "section" in told else None
            _check(beats, sections)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"this is no state of a RankMonitorClient: {error}") from None
        self.loaded_hb_timeouts = beats or self.loaded_hb_timeouts
        self.loaded_section_timeouts = sections or self.loaded_section_timeouts
        if self.is_initialized:
            self._ready()
            self._use_loaded()
            self._set()

    def _use_loaded(self) -> None:
        assert self.section_timeouts is not None
        beats, loaded, present = self.loaded_hb_timeouts, self.loaded_section_timeouts, self.section_timeouts
        if beats is not None:
            self.hb_timeouts = beats
        if loaded is None:
            return
        unknown = sorted(set(loaded.calculated_sections) - set(self._numbers))
        if unknown:
            self.logger.warning("timeouts of sections that are not configured any more are left out: %s", unknown)
        taken = {name: loaded.section[name] for name in loaded.calculated_sections if name in self._numbers}
        outside = loaded.is_out_of_section_calculated
        self.section_timeouts = SectionTimeouts(
            section=dict(present.section) | taken,
            out_of_section=loaded.out_of_section if outside else present.out_of_section,
            calculated_sections=set(present.calculated_sections) | set(taken),
            is_out_of_section_calculated=outside or present.is_out_of_section_calculated,
        )

    # -- requests --------------------------------------------------------------------------------------------------

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Ask something of the launcher, which does it at once; RuntimeError where there is none.

        Monitoring need not have begun. After `ShutdownWorkload` and `ExcludeThisNode` this process has two seconds.
        """
        try:
            action = WorkloadAction(getattr(req.action, "value", req.action))
        except (AttributeError, ValueError):
            raise ValueError(f"{req!r} is no WorkloadControlRequest with a WorkloadAction.") from None
        try:
            page = self._given or access.page()
        except RankMonitorClientError as error:
            raise RuntimeError(str(error)) from None
        page.monitor.request(action.value, str(req.description))


def _check(beats: HeartbeatTimeouts | None, sections: SectionTimeouts | None) -> None:
    """Raise for limits that cannot be meant."""
    given = [("heartbeat initial", beats.initial), ("heartbeat subsequent", beats.subsequent)] if beats else []
    if any(limit(name, value) is None for name, value in given):
        raise ValueError("a calculated timeout of heartbeats is a number of seconds.")
    if sections is not None:
        for name in sections.calculated_sections:
            if limit(f"section {name}", sections.section.get(name)) is None:
                raise ValueError(f"section {name!r} is said to be calculated, and has no timeout.")
        if sections.is_out_of_section_calculated and limit("out_of_section", sections.out_of_section) is None:
            raise ValueError("out_of_section is said to be calculated, and is none.")
