"""As little of NVRx's in-process interface as the benchmark needs: it calls the function again after an exception.

What hangs or dies is never recovered here, which is what the benchmark must tell.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import torch.distributed as dist


class CallWrapper:
    def __init__(self):
        self.iteration = 0


class Wrapper:
    def __init__(self, **settings):
        assert set(settings) >= {"store_kwargs", "health_check", "initialize", "rank_assignment"}

    def __call__(self, function):
        def call():
            if os.environ.get("FAKE_LEAVES_BEHIND"):
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            state = CallWrapper()
            while True:
                try:
                    return function(call_wrapper=state)
                except RuntimeError:  # the simulated one, and what the peers' collectives raise when its group is gone
                    dist.destroy_process_group()
                    state.iteration += 1

        return call


class Compose:
    def __init__(self, *parts):
        self.parts = parts


health_check = SimpleNamespace(FaultCounter=lambda max_rank_faults: max_rank_faults)
initialize = SimpleNamespace(RetryController=lambda **settings: settings)
rank_assignment = SimpleNamespace(ActivateAllRanks=object, ShiftRanks=object)
