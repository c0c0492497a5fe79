"""NVRx's names for the launcher's client side. Importing this package loads no torch: its launcher passes here."""

from everstep.fault_tolerance.config import FaultToleranceConfig as FaultToleranceConfig

__all__ = ["FaultToleranceConfig"]
