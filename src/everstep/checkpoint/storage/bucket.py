"""What an object store is asked for, in the fewest words: the one door between it and us.

Objects are whole or not there: one that is being uploaded has no name yet. Keys are relative to the bucket's URL. Calls
have deadlines; errors are OSError (FileNotFoundError, PermissionError, TimeoutError among them) that carry the key.
"""

from dataclasses import dataclass
from typing import Protocol

from everstep.checkpoint.fileops import Data


@dataclass(frozen=True, slots=True)
class Item:
    """An object as a listing has it."""

    key: str
    size: int
    changed_s: float


class Upload(Protocol):
    """An object on its way."""

    def write(self, data: Data) -> None:
        """Hand on more of it; what is not sent yet is kept, a part at most."""
        ...

    def finish(self) -> None:
        """Return when the object is there, whole and durable."""
        ...

    def abandon(self) -> None:
        """Leave nothing of it behind, as far as that can be done."""
        ...


class Bucket(Protocol):
    """A prefix of an object store."""

    url: str

    def create(self, key: str, data: bytes) -> bool:
        """Make an object if there is none of that key (If-None-Match: *); False where there is one already."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Make or replace an object."""
        ...

    def get(self, key: str) -> bytes:
        """Return an object's content."""
        ...

    def read(self, key: str, offset: int, count: int) -> bytes:
        """Return bytes of an object (a range request): fewer than `count` at its end, none beyond."""
        ...

    def items(self, prefix: str) -> list[Item]:
        """Return the objects whose keys begin with `prefix`, as they are now, in order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; no error where there is none."""
        ...

    def upload(self, key: str) -> Upload:
        """Begin an object that comes in parts."""
        ...

    def abort_uploads(self, prefix: str) -> list[str]:
        """Abort uploads below `prefix` that nobody will finish; return their keys."""
        ...
