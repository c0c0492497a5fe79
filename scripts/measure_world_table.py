"""What the world's table costs an agent: the steps from a death to the next roster, at several sizes of the world."""

import time

from everstep.recovery.core.words import (
    Announced,
    Arrived,
    Died,
    Facts,
    Incarnation,
    Policy,
    Publish,
    Published,
    Ticked,
)
from everstep.recovery.core.world import begin, step


def measure(ranks: int) -> float:
    """Return CPU seconds from the death of one rank, over every arrival, to the roster entered."""
    processes = [Incarnation("boot", number, 0) for number in range(ranks + 1)]
    world, _ = step(begin("a", Policy(ranks)), Ticked(), 0.0)
    for process in processes:
        world, commands = step(world, Announced(process, Facts("a", process.pid, fresh=True)), 0.0)
        world = publish(world, commands)
    start = time.process_time()
    world, _ = step(world, Died(processes[0], -9), 0.0)
    for process in processes[1:ranks]:
        world, commands = step(world, Arrived(1, process, Facts("a", process.pid, fresh=False)), 0.0)
        world = publish(world, commands)
    assert world.roster.generation == 1
    return time.process_time() - start


def publish(world, commands):
    for command in commands:
        if isinstance(command, Publish):
            world, _ = step(world, Published(command.roster), 0.0)
    return world


if __name__ == "__main__":
    for ranks in (8, 64, 512, 4096):
        print(f"{ranks:5d} ranks: {1000 * min(measure(ranks) for _ in range(3)):7.1f} ms")
