"""One file that torch reads: whole or not there, and every bit of it covered by the checksum at its end."""

import errno
import os
import random
import zipfile

import pytest

from everstep.checkpoint.archive_file import Record, is_whole, temporary_name, verify, write_archive
from everstep.errors import CheckpointError, DamagedCheckpoint
from everstep.testing.disks import HostileFiles, PowerLoss, UnsyncedFiles, Wound


def write(path, content=b"new", files=None, token="0" * 16):
    records = [Record("data.pkl", content), Record("data/0", bytes(range(256)) * 4), Record("data/1", b"")]
    write_archive(str(path), temporary_name(str(path), token), records, files or UnsyncedFiles())


def content(path):
    verify(str(path))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return archive.read("archive/data.pkl")


def test_every_byte_is_covered_and_every_cut_is_seen(tmp_path):
    path = tmp_path / "x.pt"
    write(path)
    whole = path.read_bytes()
    assert content(path) == b"new"
    for at in {*range(0, len(whole), 11), *range(len(whole) - 120, len(whole))}:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedCheckpoint, match=r"x\.pt: "):
            verify(str(path))
    for length in range(0, len(whole), 61):
        path.write_bytes(whole[:length])
        assert not is_whole(str(path))
        with pytest.raises(DamagedCheckpoint, match=r"x\.pt: "):
            verify(str(path))
    path.write_bytes(whole[:100] + whole[300:])
    assert not is_whole(str(path))
    path.write_bytes(whole + b"x")
    assert not is_whole(str(path))
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        verify(str(tmp_path / "none.pt"))


def test_rows_of_elements_begin_at_multiples_of_64_bytes(tmp_path):
    write(tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    assert whole.index(bytes(range(256)) * 4) % 64 == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_at_any_call_leaves_the_old_file_as_it_was(tmp_path, code):
    path = tmp_path / "x.pt"
    counted = HostileFiles()
    write(tmp_path / "counted.pt", files=counted)
    os.unlink(tmp_path / "counted.pt")
    for position in range(1, counted.calls["any"] + 1):
        write(path, b"old")
        files = HostileFiles({("any", position): Wound(code)})
        with pytest.raises(OSError, match=r"x\.pt|" + str(tmp_path)):
            write(path, files=files)
        assert content(path) in (b"old", b"new" if position == counted.calls["any"] else b"old")
        assert [name for name in os.listdir(tmp_path) if name != "x.pt"] == []


@pytest.mark.parametrize("luck", [None, 0, 1, 2])
def test_power_lost_after_any_call_leaves_the_old_state_or_the_new(tmp_path, luck):
    (tmp_path / "d").mkdir()
    files, seen, last, count = PowerLoss(str(tmp_path / "d")), set(), [None], [0]

    def lose_power():
        count[0] += 1
        files.after(str(tmp_path / "after"), None if luck is None else random.Random(luck * 1000 + count[0]))
        path = tmp_path / "after/x.pt"
        found = content(path) if path.exists() else None
        assert last[0] is None or found is not None
        seen.add(found)

    files.watch = lose_power
    for n, state in enumerate((b"one", b"two")):
        write(tmp_path / "d/x.pt", state, files, token=f"{n:016}")
        last[0] = state
    assert seen == {None, b"one", b"two"}


def test_short_writes_are_gone_on_with(tmp_path):
    class Short(UnsyncedFiles):
        def write(self, fd, data):
            return os.write(fd, data[: max(1, len(data) // 3)])

    write(tmp_path / "x.pt", b"new" * 1000, Short())
    assert content(tmp_path / "x.pt") == b"new" * 1000


def test_a_file_system_that_takes_nothing_is_an_error(tmp_path):
    class Nothing(UnsyncedFiles):
        def write(self, fd, data):
            return 0

    with pytest.raises(CheckpointError, match="took 0 of"):
        write(tmp_path / "x.pt", files=Nothing())
    assert os.listdir(tmp_path) == []


class Far(UnsyncedFiles):
    """A file system that keeps what is not zeros: files of gigabytes that take kilobytes."""

    def write(self, fd, data):
        if len(data) > 4096 and not any(data[:64]) and not any(data[-64:]):
            os.lseek(fd, len(data), os.SEEK_CUR)
        else:
            os.write(fd, data)
        return len(data)


@pytest.mark.long
def test_records_of_more_than_four_gibibytes(tmp_path):
    import mmap

    import torch

    size = (1 << 32) + 5
    path = tmp_path / "x.pt"
    zeros = mmap.mmap(-1, size)
    zeros[size - 1] = zeros[1 << 32] = 7
    write_archive(
        str(path), temporary_name(str(path), "0" * 16), [Record("data.pkl", b"x"), Record("data/0", zeros)], Far()
    )
    verify(str(path))
    with zipfile.ZipFile(path) as archive, archive.open("archive/data/0") as member:
        member.seek(1 << 32)
        assert member.read() == b"\x07\0\0\0\x07"
    reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record_offset("data/0") % 64 == 0
