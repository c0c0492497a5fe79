"""For how long is a dead process's device memory still taken? From the end of `waitpid` to what NVML says.

usage: python3 scripts/gpu/memory_after_death.py [GIB …]        (default 1 20 100)

A child takes so many GiB on device 0 and is
killed. One line of JSON for each: GiB, seconds from SIGKILL to its death being reaped, from there to memory seen free.
"""

import json
import os
import signal
import subprocess
import sys
import time

HOLD = """
import sys, time, torch
kept = torch.empty(int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
kept.fill_(1)
torch.cuda.synchronize()
print("ready", flush=True)
time.sleep(1000)
"""
NEAR = 64 << 20
"""What the driver itself keeps may move by that much."""


def main() -> int:
    """Measure each size three times."""
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)

    def used() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(device).used)

    def listed() -> list[int]:
        return [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]

    for gib in [float(word) for word in sys.argv[1:]] or [1.0, 20.0, 100.0]:
        for turn in range(3):
            before = used()
            child = subprocess.Popen([sys.executable, "-c", HOLD, str(gib)], stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()
            held, pids = used(), listed()
            began = time.monotonic()
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            dead = time.monotonic()
            first = used()
            while used() > before + NEAR and time.monotonic() - dead < 60:
                time.sleep(0.001)
            row = {
                "gib": gib, "turn": turn, "taken_gib": round((held - before) / 2**30, 2),
                "known_pid": child.pid in pids,
                "kill_to_reaped_s": round(dead - began, 4), "reaped_to_free_s": round(time.monotonic() - dead, 4),
                "left_at_once_mib": (first - before) >> 20,
            }  # fmt: skip
            began = time.monotonic()
            used()
            row["asked_s"] = round(time.monotonic() - began, 5)
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
