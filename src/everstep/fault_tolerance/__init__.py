"""Rank monitors and the settings of `ft_launcher`, under NVRx's names.

Importing this package loads no torch: its launcher passes here.
"""

import importlib
from typing import TYPE_CHECKING

from everstep.fault_tolerance.config import FaultToleranceConfig as FaultToleranceConfig

if TYPE_CHECKING:
    from everstep.fault_tolerance.data import WorkloadAction as WorkloadAction
    from everstep.fault_tolerance.data import WorkloadControlRequest as WorkloadControlRequest
    from everstep.fault_tolerance.rank_monitor_client import RankMonitorClient as RankMonitorClient
    from everstep.fault_tolerance.rank_monitor_client import RankMonitorClientError as RankMonitorClientError

_NAMES = {
    "WorkloadAction": "data",
    "WorkloadControlRequest": "data",
    "RankMonitorClient": "rank_monitor_client",
    "RankMonitorClientError": "rank_monitor_client",
}
__all__ = [
    "FaultToleranceConfig",
    "RankMonitorClient",
    "RankMonitorClientError",
    "WorkloadAction",
    "WorkloadControlRequest",
]


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*globals(), *_NAMES})
