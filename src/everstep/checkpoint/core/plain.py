"""Plain values as the JSON of a tree, printed by the interpreter's own C code, and proven.

`layout.encode` visits value by value, and is the definition. Most of what changes from step to step (a learning rate,
a loader's position) needs none of it: `json` prints it in one call. But `json` is not exact: it turns a tuple into a
list, the key 1 into "1", numpy's float64 into a float. So its text is believed only where it is shown to be right:

Rule 1: the text is read back, and `marshal` must print the same bytes for what was read as for what was given. It knows
    exact types (a subclass it refuses, or prints as a buffer, which JSON never gives), every bit of a float, and order.
    For the same reason a value with the bytes of one that was proven is that value.
Rule 2: who fails is not refused: None says that the long way is to be gone, and that one decides.
Rule 3: the text is the one that `layout.encode` would come to, so two walks of one state agree to the byte; and it
    means under `layout.decode` what it means under `json`: no key "!" is let through.
Rule 4: nothing of what was given is kept, since it may change: the value that goes on is the one that was read back.
"""

import marshal
import re
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint.core.layout import MAX_DEPTH, Node, compact, parsed

_NO_REFERENCES = 2  # marshal's format without back references: equal values print alike, whoever else holds them
_TAG_KEY = '"!":'  # as printed; a string that contains it prints its quotation marks otherwise
_DIGITS = 300  # fewer than the smallest integer has that is printed in another way
_HUGE = re.compile(rf"\d{{{_DIGITS}}}")
_ANYTHING = (ValueError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Plain:
    """A plain value: its JSON, a copy of it, and the bytes by which it is recognised."""

    text: str
    value: Node
    bits: bytes


def plain(value: Any, known: Plain | None = None) -> Plain | None:
    """Return `value` as JSON where that has it exactly (rule 1), else None; `known` itself where it is that value."""
    try:
        bits = marshal.dumps(value, _NO_REFERENCES)
        if known is not None and known.bits == bits:
            return known
        text = compact(value)
        back = parsed(text)
        if marshal.dumps(back, _NO_REFERENCES) != bits or _TAG_KEY in text or _otherwise(text, back):
            return None
    except _ANYTHING:
        return None
    return Plain(text, back, bits)


def _otherwise(text: str, value: Node) -> bool:
    """True where `layout.encode` refuses (too deep) or prints another text (a huge integer)."""
    if len(text) > _DIGITS and _HUGE.search(text):
        return True
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    level, depth = [value], -1
    while level:
        depth += 1
        level = [x for each in level for x in _children(each) if type(x) in (list, dict)]
    return depth >= MAX_DEPTH


def _children(value: Any) -> Any:
    return value.values() if type(value) is dict else value
