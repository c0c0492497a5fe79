"""Random generators: Python's, NumPy's global one, torch's on the CPU and on every initialised CUDA device.

They are read and set in place. Generators of a user's own (`torch.Generator`) are objects of the state like others.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.random as global_random  # loaded lazily otherwise: by the first snapshot of every forked worker
import torch

from everstep.checkpoint.core.layout import Section
from everstep.checkpoint.tensors import Collector, Part, Payload, value_of


class Generators:
    """The process's global generators."""

    def __init__(self, name: str) -> None:
        self._name = name

    def part(self) -> Part:
        """Return their states, each rank its own."""
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = global_random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": [version, np.array(words, np.uint32), gauss],
            "numpy": [kind, keys, int(position), int(has_gauss), float(cached)],
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = {n: torch.cuda.get_rng_state(n) for n in range(torch.cuda.device_count())}
        collector = Collector(self._name, per_rank=True)
        return collector.part(collector.node(self._name, state), per_rank=True)

    def restore(self, section: Section, payload: Payload) -> None:
        """Set them; what was not saved (a device that was not in use) stays as it is."""
        state = value_of(section.tree, section.leaves, payload)
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        global_random.set_state(tuple(state["numpy"]))
        torch.set_rng_state(state["torch"])
        for device, saved in state.get("cuda", {}).items():
            torch.cuda.set_rng_state(saved, device)


class GeneratorSource:
    """A `torch.Generator` that the user draws from."""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        self._name = name
        self._generator = generator

    def stable(self) -> list[Part]:
        """See `walk.Source`."""
        return []

    def changing(self) -> list[Part]:
        """See `walk.Source`."""
        collector = Collector(self._name, per_rank=True)
        return [collector.part(collector.node(self._name, {"state": self._generator.get_state()}), per_rank=True)]

    def names(self) -> tuple[str, ...]:
        """See `walk.Source`."""
        return (self._name,)

    def mismatches(self, saved: Mapping[str, Section]) -> list[str]:
        """See `walk.Source`."""
        del saved
        return []

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """See `walk.Source`."""
        section = saved[self._name]
        self._generator.set_state(value_of(section.tree, section.leaves, payload)["state"])

    def future_bytes(self) -> tuple[int, int]:
        """See `walk.Source`."""
        return 0, 0
