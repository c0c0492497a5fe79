"""Ask NVRx 0.4.1's rank monitor what it answers, and write that down as a table that our tests are held to.

    make peers-surface        rewrites tests/unit/fault_tolerance/nvrx/timeouts.json too

Runs in the peers' environment, where Everstep's own modules are never imported. `timeouts`: what its `TimeoutsCalc`
makes of seeded random heartbeats and sections, by given times. `calls`: which calls of a client, connected to a server
of its own, raise.
"""

import functools
import json
import logging
import os
import random
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp
from nvidia_resiliency_ext import fault_tolerance as ft
from nvidia_resiliency_ext.fault_tolerance import data, timeouts_calc

TABLE = Path(__file__).parent.parent / "tests/unit/fault_tolerance/nvrx/timeouts.json"
SECTIONS = ("load", "step", "save")
SCENARIOS = 40
CALLS = {
    "a heartbeat": [["send_heartbeat"]],
    "heartbeats and sections": [["send_heartbeat"], ["start_section", "step"], ["send_heartbeat"],
                                ["end_section", "step"]],
    "a section twice, one after the other": [["start_section", "step"], ["end_section", "step"]] * 2,
    "a section twice at once": [["start_section", "step"], ["start_section", "step"]],
    "sections that overlap": [["start_section", "step"], ["start_section", "load"], ["end_section", "step"]],
    "an end without a start": [["end_section", "step"]],
    "a section that is not configured": [["start_section", "unknown"]],
    "the end of one": [["end_section", "unknown"]],
    "all of none": [["end_all_sections"]],
    "all of two, then one of them": [["start_section", "step"], ["start_section", "load"], ["end_all_sections"],
                                     ["end_section", "step"]],
    "again after all": [["start_section", "step"], ["end_all_sections"], ["start_section", "step"]],
    "a second beginning": [["init_workload_monitoring"]],
    "an end of watching, twice": [["shutdown_workload_monitoring"], ["shutdown_workload_monitoring"]],
    "after the end of watching": [["shutdown_workload_monitoring"], ["send_heartbeat"]],
    "watched again": [["shutdown_workload_monitoring"], ["init_workload_monitoring"], ["send_heartbeat"]],
    "timeouts of nothing": [["calculate_and_set_hb_timeouts"]],
    "timeouts of nothing, which is no error": [["calculate_and_set_hb_timeouts", True]],
    "timeouts of one heartbeat": [["send_heartbeat"], ["calculate_and_set_hb_timeouts"]],
    "timeouts of two": [["send_heartbeat"], ["send_heartbeat"], ["calculate_and_set_hb_timeouts"]],
    "of sections that were not seen": [["calculate_and_set_section_timeouts"]],
    "of one that was": [["start_section", "step"], ["end_section", "step"],
                        ["calculate_and_set_section_timeouts", ["step"], False]],
    "of one that is not configured": [["calculate_and_set_section_timeouts", ["unknown"], False]],
}  # fmt: skip


def scenario(rng):
    """Return events: [what, argument, seconds]."""
    now, open_now, events = 0.0, [], []
    for _ in range(rng.randint(4, 40)):
        now = round(now + rng.choice((0.01, 0.3, 2.0)) * rng.random() + 0.001, 6)
        what = rng.choice(("beat", "beat", "open", "close", "close_all", "heartbeats", "sections"))
        if what == "open" and len(open_now) < len(SECTIONS):
            name = rng.choice([s for s in SECTIONS if s not in open_now])
            open_now.append(name)
            events.append([what, name, now])
        elif what == "close" and open_now:
            events.append([what, open_now.pop(rng.randrange(len(open_now))), now])
        elif what == "close_all":
            open_now.clear()
            events.append([what, None, now])
        elif what == "sections":
            chosen = rng.choice((None, rng.sample(SECTIONS, rng.randint(1, 3))))
            events.append([what, [chosen, rng.random() < 0.5], now])
        elif what in ("beat", "heartbeats"):
            events.append([what, None, now])
    return events


def told_of(timeouts):
    """What a calculation made, as JSON has it."""
    if isinstance(timeouts, data.HeartbeatTimeouts):
        return [timeouts.initial, timeouts.subsequent, timeouts.were_calculated]
    return [dict(timeouts.section), timeouts.out_of_section, sorted(timeouts.calculated_sections),
            timeouts.is_out_of_section_calculated]  # fmt: skip


def play(events, factor):
    """Return what each calculation made; null where it could not."""
    calc = timeouts_calc.TimeoutsCalc(sections=SECTIONS, start_time=0.0, safety_factor=factor)
    beats = data.HeartbeatTimeouts(initial=3600.0, subsequent=2700.0, were_calculated=False)
    sections = data.SectionTimeouts(section={"load": 60.0, "step": 5.0, "save": None}, out_of_section=9.0)
    answers = []
    for what, argument, now in events:
        if what == "beat":
            calc.update_on_heartbeat(hb_time=now)
        elif what in ("open", "close", "close_all"):
            action = {"open": data.SectionAction.OPEN, "close": data.SectionAction.CLOSE}.get(
                what, data.SectionAction.CLOSE_ALL
            )
            calc.update_on_section_event(argument, action, event_time=now)
        elif what == "heartbeats":
            if calc.can_get_hb_timeouts():
                beats = calc.get_hb_timeouts(current=beats)
            answers.append(told_of(beats) if calc.can_get_hb_timeouts() else None)
        else:
            chosen, outside = argument
            calc.maybe_bump_oos_time(curr_time=now)
            can = calc.can_get_section_timeouts(selected_sections=chosen, calc_out_of_section=outside)
            if can:
                sections = calc.get_section_timeouts(chosen, outside, current=sections)
            answers.append(told_of(sections) if can else None)
    return answers


def called(steps, folder):
    """Return for each call of one client whether it raises."""
    path = f"{folder}/{random.randrange(10**9)}.socket"
    limits = {"load": 60.0, "step": 60.0, "save": None}
    config = ft.FaultToleranceConfig(rank_section_timeouts=limits, enable_nic_monitor=False, log_level=logging.CRITICAL)
    server = ft.RankMonitorServer.run_in_subprocess(config, path, False, mp.get_context("fork"))
    os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = path
    client = ft.RankMonitorClient()
    client.init_workload_monitoring()
    raised = []
    for name, *arguments in steps:
        try:
            getattr(client, name)(*arguments)
            raised.append(False)
        except Exception:
            raised.append(True)
            break
    client.shutdown_workload_monitoring()
    server.terminate()
    server.join()
    return raised


def main() -> int:
    """Write the table."""
    rng = random.Random(11)
    timeouts = []
    for _ in range(SCENARIOS):
        factor, events = rng.choice((1.5, 5.0)), scenario(rng)
        timeouts.append({"factor": factor, "events": events, "answers": play(events, factor)})
    os.environ.update(
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        call = functools.partial(called, folder=folder)
        calls = {title: {"calls": steps, "raised": call(steps)} for title, steps in CALLS.items()}
    dist.destroy_process_group()
    TABLE.write_text(json.dumps({"timeouts": timeouts, "calls": calls}, separators=(",", ":")) + "\n")
    print(f"NVRx's rank monitor: {len(timeouts)} runs of timeouts, {len(calls)} runs of calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
