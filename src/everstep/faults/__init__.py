"""Seeded faults: plans, injectors, and the two calls that scripts make. Importing this needs no torch."""

from everstep.faults.flags import add_arguments
from everstep.faults.loop import maybe_fail

__all__ = ["add_arguments", "maybe_fail"]
