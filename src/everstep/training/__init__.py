"""The native surface: `@everstep.resilient` and `Run`, composed of the slices below.

Without an agent (plain torchrun, a bare script) the same function runs once, in the world that the launcher's variables
describe or in a world of one; faults then end it as they end any script, and one line says so.
"""

from everstep.training.keeper import Positioned
from everstep.training.run import Run
from everstep.training.wrapped import prepare, resilient

__all__ = ["Positioned", "Run", "prepare", "resilient"]
