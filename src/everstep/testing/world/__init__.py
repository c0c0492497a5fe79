"""A simulated world for the recovery protocol: the real tables, an adversary for a network, and laws.

    from everstep.testing.world import Setting, SimulatedWorld
    SimulatedWorld(Setting.drawn(seed=42, ranks=8)).run()

Every choice comes from the seed; nothing waits. A broken law raises `Violation` with the last moves.
"""

from everstep.testing.world.adversary import STRIKES
from everstep.testing.world.laws import Violation
from everstep.testing.world.moments import Moment, Strike
from everstep.testing.world.scene import Setting
from everstep.testing.world.world import SimulatedWorld

__all__ = ["STRIKES", "Moment", "Setting", "SimulatedWorld", "Strike", "Violation"]
