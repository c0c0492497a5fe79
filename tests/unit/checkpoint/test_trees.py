"""Any tree of tensors, arrays and values comes back the same, through memory and through a disk."""

import copy
import tempfile
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.checkpoint.walk import StateWalk
from everstep.testing.kept import Kept
from everstep.testing.same import differs, overlaps

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip
ARRAYS = ["<f8", "<f4", ">i2", "<u8", "|b1", "<c16", "<U3", "|S4", "<M8[s]", "<m8[D]", "<f2"]


@st.composite
def tensors(draw):
    """Any bits of any dtype; transposed, every other, expanded, conjugate, negative, a slice, a parameter."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = torch.Size(shape).numel()
    content = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        content = bytes(b % 2 for b in content)
    value = torch.frombuffer(bytearray(content or b"\0" * 16), dtype=torch.uint8)[: len(content)].clone()
    value = value.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return VIEWS[draw(st.sampled_from(sorted(VIEWS)))](value)


VIEWS = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.dim() > 1 else t,
    "every other": lambda t: t[::2] if t.dim() else t,
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "conjugate": lambda t: t.conj() if t.is_complex() else t,
    "negative": lambda t: t.conj().imag if t.is_complex() else t,
    "parameter": lambda t: torch.nn.Parameter(t) if t.dtype == torch.float32 else t,
}


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(ARRAYS)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    count = int(np.prod(shape))
    if dtype.kind == "U":
        return np.array(draw(st.lists(st.text(max_size=3), min_size=count, max_size=count)), dtype).reshape(shape)
    content = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype.kind == "b":
        content = bytes(b % 2 for b in content)
    made = np.frombuffer(bytearray(content), dtype).reshape(shape) if count else np.empty(shape, dtype)
    return made[()] if draw(st.booleans()) and not shape else np.asfortranarray(made)


texts = st.text(st.characters(exclude_categories=()), max_size=6)  # surrogates too
numbers = st.one_of(
    st.integers(), st.integers(-(2**2000), 2**2000), st.floats(), st.complex_numbers(allow_nan=True), st.booleans()
)
longer = st.sampled_from([4096, 4097, 9000]).map(lambda n: bytes(range(256)) * (n // 256) + bytes(n % 256))
byte_strings = st.one_of(st.binary(max_size=8), longer)
plain = st.one_of(st.none(), numbers, texts, byte_strings, byte_strings.map(bytearray))
hashable = st.one_of(st.none(), numbers, texts, st.binary(max_size=4), st.tuples(texts, numbers))
leaves = st.one_of(plain, tensors(), arrays(), st.sets(hashable, max_size=3), st.frozensets(hashable, max_size=3))


def containers(children):
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(hashable, children, max_size=4),
        st.dictionaries(hashable, children, max_size=3).map(OrderedDict),
        st.dictionaries(texts, numbers, max_size=3).map(Counter),
        st.lists(children, max_size=3).map(lambda v: deque(v, 5)),
    )


trees = st.recursive(leaves, containers, max_leaves=12)


class Box:
    def __init__(self, value=None) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def round_trip(tree, disk: bool, form: str):
    """Return what comes back of a tree that is saved, in one of two forms, and restored into something empty."""
    given_state = {"box": Box(tree)} if form == "object" else {"box": {"value": tree}}
    kept = Kept(StateWalk(given_state, values=True))
    back = {"box": Box() if form == "object" else {}}
    walk = StateWalk(back, values=True)
    if disk:
        with tempfile.TemporaryDirectory() as folder:
            kept.restore_from_disk(walk, folder)
    else:
        kept.restore(walk)
    return back["box"].value if form == "object" else back["box"]["value"], kept


FORMS = st.sampled_from(["object", "value"])
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=150, suppress_health_check=QUIET, deadline=None)
@given(trees, FORMS)
def test_any_tree_comes_back_through_memory(tree, form):
    back, _ = round_trip(tree, disk=False, form=form)
    assert differs(tree, back) == ""
    assert overlaps(back) == overlaps(tree)


@settings(max_examples=40, suppress_health_check=QUIET, deadline=None)
@given(trees, FORMS)
def test_any_tree_comes_back_through_a_disk(tree, form):
    back, _ = round_trip(tree, disk=True, form=form)
    assert differs(tree, back) == ""
    assert overlaps(back) == overlaps(tree)


@pytest.mark.long
@pytest.mark.timeout(1200)
@settings(max_examples=1000, suppress_health_check=QUIET, deadline=None)
@given(trees, FORMS, st.booleans())
def test_any_tree_comes_back_at_length(tree, form, disk):
    back, kept = round_trip(tree, disk, form)
    assert differs(tree, back) == ""
    assert overlaps(back) == overlaps(tree)
    again, twice = round_trip(back, False, form)
    assert differs(tree, again) == ""
    assert len(twice.bytes) == len(kept.bytes)


@settings(max_examples=60, suppress_health_check=QUIET, deadline=None)
@given(trees, trees)
def test_a_structure_may_change_between_saves(first, second):
    """CS-05: the same walk over another tree, and over the first again, tells what a fresh one tells."""
    box = Box(first)
    walk = StateWalk({"box": box}, values=True)
    for tree in (first, second, first):
        box.value = tree
        assert Kept(walk).text == Kept(StateWalk({"box": Box(tree)}, values=True)).text


@st.composite
def windows(draw):
    """Views of one memory: overlapping, beside one another, of other shapes and types."""
    whole = torch.arange(64, dtype=torch.int16)
    views = []
    for _ in range(draw(st.integers(2, 6))):
        begin = draw(st.integers(0, 48))
        view = whole[begin : begin + draw(st.sampled_from([1, 4, 8, 16]))]
        match draw(st.integers(0, 4)):
            case 1 if view.numel() == 16:
                view = view.view(4, 4).t()
            case 2:
                view = view[::2]
            case 3 if begin % 2 == 0 and view.numel() % 2 == 0:
                view = view.view(torch.int32)
            case 4:
                view = view.detach()
        views.append(view)
    return views


@settings(max_examples=150, deadline=None)
@given(windows(), FORMS)
def test_what_overlapped_in_memory_overlaps_again(views, form):
    back, _ = round_trip(views, disk=False, form=form)
    assert differs(views, back) == ""
    assert overlaps(back) == overlaps(views)
    back[0].fill_(-1)
    expected = copy.deepcopy(views)
    expected[0].fill_(-1)
    assert differs(expected, back) == ""


def test_an_object_in_two_places_is_one_again():
    w = torch.ones(3)
    back, kept = round_trip({"a": w, "b": [w], "c": w.view(3, 1)}, disk=True, form="object")
    assert back["a"] is back["b"][0]
    back["a"].add_(1)
    assert back["c"].tolist() == [[2.0]] * 3
    assert len(kept.bytes) < 4096 * 3


def test_a_slice_does_not_bring_its_parent(keep, tmp_path):
    """CS-17: a thousand elements of a million, a hundred times; transposed, expanded and every-other ones too."""
    big = torch.arange(1_000_000.0)
    views = {f"p{i}": big[i * 1000 : (i + 1) * 1000] for i in range(100)}
    views |= {"t": big[:600].view(20, 30).t(), "e": big[7:8].expand(500), "o": big[1000:3000:2]}
    visible = sum(v.numel() * 4 for v in views.values())
    kept = keep({"box": Box(views)})
    back = Box()
    kept.restore_from_disk(StateWalk({"box": back}), str(tmp_path))
    assert differs(views, back.value) == ""
    assert len(kept.bytes) < 2 * visible
    assert sum(f.stat().st_size for f in (tmp_path / "step-1").iterdir()) < 2 * visible
    spans = [(t.data_ptr(), t.untyped_storage().nbytes()) for t in back.value.values()]
    assert all(size <= 4 * 4096 for _, size in spans)
