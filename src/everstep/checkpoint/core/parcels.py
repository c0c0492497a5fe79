"""A writer's fragment on its way to another node: pressed, and cut into words that fit one message.

Rule 1: what is put together again is what was cut, or nothing: its checksum comes with every part.
Rule 2: it comes over a network, so it may be anything: whatever does not fit is dropped, and takes no memory beyond
the limits.
"""

import base64
import binascii
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

PART = 48 << 10
"""Bytes of one part before base64: the message stays below 128 KiB."""
MOST = 256 << 20
"""Of one fragment, unpressed: a million tensors."""


def cut(content: bytes) -> Iterator[dict[str, Any]]:
    """Return the parts, in order."""
    pressed = zlib.compress(content, 1)
    count = max(1, -(-len(pressed) // PART))
    digest = xxhash.xxh3_64_hexdigest(content)
    for number in range(count):
        piece = pressed[number * PART : (number + 1) * PART]
        yield {"part": number, "of": count, "xxh3": digest, "text": base64.b64encode(piece).decode()}


@dataclass
class Parcels:
    """Puts parts together, by whatever names them (`key`); parts of one key come in order."""

    _open: dict[object, list[bytes]] = field(default_factory=dict[object, list[bytes]])

    def take(self, key: object, part: Mapping[str, Any]) -> bytes | None:
        """Take one part; return the whole when it is the last one, and fits."""
        number, count = int(part["part"]), int(part["of"])
        known = self._open.setdefault(key, [])
        if number == 0:
            known.clear()
        if number != len(known) or not 0 <= number < count <= MOST // PART:
            self._open.pop(key, None)
            return None
        try:
            known.append(base64.b64decode(str(part["text"]), validate=True))
        except (binascii.Error, ValueError):
            self._open.pop(key, None)
            return None
        if len(known) < count:
            return None
        return _whole(b"".join(self._open.pop(key)), str(part["xxh3"]))

    def forget(self) -> None:
        """Nothing that is open is wanted any more."""
        self._open.clear()


def _whole(pressed: bytes, digest: str) -> bytes | None:
    opened = zlib.decompressobj()
    try:
        content = opened.decompress(pressed, MOST)
    except zlib.error:
        return None
    if opened.unconsumed_tail or xxhash.xxh3_64_hexdigest(content) != digest:
        return None
    return content
