"""One examination for every way to the disk: the real one, and the hostile ones while nothing is wounded."""

import errno
import os

import pytest

from everstep.checkpoint.fileops import PosixFiles, put, write_all
from everstep.errors import CheckpointError
from everstep.testing.disks import KINDS, HostileFiles, PowerLoss, UnsyncedFiles, Wound


@pytest.fixture(params=["posix", "unsynced", "hostile", "power"])
def files(request, tmp_path):
    made = {
        "posix": PosixFiles,
        "unsynced": UnsyncedFiles,
        "hostile": HostileFiles,
        "power": lambda: PowerLoss(str(tmp_path)),
    }
    return made[request.param]()


def names_in(path):
    return sorted(os.listdir(path))


def test_create_is_exclusive_and_what_is_written_is_there(files, tmp_path):
    path = str(tmp_path / "a")
    fd = files.create(path)
    write_all(files, fd, b"hello ", path)
    write_all(files, fd, memoryview(b"world"), path)
    files.fsync(fd)
    files.close(fd)
    files.fsync_dir(str(tmp_path))
    assert (tmp_path / "a").read_bytes() == b"hello world"
    with pytest.raises(FileExistsError):
        files.create(path)
    with pytest.raises(OSError, match="Bad file"):
        PosixFiles().write(fd, b"x")


def test_directories_are_made_listed_renamed_and_removed(files, tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    files.mkdir(one)
    with pytest.raises(FileExistsError):
        files.mkdir(one)
    put(files, one + "/b", b"1")
    put(files, one + "/a", b"2")
    assert files.listdir(one) == ["a", "b"]
    files.rename(one, two)
    assert (names_in(tmp_path), names_in(two)) == (["two"], ["a", "b"])
    with pytest.raises(OSError, match="not empty"):
        files.rmdir(two)
    for name in ("a", "b"):
        files.unlink(f"{two}/{name}")
    files.rmdir(two)
    assert names_in(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        files.listdir(two)
    with pytest.raises(FileNotFoundError):
        files.unlink(two)


def test_a_directory_does_not_take_the_name_of_one_that_holds_something(files, tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    for path in (one, two):
        files.mkdir(path)
        put(files, path + "/x", path.encode())
    with pytest.raises(OSError, match=r"not empty|exists"):
        files.rename(one, two)
    files.exchange(one, two)
    assert (tmp_path / "two" / "x").read_bytes() == one.encode()
    assert (tmp_path / "one" / "x").read_bytes() == two.encode()


def test_exchange_with_nothing_is_an_error(files, tmp_path):
    files.mkdir(str(tmp_path / "one"))
    with pytest.raises(OSError, match="No such file"):
        files.exchange(str(tmp_path / "one"), str(tmp_path / "none"))


def test_exchange_falls_back_where_the_file_system_cannot(tmp_path, monkeypatch):
    class Refusing:
        @staticmethod
        def renameat2(*_):
            return -1

    monkeypatch.setattr("everstep.checkpoint.fileops._LIBC", Refusing)
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EINVAL)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    PosixFiles().exchange(str(tmp_path / "one"), str(tmp_path / "two"))
    assert (names_in(tmp_path / "one"), names_in(tmp_path / "two")) == (["two"], ["one"])


def test_short_writes_are_gone_on_with_and_no_progress_is_an_error(tmp_path):
    class Short(PosixFiles):
        def write(self, fd, data):
            return super().write(fd, data[: min(3, len(data))])

    put(Short(), str(tmp_path / "a"), b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"

    class Stuck(PosixFiles):
        def write(self, fd, data):
            return 0

    with pytest.raises(CheckpointError, match="took 0 of 10"):
        put(Stuck(), str(tmp_path / "b"), b"0123456789")


@pytest.mark.parametrize("kind", ["write", "fsync"])
def test_an_error_by_descriptor_names_its_file(tmp_path, kind):
    files = HostileFiles({(kind, 1): Wound(errno.EIO)})
    with pytest.raises(OSError, match="error") as caught:
        put(files, str(tmp_path / "a"), b"x")
    assert caught.value.filename == str(tmp_path / "a")


def test_a_wound_hits_its_call_and_no_other(tmp_path):
    files = HostileFiles({("create", 2): Wound(errno.ENOSPC)})
    put(files, str(tmp_path / "a"), b"x")
    with pytest.raises(OSError, match="No space"):
        put(files, str(tmp_path / "b"), b"x")
    put(files, str(tmp_path / "c"), b"x")
    assert files.calls["create"] == 3
    assert set(files.calls) <= {*KINDS, "any"}


def test_after_a_loss_of_power_only_what_was_synced_is_left(tmp_path):
    (tmp_path / "d").mkdir()
    files = PowerLoss(str(tmp_path / "d"))
    put(files, str(tmp_path / "d/a"), b"kept")
    files.fsync_dir(str(tmp_path / "d"))
    put(files, str(tmp_path / "d/b"), b"its name is lost")
    fd = files.create(str(tmp_path / "d/c"))
    files.fsync_dir(str(tmp_path / "d"))
    files.write(fd, b"its content is lost")
    files.unlink(str(tmp_path / "d/a"))
    files.after(str(tmp_path / "after"), None)
    assert names_in(tmp_path / "after") == ["a", "b", "c"]
    assert (tmp_path / "after/a").read_bytes() == b"kept"
    assert (tmp_path / "after/c").read_bytes() == b""
    files.close(fd)
