"""The layout's JSON gives back exactly what it was given, or refuses by name."""

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.core.layout import (
    ALIGNMENT,
    ITEM_BYTES,
    Encoder,
    Layout,
    Leaf,
    Ref,
    Section,
    align,
    decode,
    encode,
    expected_bytes,
    place,
    qualified,
)
from everstep.errors import DamagedCheckpoint


def same(a: object, b: object) -> bool:
    """Equal in type, order, sign of zero and bits of nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def through(value: object) -> object:
    return decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False)))


NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff800000000beef"))[0]

CASES = [
    None, True, 0, -1, 2**64, -(2**70), 10**5000, 0.0, -0.0, 1e-310, math.inf, -math.inf, math.nan, NAN_WITH_PAYLOAD,
    complex(-0.0, math.nan), "", "ü\n\x00", b"", b"\x00\xff", bytearray(b"ab"), [], (), {}, [[]], {"a": {}},
    (1, (2, [3])),     {"!": 1, "x": 2}, {"!a": 1}, {1: "one", "1": "text", (1, "t"): None, None: 0, False: 1.5},
    {"/": 1, "..": 2, ".": 3},
    OrderedDict(b=1, a=2), Counter({30: 1, 80: 2}), deque([1, 2], 3), deque(), {1, 2, 3}, frozenset({"a", (1,)}),
    [Ref(0), {"w": Ref(7)}],
]  # fmt: skip


@pytest.mark.parametrize("value", CASES, ids=lambda v: type(v).__name__)
def test_every_kind_of_value_comes_back(value):
    assert same(through(value), value)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
_KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(_KEYS, inner) | st.lists(inner).map(tuple),
    max_leaves=15,
)


@settings(max_examples=60, deadline=None, database=None)
@given(_TREES)
def test_any_tree_comes_back(value):
    assert same(through(value), value)


class _Colour(enum.IntEnum):
    RED = 1


_Point = namedtuple("_Point", "x y")


@pytest.mark.parametrize(
    "value",
    [_Colour.RED, _Point(1, 2), Path("a"), object(), defaultdict(list), lambda: 0],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_any_other_object_is_refused_by_its_key(value):
    with pytest.raises(TypeError, match=r"^scheduler/deep/1/k is a .*state_dict\(\)"):
        encode({"deep": [0, {"k": value}]}, "scheduler")


def test_a_container_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        encode(loop, "x")


def leaf(path: str, shape=(3,), **more) -> Leaf:
    return Leaf(path, "float32", shape, 4 * math.prod(shape), **more)


def sample() -> Layout:
    leaves, end = place(
        [
            leaf("model/emb.weight", (5, 3), global_shape=(10, 3), offsets=(5, 0), placements=("S(0)",)),
            leaf("model/head.weight", (5, 3), alias_of="model/emb.weight", global_shape=(10, 3), offsets=(5, 0)),
            leaf("model/scale", (), replicated=True, device="cuda"),
            leaf("model/empty", (0, 3), per_rank=True, stride=(1, 2)),
        ]
    )
    own, _ = place([Leaf("rng/numpy/1", "<u4", (624,), 2496, kind="array", per_rank=True)], end)
    return Layout(
        1, 2,
        (
            Section("model", {"emb.weight": Ref(0), "head.weight": Ref(1), "scale": Ref(2), "empty": Ref(3)}, leaves),
            Section("rng", {"numpy": ("MT19937", Ref(0), 3)}, own, per_rank=True),
        ),
    )  # fmt: skip


def test_a_layout_comes_back():
    layout = sample()
    assert Layout.from_json(layout.to_json()) == layout


def test_places_are_aligned_and_aliases_lie_where_their_original_does():
    layout = sample()
    emb, head, scale, empty, numpy = layout.leaves()
    assert all(e.offset % ALIGNMENT == 0 for e in layout.leaves())
    assert head.offset == emb.offset
    assert scale.offset == align(emb.nbytes) == 64
    assert empty.offset == numpy.offset == 128
    assert layout.payload_bytes == 128 + 2496


def test_defaults_stand_for_a_whole_tensor():
    whole = leaf("model/w", (2, 3))
    assert whole.whole_shape == (2, 3)
    assert whole.starts == (0, 0)
    assert set(whole.to_json()) == {"path", "dtype", "shape", "nbytes"}
    assert qualified("rng/torch", 3) == "ranks/3/rng/torch"
    assert expected_bytes(whole) == 24
    assert all(size in (1, 2, 4, 8, 16) for size in ITEM_BYTES.values())


def test_an_encoder_reuses_what_is_the_same_object_and_sees_what_is_not():
    layout, encoder = sample(), Encoder()
    first = encoder.encode(layout)
    assert encoder.encode(layout) == first
    model = layout.sections[0]
    moved = Layout(1, 2, (model, Section("rng", {"python": 2}, (), per_rank=True)))
    assert encoder.encode(moved) == moved.to_json()
    assert Layout.from_json(encoder.encode(moved)) == moved


def test_a_reader_of_today_reads_fields_of_tomorrow():
    body = json.loads(sample().to_json())
    body["later"] = 1
    body["sections"][0]["leaves"][0]["later"] = 1
    assert Layout.from_json(json.dumps(body).encode()) == sample()


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"v":2}', b'{"v":1}', b'{"v":1,"rank":0,"world_size":1,"sections":[{"name":"a"}]}'],
)  # fmt: skip
def test_a_damaged_description_says_so(text):
    with pytest.raises(DamagedCheckpoint, match="another copy"):
        Layout.from_json(text)


def test_no_cut_of_the_text_is_taken_for_a_layout():
    text = sample().to_json()
    for length in range(0, len(text), 7):
        with pytest.raises(DamagedCheckpoint):
            Layout.from_json(text[:length])
