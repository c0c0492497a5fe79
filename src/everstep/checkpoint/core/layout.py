"""What one rank's snapshot holds and where: a tree of plain values whose tensors are leaves of one payload.

Rule 1: a snapshot is sections (`model`, `optimizer/state`, …), each a tree and its leaves. The bytes of a leaf lie
    in the payload in row-major order of its local shape, at an offset aligned to 64 bytes.
Rule 2: exact or refused. Numbers keep every bit (nan payloads, -0.0, ints of any size), containers their type and
    order, keys their type; whatever else is met is a TypeError that names its key, at save time.
Rule 3: an alias is a leaf of its own whose bytes are the original's: `alias_of` names it, the bytes lie there once.
Rule 4: who else holds the same bytes is said, never guessed by a reader:
    sharded     `offsets` and `shape` are this rank's rectangle of `global_shape`
    replicated  every rank of the world holds this rectangle, bit for bit: one of them need write it (C8)
                (ranks with one rectangle of one DTensor are replicas too, where a mesh dimension replicates)
    per_rank    belongs to this rank alone and may differ from a namesake: `qualified` makes its name unique
                (`leads`: rank 0's is what all ranks have after the next step)
Rule 5: the JSON carries a version; a reader of version 1 ignores fields it does not know.

Names: `model/<fqn>`, `optimizer/state/<fqn>/<key>`, `optimizer/param_groups/<n>/<key>`, `rng/<generator>`, and
`<keyword>/…` for every other object given to `run.steps`. This module knows no torch and no numpy: `walk` turns their
objects into leaves.
"""

import base64
import json
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite, prod
from typing import Any, NoReturn, cast

from everstep.errors import DamagedCheckpoint

VERSION = 1
ALIGNMENT = 64
MAX_DEPTH = 100
ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of one element of each torch dtype that a snapshot may hold (names without `torch.`)."""

Node = Any
"""None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict, Counter, deque, set,
frozenset, of such; a leaf stands as `Ref`, several of one tensor as `Pieces`, a pickled object as `Pickled`."""


@dataclass(frozen=True, slots=True)
class Ref:
    """In a tree: here stands the leaf with this index of its section."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Pickled:
    """In a tree: here stands an object that was pickled, since the save allowed it; the leaf holds its bytes."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """In a tree: here stand all leaves that are this rank's part of one tensor, none or several.

    A rank of FSDP1 holds a range of a parameter's elements, as rectangles; one of a ShardedTensor any number of shards.
    """

    leaves: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str
    spec: Any = None  # plain values from which the object is made again, where no live one takes the bytes


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor, array or numpy scalar of this rank, and where its bytes lie."""

    path: str
    dtype: str  # torch's name without `torch.`; numpy's `dtype.str` for arrays and scalars
    shape: tuple[int, ...]  # local: what lies in the payload
    nbytes: int
    offset: int = 0  # in the payload
    kind: str = "tensor"  # tensor | array | scalar (these two are numpy's) | bytes | bytearray | pickle
    global_shape: tuple[int, ...] | None = None  # None: equal to shape
    offsets: tuple[int, ...] | None = None  # of this shard in the global tensor; None: all zero
    alias_of: str | None = None  # path of the leaf whose bytes these are
    replicated: bool = False
    per_rank: bool = False
    placements: tuple[str, ...] = ()  # of a DTensor, one a mesh dimension: S(0), R; empty for a plain tensor
    stride: tuple[int, ...] = ()  # in the live process, where not row-major; the payload always is
    device: str = "cpu"  # type of the device it lived on
    shares: tuple[int, int, int] | None = None  # how it overlapped others of its section in memory (core/sharing.py)
    leads: bool = False  # of what differs by rank: rank 0's is what all have after the next step (DDP's buffers)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the tensor over all ranks."""
        return self.shape if self.global_shape is None else self.global_shape

    @property
    def starts(self) -> tuple[int, ...]:
        """Where this rank's rectangle begins in the whole tensor."""
        return (0,) * len(self.shape) if self.offsets is None else self.offsets

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {n: getattr(self, n) for n, default in _LEAF_FIELDS.items() if getattr(self, n) != default}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Leaf":
        """Read what `to_json` wrote; raises KeyError or TypeError for anything else."""
        known: dict[str, Any] = {n: tuple(v) if type(v) is list else v for n, v in body.items() if n in _LEAF_FIELDS}
        return cls(**known)


_LEAF_FIELDS: dict[str, Any] = {f.name: f.default if f.default is not MISSING else None for f in fields(Leaf)}


@dataclass(frozen=True, slots=True)
class Section:
    """One named part of a snapshot. Reused as it is between steps while nothing in it but payload bytes changes."""

    name: str
    tree: Node
    leaves: tuple[Leaf, ...] = ()
    per_rank: bool = False  # the tree's plain values belong to this rank alone
    text: str | None = field(default=None, compare=False, repr=False)  # JSON of the tree, where it is known already
    kind: str = ""  # the class whose state this is, where another would take it for its own


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's snapshot, described."""

    rank: int
    world_size: int
    sections: tuple[Section, ...]

    def leaves(self) -> Iterator[Leaf]:
        """All leaves, aliases included, in payload order of their sections."""
        for section in self.sections:
            yield from section.leaves

    def section(self, name: str) -> Section | None:
        """Return the section of that name."""
        return next((s for s in self.sections if s.name == name), None)

    @property
    def payload_bytes(self) -> int:
        """Length of the payload."""
        return max((leaf.offset + leaf.nbytes for leaf in self.leaves()), default=0)

    def to_json(self) -> bytes:
        """Return the JSON form. `Encoder` does the same and remembers what did not change."""
        return Encoder().encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> "Layout":
        """Read what `to_json` wrote; DamagedCheckpoint for anything else."""
        try:
            body = json.loads(text)
            if body["v"] != VERSION:
                raise ValueError(f"version {body['v']}, this reader knows {VERSION}")
            sections = tuple(
                Section(
                    s["name"],
                    decode(s["tree"]),
                    tuple(map(Leaf.from_json, s["leaves"])),
                    s.get("per_rank", False),
                    kind=s.get("kind", ""),
                )
                for s in body["sections"]
            )
            return cls(body["rank"], body["world_size"], sections)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise DamagedCheckpoint(
                f"the description of a snapshot cannot be read ({type(error).__name__}: {error}); expected the JSON "
                f"of layout version {VERSION}. Restore from another copy."
            ) from error


class Encoder:
    """Writes layouts as JSON and keeps the text of sections that come again as the same object."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[Section, bytes]] = {}

    def encode(self, layout: Layout) -> bytes:
        """Return the JSON form of `layout`. Raises TypeError naming the key of a value that has none."""
        head = f'{{"v":{VERSION},"rank":{layout.rank},"world_size":{layout.world_size},"sections":['
        return b"".join([head.encode(), b",".join([self._section(s) for s in layout.sections]), b"]}"])

    def _section(self, section: Section) -> bytes:
        known = self._texts.get(section.name)
        if known is not None and known[0] is section:
            return known[1]
        tree = printed(section.tree, section.name) if section.text is None else section.text
        leaves = compact([leaf.to_json() for leaf in section.leaves]) if section.leaves else "[]"
        own = "true" if section.per_rank else "false"
        kind = f'"kind":{compact(section.kind)},' if section.kind else ""
        text = f'{{"name":{compact(section.name)},{kind}"per_rank":{own},"leaves":{leaves},"tree":{tree}}}'.encode()
        self._texts[section.name] = (section, text)
        return text


def align(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple of `alignment` from `offset` on."""
    return -(-offset // alignment) * alignment


def place(leaves: Iterable[Leaf], start: int = 0) -> tuple[tuple[Leaf, ...], int]:
    """Give each leaf its offset, from `start` on; return them and the end. Aliases get their original's place."""
    placed: dict[str, Leaf] = {}
    end = start
    for leaf in leaves:
        if leaf.alias_of is not None:
            placed[leaf.path] = _at(leaf, placed[leaf.alias_of].offset)
            continue
        offset = align(end)
        placed[leaf.path] = _at(leaf, offset)
        end = offset + leaf.nbytes
    return tuple(placed.values()), end


def _at(leaf: Leaf, offset: int) -> Leaf:
    """`dataclasses.replace`, at a fifth of its cost: done for every leaf at every restart."""
    return Leaf(
        leaf.path, leaf.dtype, leaf.shape, leaf.nbytes, offset, leaf.kind, leaf.global_shape, leaf.offsets,
        leaf.alias_of, leaf.replicated, leaf.per_rank, leaf.placements, leaf.stride, leaf.device, leaf.shares,
        leaf.leads,
    )  # fmt: skip


def qualified(path: str, rank: int) -> str:
    """Return the name, unique in the world, of a per-rank entry."""
    return f"ranks/{rank}/{path}"


def expected_bytes(leaf: Leaf) -> int | None:
    """Return how many bytes a tensor leaf must have; None where this module does not know the dtype."""
    size = ITEM_BYTES.get(leaf.dtype) if leaf.kind == "tensor" else None
    return None if size is None else size * prod(leaf.shape)


# The tree's JSON. A value that JSON has exactly stands as itself; any other is {"!": its type, "x": its content}.

_TAG = "!"
_SMALL_INT_BITS = 1024  # above: hexadecimal, since Python refuses to print ints of more than 4,300 digits


def _tagged(tag: str, content: Any) -> dict[str, Any]:
    return {_TAG: tag, "x": content}


def _float(value: float) -> Any:
    return value if isfinite(value) else _tagged("float", struct.pack(">d", value).hex())


def _unfloat(content: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(content))[0])


def _int(value: int) -> Any:
    return value if value.bit_length() <= _SMALL_INT_BITS else _tagged("int", hex(value))


def _seq(values: Iterable[Any], path: str, depth: int) -> list[Any]:
    return [encode(v, f"{path}/{n}", depth + 1) for n, v in enumerate(values)]


def _pairs(value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
    deeper = depth + 1
    return [[encode(k, f"{path}/{k!r} (a key)", deeper), encode(v, f"{path}/{k}", deeper)] for k, v in value.items()]


def _dict(value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
    if all(type(k) is str for k in value) and _TAG not in value:
        return {k: encode(v, f"{path}/{k}", depth + 1) for k, v in value.items()}
    return _tagged("dict", _pairs(value, path, depth))


def _set(value: Iterable[Any], path: str, depth: int) -> list[Any]:
    return sorted(_seq(value, path, depth), key=json.dumps)


_ENCODERS: dict[type, Callable[[Any, str, int], Any]] = {
    type(None): lambda v, p, d: v,
    bool: lambda v, p, d: v,
    str: lambda v, p, d: v,
    int: lambda v, p, d: _int(v),
    float: lambda v, p, d: _float(v),
    complex: lambda v, p, d: _tagged("complex", [_float(v.real), _float(v.imag)]),
    bytes: lambda v, p, d: _tagged("bytes", base64.b64encode(v).decode()),
    bytearray: lambda v, p, d: _tagged("bytearray", base64.b64encode(v).decode()),
    list: lambda v, p, d: v if all(type(x) is str for x in v) else _seq(v, p, d),
    tuple: lambda v, p, d: _tagged("tuple", _seq(v, p, d)),
    dict: _dict,
    OrderedDict: lambda v, p, d: _tagged("OrderedDict", _pairs(v, p, d)),
    Counter: lambda v, p, d: _tagged("Counter", _pairs(v, p, d)),
    deque: lambda v, p, d: _tagged("deque", [v.maxlen, _seq(v, p, d)]),
    set: lambda v, p, d: _tagged("set", _set(v, p, d)),
    frozenset: lambda v, p, d: _tagged("frozenset", _set(v, p, d)),
    Ref: lambda v, p, d: _tagged("leaf", v.leaf),
    Pieces: lambda v, p, d: _tagged("pieces", [[*v.leaves], [*v.shape], v.dtype, encode(v.spec, p, d + 1)]),
    Pickled: lambda v, p, d: _tagged("pickled", v.leaf),
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": _unfloat,
    "int": lambda x: int(x, 16),
    "complex": lambda x: complex(decode(x[0]), decode(x[1])),
    "bytes": lambda x: base64.b64decode(x, validate=True),
    "bytearray": lambda x: bytearray(base64.b64decode(x, validate=True)),
    "tuple": lambda x: tuple(map(decode, x)),
    "dict": lambda x: {decode(k): decode(v) for k, v in x},
    "OrderedDict": lambda x: OrderedDict((decode(k), decode(v)) for k, v in x),
    "Counter": lambda x: Counter({decode(k): decode(v) for k, v in x}),
    "deque": lambda x: deque(map(decode, x[1]), x[0]),
    "set": lambda x: set(map(decode, x)),
    "frozenset": lambda x: frozenset(map(decode, x)),
    "leaf": Ref,
    "pieces": lambda x: Pieces(tuple(x[0]), tuple(x[1]), x[2], decode(x[3])),
    "pickled": Pickled,
}

KINDS: frozenset[type] = frozenset(_ENCODERS)
"""The exact types that may stand in a tree; subclasses (enums, named tuples, numpy's float64) are others."""


def encode(value: Node, path: str, depth: int = 0) -> Any:
    """Return what json.dumps prints for `value`. Raises TypeError that names `path` for any other object."""
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise TypeError(unsavable(value, path))
    if depth > MAX_DEPTH:
        raise TypeError(
            f"{path[:200]} is nested deeper than {MAX_DEPTH} levels, or contains itself; a snapshot holds trees."
        )
    return encoder(value, path, depth)


def _refuse(value: object) -> NoReturn:
    raise TypeError(f"a {type(value).__qualname__} has no JSON")


# What `json.dumps` and `json.loads` come down to, made once: they wrap these two in four calls each, at every step.
_encoders: Any = json.encoder
_ascii = _encoders.encode_basestring_ascii
_written: Callable[[Any, int], Iterable[str]] = _encoders.c_make_encoder(
    None, _refuse, _ascii, None, ":", ",", False, False, False
)
_scan: Callable[[str, int], tuple[Any, int]] = cast("Any", json.JSONDecoder()).scan_once


def compact(value: Any) -> str:
    """Return `value` as JSON without blanks. Raises ValueError, TypeError or RecursionError where it has none."""
    return "".join(_written(value, 0))


def parsed(text: str) -> Any:
    """Return what `compact` was given."""
    return _scan(text, 0)[0]


def printed(value: Node, path: str = "") -> str:
    """Return the JSON of a tree."""
    if type(value) is float and isfinite(value):
        return float.__repr__(value)
    return compact(encode(value, path))


def unsavable(value: object, path: str) -> str:
    """Say that an object cannot go into a snapshot, and what to do."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return (
        f"{path} is a {kind}, which a snapshot cannot hold exactly. It holds None, bool, int, float, complex, str, "
        "bytes, list, tuple, dict, set, numpy arrays and tensors. Give its object a state_dict() that returns such, or "
        "pass allow_pickle=True where it is saved and where it is loaded."
    )


def decode(content: Any) -> Node:
    """Return the value that `encode` was given. Raises KeyError, ValueError or TypeError for anything else."""
    if isinstance(content, list):
        return [decode(v) for v in content]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(content, dict):
        if _TAG in content:
            tag = content[_TAG]  # most are leaves
            return Ref(content["x"]) if tag == "leaf" else _DECODERS[tag](content["x"])
        return {k: decode(v) for k, v in content.items()}  # pyright: ignore[reportUnknownVariableType]
    return content
