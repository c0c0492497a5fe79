"""The hand-made archive is what torch.save makes: torch reads it, so does any zip reader, bit for bit."""

import io
import zipfile
import zlib

import pytest

from everstep.checkpoint.core.archive import ALIGNMENT, STORAGES, UNTYPED, TensorArchive, item_bytes, value_archive

torch = pytest.importorskip("torch")
SHAPES = [(), (0,), (3,), (2, 3), (4, 0, 2), (300, 7)]


def archive(dtype, shape):
    size = item_bytes(dtype) * torch.Size(shape).numel()
    raw = torch.randint(0, 2, (size,), dtype=torch.uint8).numpy().tobytes()
    made = TensorArchive(dtype, shape)
    whole = made.head + raw + made.tail(zlib.crc32(raw))
    assert len(whole) == made.length
    assert len(made.head) % ALIGNMENT == 0
    return whole, raw


@pytest.mark.parametrize("dtype", [*STORAGES, *UNTYPED])
def test_every_element_type_and_shape_is_read_by_torch_without_trust(dtype):
    for shape in SHAPES:
        whole, raw = archive(dtype, shape)
        tensor = torch.load(io.BytesIO(whole), weights_only=True)
        expected = torch.empty(shape, dtype=getattr(torch, dtype))
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert not raw or tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == raw
        assert zipfile.ZipFile(io.BytesIO(whole)).testzip() is None


@pytest.mark.parametrize("value", [1, -(2**70), 1.5, "text", True, None, [1, {"a": (2, None)}], {"k": b"bytes"}])
def test_plain_values_are_read_by_torch(value):
    assert torch.load(io.BytesIO(value_archive(value)), weights_only=False) == value


def test_the_same_tensor_gives_the_same_bytes():
    assert TensorArchive("float32", (2, 3)).head == TensorArchive("float32", (2, 3)).head


def test_an_unknown_element_type_is_refused_with_the_mend():
    with pytest.raises(ValueError, match="convert the tensor before saving"):
        TensorArchive("quint8", (2,))


def test_beyond_four_gib_sizes_and_places_are_written_in_64_bits():
    made = TensorArchive("uint8", (5 << 30,))
    tail = made.tail(0)
    assert len(made.head) % ALIGNMENT == 0
    assert (5 << 30).to_bytes(8, "little") in tail
    assert b"PK\x06\x06" in tail


@pytest.mark.long
def test_a_sparse_archive_of_five_gib_is_read_by_torch(tmp_path):
    made = TensorArchive("uint8", (5 << 30,))
    with open(tmp_path / "big", "wb") as file:
        file.write(made.head)
        file.seek(5 << 30, io.SEEK_CUR)
        file.write(made.tail(0))
    tensor = torch.load(tmp_path / "big", weights_only=True, mmap=True)
    assert tensor.shape == (5 << 30,)
    assert tensor[-1] == 0
