"""Whether two looks at one thread's stack stand in the same turning loop: pure, over code objects and offsets.

A path is a stack from some root on: each frame's code, and the offset of the instruction it is at. Where two paths
part, or above that, a loop encloses both, or the one place lies before or behind the loop that the other turns in.

A loop is a strongly connected part of the function's control flow, exceptions' ways included: a jump back alone is
none, since the compiler puts `except` blocks at a function's end (Python 3.12 a bare `yield from`'s too) and jumps
back from there. An inner loop is part of the outer one.
"""

import dis
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import CodeType

Path = Sequence[tuple[CodeType, int]]
_NO_LOOP = "JUMP_BACKWARD_NO_INTERRUPT"  # the wait inside an `await` or a `yield from`
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", _NO_LOOP}
_Ways = Mapping[int, Iterable[int]]


@lru_cache(maxsize=256)
def loops_of(code: CodeType) -> tuple[frozenset[int], ...]:
    """Return each outermost loop of a function, as the offsets that lie in it."""
    ways = _ways(code)
    width = {one: range(one, after, 2) for one, after in pairwise([*sorted(ways), len(code.co_code)])}
    return tuple(
        frozenset(offset for at in part for offset in width[at])  # a call that is being made stands behind its start
        for part in _connected(ways)
        if len(part) > 1
    )


def together(one: Path, other: Path) -> bool:
    """Tell whether some loop encloses both."""
    for (code, here), (theirs, there) in zip(one, other, strict=False):
        if code is not theirs:
            return False
        if any(here in loop and there in loop for loop in loops_of(code)):
            return True
        if here != there:
            return False
    return False


def _ways(code: CodeType) -> _Ways:
    """Return where the interpreter may go from each instruction."""
    instructions = list(dis.get_instructions(code))
    ways: dict[int, list[int]] = {at.offset: [] for at in instructions}
    for at, after in pairwise([*instructions, None]):
        assert at is not None
        if after is not None and at.opname not in _ENDS:
            ways[at.offset].append(after.offset)
        if (at.opcode in dis.hasjrel or at.opcode in dis.hasjabs) and at.opname != _NO_LOOP:
            ways[at.offset].append(at.argval)
    for entry in vars(dis.Bytecode(code))["exception_entries"]:  # set since 3.11, and in nobody's stubs
        for offset in range(entry.start, entry.end, 2):
            if offset in ways:
                ways[offset].append(entry.target)
    return ways


def _connected(ways: _Ways) -> Iterable[set[int]]:
    """Return the strongly connected parts (Kosaraju's two walks, as in Aho, Hopcroft and Ullman 1983, 6.7)."""
    back: dict[int, list[int]] = {at: [] for at in ways}
    for at, targets in ways.items():
        for target in targets:
            back[target].append(at)
    done: set[int] = set()
    order = [at for root in ways for at in _finished(root, ways, done)]
    done = set()
    return [set(_finished(root, back, done)) for root in reversed(order) if root not in done]


def _finished(root: int, ways: _Ways, done: set[int]) -> Iterable[int]:
    """Walk from a root to all that is not done, depth first: each as it is left."""
    found: list[int] = []
    if root in done:
        return found
    done.add(root)
    stack = [(root, iter(ways[root]))]
    while stack:
        at, targets = stack[-1]
        for target in targets:
            if target not in done:
                done.add(target)
                stack.append((target, iter(ways[target])))
                break
        else:
            stack.pop()
            found.append(at)
    return found
