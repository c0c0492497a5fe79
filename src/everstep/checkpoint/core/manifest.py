"""Our own description of a checkpoint: the one thing that our reader trusts (EXPERIMENTS C2, C5, C6).

Rule 1: each rank's writer tells what it wrote in a `Fragment`; a `Manifest` is merged from the fragments of one save,
of one lineage, that cover its world. Anything else is refused with the ranks and the reason.
Rule 2: merging is a pure function of the fragments, whatever their order, to identical bytes: two mergers do no harm.
Rule 3: every byte that a reader will use is covered by a checksum (xxh3): of its entry and of its file; the manifest
itself by its `digest`.
Rule 4: what every rank holds is written by one and hashed by all; replicas that differ are an error that names the
tensor (C8), never a choice.
Rule 5: JSON with a version; unknown fields are ignored.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite, prod
from typing import Any

import xxhash

from everstep import ranks
from everstep.errors import CheckpointError, DamagedCheckpoint

FORMAT = "everstep-checkpoint"
VERSION = 1


def checksum(data: bytes | memoryview) -> str:
    """xxh3 of `data`, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file of a checkpoint as it must be."""

    bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One chunk of a tensor, or one value, and where it lies."""

    name: str  # DCP's: `model.layers.0.weight`
    path: tuple[str | int, ...]  # the same as keys of nested containers
    file: str
    at: int  # where its archive begins in the file
    length: int  # of the archive
    data: int  # where its elements begin in the file
    nbytes: int  # of the elements
    xxh3: str  # of the elements
    dtype: str | None = None  # None: a value, and the elements are the whole archive
    shape: tuple[int, ...] = ()  # of the whole tensor
    offsets: tuple[int, ...] = ()  # of this chunk in it
    sizes: tuple[int, ...] = ()  # of this chunk

    @property
    def id(self) -> str:
        """What this entry is looked up by."""
        return entry_id(self.name, self.offsets)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Entry":
        """Read one entry; KeyError or TypeError for what is none."""
        known: dict[str, Any] = {n: tuple(v) if type(v) is list else v for n, v in body.items() if n in _ENTRY_FIELDS}
        return cls(**known)


_ENTRY_FIELDS = frozenset(f.name for f in fields(Entry))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]


def entry_id(name: str, offsets: Sequence[int]) -> str:
    """Return the key of a chunk: its tensor's name and where it begins."""
    return f"{name}@{','.join(map(str, offsets))}"


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one rank's writer has made durable for one save."""

    save: str  # the save's token: unique over steps, generations, attempts and jobs
    step: int
    epoch: int
    generation: int
    world_size: int
    rank: int
    files: Mapping[str, FileFact]
    entries: tuple[Entry, ...]
    needs: tuple[str, ...] = ()  # ids of the entries that this rank's restore reads
    replicas: Mapping[str, str] = field(default_factory=dict[str, str])  # id → xxh3 of what another rank writes
    training: Mapping[str, str] = field(default_factory=dict[str, str])  # versions of what trained

    def to_bytes(self) -> bytes:
        """Return the JSON form."""
        return _canonical(asdict(self) | {"v": VERSION})

    @classmethod
    def from_bytes(cls, text: bytes | memoryview) -> "Fragment":
        """Read what `to_bytes` wrote; CheckpointError for anything else."""
        try:
            body = json.loads(bytes(text))
            if body.pop("v") != VERSION:
                raise ValueError(f"its version is not {VERSION}")
            known: dict[str, Any] = {f.name: _tuple(body[f.name]) for f in fields(cls) if f.name in body}
            known["files"] = _files(body["files"])
            known["entries"] = tuple(map(Entry.from_json, body["entries"]))
            return cls(**known)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"a writer's fragment cannot be read ({error}); expected JSON of version {VERSION}"
            ) from error


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint."""

    step: int
    epoch: int
    generation: int
    world_size: int
    save: str
    files: Mapping[str, FileFact]
    entries: tuple[Entry, ...]  # sorted by name and offsets
    training: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # of this step, as far as they were given

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, the manifest's own apart."""
        return sum(fact.bytes for fact in self.files.values())

    def with_metrics(self, metrics: Mapping[str, float]) -> "Manifest":
        """Return the same with what was measured at its step; what is not finite is left out."""
        return replace(self, metrics={name: value for name, value in metrics.items() if isfinite(value)})

    def with_file(self, name: str, fact: FileFact) -> "Manifest":
        """Return the same with one more file."""
        return replace(self, files={**self.files, name: fact})

    def to_bytes(self) -> bytes:
        """Return the file's content; the digest covers all that stands before it."""
        body = {"format": FORMAT, "v": VERSION, **asdict(self)}
        return _canonical(body | {"digest": checksum(_canonical(body))})

    @classmethod
    def from_bytes(cls, text: bytes) -> "Manifest":
        """Read what `to_bytes` wrote; DamagedCheckpoint that says what is wrong for anything else."""
        body = _checked(text)
        try:
            known: dict[str, Any] = {f.name: body[f.name] for f in fields(cls) if f.name in body}
            known["files"] = _files(body["files"])
            known["entries"] = tuple(map(Entry.from_json, body["entries"]))
            return cls(**known)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"a field is missing or is not what it should be ({error})") from error


def _checked(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"not JSON ({error}); cut, or overwritten") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
        raise DamagedCheckpoint(f"not the manifest of a checkpoint: its format is not {FORMAT!r}")
    fields_of: dict[str, Any] = body
    digest = fields_of.pop("digest", None)
    if digest != checksum(_canonical(fields_of)):
        raise DamagedCheckpoint("its digest does not match its content: bytes were changed")
    if fields_of["v"] != VERSION:
        raise DamagedCheckpoint(f"version {fields_of['v']}; this Everstep reads version {VERSION}")
    return fields_of


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice")
    return made


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _files(body: Mapping[str, Any]) -> dict[str, FileFact]:
    return {name: FileFact(fact["bytes"], fact["xxh3"]) for name, fact in body.items()}


def merge(fragments: Iterable[Fragment]) -> Manifest:
    """Make one manifest of the fragments of one save; repeated fragments count once.

    Raises CheckpointError where they are of several saves or lineages, do not cover the world, lack an entry that a
    rank needs, or hold replicas that differ.
    """
    by_rank = _one_save(fragments)
    first = by_rank[0]
    entries = _entries(by_rank.values())
    for fragment in by_rank.values():
        _check_needs(fragment, entries)
    _check_whole(entries.values())
    files = {name: fact for fragment in by_rank.values() for name, fact in fragment.files.items()}
    ordered = tuple(entries[key] for key in sorted(entries, key=lambda k: (entries[k].name, entries[k].offsets)))
    return Manifest(
        step=first.step, epoch=first.epoch, generation=first.generation, world_size=first.world_size, save=first.save,
        files=dict(sorted(files.items())), entries=ordered, training=first.training,
    )  # fmt: skip


def _one_save(fragments: Iterable[Fragment]) -> dict[int, Fragment]:
    by_rank: dict[int, Fragment] = {}
    for fragment in fragments:
        known = by_rank.setdefault(fragment.rank, fragment)
        if known != fragment:
            raise CheckpointError(f"rank {fragment.rank} reported two different fragments for step {fragment.step}")
    if not by_rank:
        raise CheckpointError("no rank reported a fragment: there is nothing to merge")
    sources = {(f.save, f.step, f.epoch, f.generation, f.world_size) for f in by_rank.values()}
    if len(sources) > 1:
        told = "; ".join(f"save {s} step {n} lineage {e}.{g} world {w}" for s, n, e, g, w in sorted(sources))
        raise CheckpointError(f"fragments of different saves cannot be one checkpoint: {told}")
    world = next(iter(by_rank.values())).world_size
    if set(by_rank) != set(range(world)):
        missing, strange = set(range(world)) - set(by_rank), set(by_rank) - set(range(world))
        raise CheckpointError(
            f"fragments do not cover the world of {world}: missing {ranks.brief(missing)}, outside {sorted(strange)}"
        )
    return dict(sorted(by_rank.items()))


def _entries(fragments: Iterable[Fragment]) -> dict[str, Entry]:
    """All entries by id. A rectangle that several ranks wrote (a replicate dimension of the mesh) is kept once."""
    entries: dict[str, Entry] = {}
    for fragment in fragments:
        for entry in fragment.entries:
            known = entries.setdefault(entry.id, entry)
            if (known.dtype, known.shape, known.sizes) != (entry.dtype, entry.shape, entry.sizes):
                raise CheckpointError(
                    f"rank {fragment.rank} describes {entry.name} as {entry.dtype}{list(entry.shape)}, another rank as "
                    f"{known.dtype}{list(known.shape)}: two things have one name"
                )
            _check_equal(fragment, entry.id, known, entry.xxh3)
    return entries


def _check_whole(entries: Iterable[Entry]) -> None:
    """A tensor with a hole would be loaded with whatever stood there: all of its pieces have been written, or none is.

    Pieces that overlap, of a mesh that replicates, may make more than the whole.
    """
    written: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for entry in entries:
        written[entry.name] = written.get(entry.name, 0) + prod(entry.sizes)
        wanted[entry.name] = prod(entry.shape)
    for name, size in wanted.items():
        if written[name] < size:
            raise CheckpointError(
                f"the ranks wrote {written[name]} of the {size} elements of {name}: a rank that holds a part of it has "
                "not saved it"
            )


def _check_needs(fragment: Fragment, entries: Mapping[str, Entry]) -> None:
    missing = [need for need in fragment.needs if need not in entries]
    if missing:
        raise CheckpointError(
            f"no rank wrote {missing[0]} ({len(missing)} such), which rank {fragment.rank} needs: the ranks disagree "
            "on what is replicated"
        )
    for key, value in fragment.replicas.items():
        if key in entries:
            _check_equal(fragment, key, entries[key], value)


def _check_equal(fragment: Fragment, key: str, known: Entry, value: str) -> None:
    if known.xxh3 != value:
        raise CheckpointError(
            f"{known.name} should be the same on every rank, but rank {fragment.rank} holds {value} where {known.file} "
            f"has {known.xxh3} ({key}, step {fragment.step}): the replicas have parted"
        )
