"""Random generators: Python's, NumPy's global one, torch's on the CPU and on every initialised CUDA device.

They are read and set in place. Generators of a user's own (`torch.Generator`) are objects of the state like others.
"""

import marshal
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.random as global_random  # loaded lazily otherwise: by the first snapshot of every forked worker
import torch

from everstep.checkpoint.core.layout import Ref, Section
from everstep.checkpoint.tensors import Collector, Part, Payload, Reading, value_of

_WORD = np.dtype("<u4")
_WORDS = struct.Struct("<625I")  # of Python's: 624 words, and the position in them


class Generators:
    """The process's global generators.

    They are read at every step, so their thousands of words go into memory that stays: leaves and sources are made
    once, and only the few plain values beside them are looked at anew.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._part: Part | None = None
        self._plain = b""  # the values beside the words, by which a change is seen
        self._python = bytearray(_WORDS.size)
        self._numpy: Any = np.zeros(624, _WORD)

    def part(self) -> Part:
        """Return their states, each rank its own; the sources hold them until the next call."""
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = global_random.get_state(legacy=True)
        own = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            own += [torch.cuda.get_rng_state(n) for n in range(torch.cuda.device_count())]
        part = self._part
        if part is None or len(own) != len(part.sources) - 2:
            part, self._plain = self._made(own), b""
        _WORDS.pack_into(self._python, 0, *words)
        self._numpy[:] = keys
        for source, state in zip(part.sources[2:], own, strict=True):
            source.copy_(state)
        values = version, gauss, kind, int(position), int(has_gauss), float(cached)
        plain = marshal.dumps(values, 2)  # equal only where every bit is
        if plain != self._plain:
            section = Section(self._name, _tree(*values, len(own) - 1), part.section.leaves, per_rank=True)
            part = Part(section, part.sources)
        self._plain, self._part = plain, part
        return part

    def _made(self, own: list[torch.Tensor]) -> Part:
        collector = Collector(self._name, per_rank=True)
        collector.array(f"{self._name}/python/1", np.frombuffer(self._python, _WORD), copied=False)
        collector.array(f"{self._name}/numpy/1", self._numpy, copied=False)
        for n, state in enumerate(own):
            collector.tensor(f"{self._name}/cuda/{n - 1}" if n else f"{self._name}/torch", state)
        return collector.part(None, per_rank=True)

    def restore(self, section: Section, payload: Payload) -> None:
        """Set them; what was not saved (a device that was not in use) stays as it is."""
        state = value_of(section.tree, section.leaves, payload)
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        global_random.set_state(tuple(state["numpy"]))
        torch.set_rng_state(state["torch"])
        for device, saved in state.get("cuda", {}).items():
            torch.cuda.set_rng_state(saved, device)


def _tree(
    version: int, gauss: float | None, kind: str, position: int, has_gauss: int, cached: float, devices: int
) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "python": [version, Ref(0), gauss],
        "numpy": [kind, Ref(1), position, has_gauss, cached],
        "torch": Ref(2),
    }
    return tree | {"cuda": {n: Ref(3 + n) for n in range(devices)}} if devices else tree


class GeneratorSource:
    """A `torch.Generator` that the user draws from."""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        self._name = name
        self._generator = generator
        self._reading = Reading(name, per_rank=True)

    def stable(self) -> list[Part]:
        """See `walk.Source`."""
        return []

    def changing(self) -> list[Part]:
        """See `walk.Source`."""
        return [self._reading.part({"state": self._generator.get_state()})]

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
