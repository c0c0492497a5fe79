"""What a script has left open when it ends is written, though nothing is torn down."""

import gzip
import shelve
import subprocess
import sys
import zipfile

LEAVES = """
import ctypes, gzip, os, shelve, sys, tempfile, zipfile
from everstep.launcher import unflushed
os.chdir(sys.argv[1])
text = open("text", "w")
text.write("a line")
plain = open("plain", "wb")
plain.write(b"bytes")
packed = gzip.open("packed", "wt")
packed.write("zipped")
archive = zipfile.ZipFile("archive", "w")
archive.writestr("a", "b")
shelf = shelve.open("shelf", writeback=True)
shelf["a"] = []
shelf["a"].append(1)
temporary = tempfile.NamedTemporaryFile(dir=".", prefix="temporary")
closed = open("closed", "w")
closed.close()
full = open("/dev/full", "w")
full.write("lost")
ctypes.CDLL(None).printf(b"C's own")
unflushed.write()
os._exit(3)
"""


def test_all_that_is_left_open_is_written_and_what_cannot_be_is_told(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "text").read_text() == "a line"
    assert (tmp_path / "plain").read_bytes() == b"bytes"
    with gzip.open(tmp_path / "packed", "rt") as file:
        assert file.read() == "zipped"
    with zipfile.ZipFile(tmp_path / "archive") as archive:
        assert archive.read("a") == b"b"
    with shelve.open(str(tmp_path / "shelf")) as shelf:
        assert shelf["a"] == [1]
    assert not list(tmp_path.glob("temporary*"))
    assert done.stdout == "C's own"
    assert "/dev/full" in done.stderr
    assert "what it still held is lost: [Errno 28]" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
