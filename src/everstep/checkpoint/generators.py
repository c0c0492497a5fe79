"""Random generators: Python's, NumPy's global one, torch's on the CPU and on every initialised CUDA device.

They are read and set in place. Generators of a user's own are objects of the state like others.
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
from everstep.checkpoint.core.reshard import SEED, Wish
from everstep.checkpoint.fitting import Fitting, Undo
from everstep.checkpoint.remake import value_of
from everstep.checkpoint.tensors import Collector, Part, Payload, Reading, payload_of

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
        for name, setting in (
            ("python", _set_python), ("numpy", _set_numpy), ("torch", _set_torch), ("cuda", _set_cuda),
        ):  # fmt: skip
            if name in state:
                setting(state[name])


def _tree(
    version: int, gauss: float | None, kind: str, position: int, has_gauss: int, cached: float, devices: int
) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "python": [version, Ref(0), gauss],
        "numpy": [kind, Ref(1), position, has_gauss, cached],
        "torch": Ref(2),
    }
    return tree | {"cuda": {n: Ref(3 + n) for n in range(devices)}} if devices else tree


def is_generator(thing: object) -> bool:
    """True for a random generator of a user's own: torch's, Python's, both of NumPy's."""
    kinds = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
    return isinstance(thing, kinds) and not isinstance(thing, random.SystemRandom)  # that one has no state


class GeneratorSource:
    """A random generator that the user draws from: set in place, so whoever else holds it draws on as well."""

    def __init__(self, name: str, generator: Any) -> None:
        self._name = name
        self._generator = generator
        self._reading = Reading(name, per_rank=True)

    def stable(self) -> list[Part]:
        """See `walk.Source`."""
        return []

    def changing(self) -> list[Part]:
        """See `walk.Source`."""
        return [self._reading.part({"kind": _kind(self._generator), "state": _state(self._generator)})]

    def names(self) -> tuple[str, ...]:
        """See `walk.Source`."""
        return (self._name,)

    def mismatches(self, saved: Mapping[str, Section]) -> list[str]:
        """See `walk.Source`: a state of another kind of generator is none of this one's."""
        tree = saved[self._name].tree
        there = tree.get("kind", "torch") if isinstance(tree, dict) else "no generator"
        here = _kind(self._generator)
        return [] if there == here else [f"{self._name} was saved as the state of {there} and is {here}"]

    def restore(self, saved: Mapping[str, Section], payload: Payload) -> None:
        """See `walk.Source`."""
        section = saved[self._name]
        state = value_of(section.tree, section.leaves, payload)["state"]
        seed = _seed(state)
        self._set(state if seed is None else _seeded(self._generator, seed))

    def _set(self, state: Any) -> None:
        match self._generator:
            case torch.Generator():
                self._generator.set_state(state)
            case random.Random():
                version, words, gauss = state
                self._generator.setstate((version, tuple(words.tolist()), gauss))
            case np.random.Generator():
                self._generator.bit_generator.state = state
            case other:
                other.set_state(tuple(state))

    def wishes(self, saved: Mapping[str, Section]) -> Mapping[str, Wish]:
        """See `walk.Source`."""
        del saved
        return {self._name: Wish(draws=True)}

    def fitting(self, saved: Mapping[str, Section], refused: Mapping[str, str]) -> Fitting:
        """See `walk.Source`."""
        if self._name not in saved:
            return Fitting(differing=[refused[self._name]]) if self._name in refused else Fitting(missing=[self._name])
        wrong = self.mismatches(saved)
        return Fitting(differing=wrong) if wrong else Fitting({self._name: saved[self._name]})

    def attempt(self, saved: Mapping[str, Section], payload: Payload) -> Undo:
        """See `walk.Source`."""
        (part,) = self.changing()
        before = value_of(part.section.tree, part.section.leaves, payload_of(part))["state"]
        self.restore(saved, payload)

        def undo() -> None:
            self._set(before)

        return undo

    def future_bytes(self) -> tuple[int, int]:
        """See `walk.Source`."""
        return 0, 0


def _seed(state: Any) -> int | None:
    """The seed of a generator that was derived for a rank that was not there before (`core/reshard.py`)."""
    seed = state.get(SEED) if isinstance(state, Mapping) else None
    return seed if isinstance(seed, int) else None


def _seeded(like: Any, seed: int) -> Any:
    """What `_state` gives for a generator of that kind, fresh from a seed."""
    match like:
        case torch.Generator():
            return torch.Generator(like.device).manual_seed(seed).get_state()
        case random.Random():
            return _state(random.Random(seed))
        case np.random.Generator():
            return type(like.bit_generator)(seed).state
        case _:
            return _state(np.random.RandomState(seed % 2**32))


def _set_python(state: Any) -> None:
    seed = _seed(state)
    version, words, gauss = state if seed is None else _seeded(random.Random(), seed)
    random.setstate((version, tuple(words.tolist()), gauss))


def _set_numpy(state: Any) -> None:
    seed = _seed(state)
    global_random.set_state(tuple(state if seed is None else _seeded(None, seed)))


def _set_torch(state: Any) -> None:
    seed = _seed(state)
    torch.set_rng_state(state if seed is None else torch.Generator().manual_seed(seed).get_state())


def _set_cuda(state: Any) -> None:
    seed, here = _seed(state), torch.cuda.device_count()
    if seed is not None:
        torch.cuda.manual_seed_all(seed)
        return
    for device, saved in state.items():
        if device < here:  # saved where there were more: nobody draws from those here
            torch.cuda.set_rng_state(saved, device)


def _kind(generator: Any) -> str:
    match generator:
        case torch.Generator():
            return "torch" if generator.device.type == "cpu" else f"torch on {generator.device.type}"
        case random.Random():
            return "python"
        case np.random.Generator():
            return f"numpy {type(generator.bit_generator).__name__}"
        case _:
            return "numpy legacy"


def _state(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case random.Random():
            version, words, gauss = generator.getstate()
            return [version, np.array(words, _WORD), gauss]
        case np.random.Generator():
            return generator.bit_generator.state
        case _:
            return list(generator.get_state(legacy=True))
