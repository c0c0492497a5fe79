"""What rank monitors speak of, under NVRx's names: timeouts, who a rank is, what it may ask of its launcher."""

import os
import socket
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Self

from everstep import environ
from everstep.fault_tolerance.core.timeouts import HeartbeatTimeouts as HeartbeatTimeouts
from everstep.fault_tolerance.core.timeouts import SectionTimeouts as SectionTimeouts


class WorkloadAction(Enum):
    """What a rank may ask of its launcher."""

    Continue = 0
    """Nothing: go on as usual."""
    ExcludeThisNode = 1
    """This node is not fit to go on: its ranks go to others, where there are any."""
    ShutdownWorkload = 2
    """The job shall end, and not be restarted."""


class WorkloadControlRequest:
    """An action, and in the user's words why; what an operator reads of it is cut at 384 bytes."""

    def __init__(self, action: WorkloadAction, description: str = "<not set>") -> None:
        self.action, self.description = action, description

    def __str__(self) -> str:
        return f"WorkloadControlRequest(action={self.action}, description={self.description})"


class SectionAction(Enum):
    """What may happen to sections."""

    OPEN = 1
    CLOSE = 2
    CLOSE_ALL = 3


@dataclass
class RankInfo:
    """Who a rank is."""

    global_rank: int
    local_rank: int
    host: str
    pid: int

    @classmethod
    def get_for_current_rank(cls) -> Self:
        """Read it of the process group, else of RANK and LOCAL_RANK; RuntimeError where neither is there."""
        distributed = sys.modules.get("torch.distributed")  # it is loaded where there is a group
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank = int(distributed.get_rank())
        else:
            told = environ.get("RANK")
            if told is None:
                raise RuntimeError(
                    "this process has no rank: RANK is not set, and there is no process group. Start the script with "
                    "`everstep run`, or initialize torch.distributed first."
                )
            rank = int(told)
        return cls(rank, int(environ.get("LOCAL_RANK", "-1") or -1), socket.gethostname(), os.getpid())
