"""Where a job may find itself: no home, no name, no right here, another's files, no room for temporary files."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
NOBODY = "54321"
"""A user without an entry in the list of users."""
LIMIT_S = 100
TRAIN = """
import os, torch, everstep
@everstep.resilient
def train(run):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in run.steps(3, model=model, optimizer=optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    print("trained by", os.getuid(), flush=True)
train()
"""
SAVE = """
import os, sys, torch
from everstep.checkpoint import Checkpointer
state = {"w": torch.zeros(3)}
with Checkpointer(sys.argv[1], grace=float(os.environ.get("GRACE", "60"))) as ckpt:
    restored = ckpt.restore(state)
    assert restored is None or bool((state["w"] == restored.step).all())
    step = restored.step + 1 if restored else 1
    ckpt.save(step, {"w": torch.full((3,), float(step))})
print("saved", step)
"""


class Place:
    """A folder that every user may enter and only its maker write to, with a script of each kind."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="place-"))
        self.folder.chmod(0o755)
        (self.folder / "train.py").write_text(TRAIN)
        (self.folder / "save.py").write_text(SAVE)

    def own(self, name):
        """A folder of nobody's own."""
        made = self.folder / name
        made.mkdir()
        os.chown(made, int(NOBODY), int(NOBODY))
        return made

    def call(self, *words, user=(), umask=-1, **environment):
        """Run Python; return its exit code and what it said."""
        ours = {name: value for name, value in os.environ.items() if name not in {"HOME", "USER", "LOGNAME"}}
        ours |= {"PYTHONDONTWRITEBYTECODE": "1", **environment}
        command = [*user, sys.executable, *map(str, words)]
        done = subprocess.run(
            command, cwd=self.folder, env=ours, umask=umask, capture_output=True, text=True, timeout=LIMIT_S
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def place():
    made = Place()
    yield made
    shutil.rmtree(made.folder)


@pytest.fixture(scope="module")
def nobody():
    """What runs a command as that user; it may read what root's interpreter is made of, and write nothing of others."""
    words = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
    words += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--bounding-set=-all,+dac_read_search"]
    with contextlib.suppress(OSError):
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    pytest.skip("needs root, and setpriv")


@pytest.fixture(scope="module")
def weak():
    """What runs a command as root without a right to others' files."""
    words = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"]
    with contextlib.suppress(OSError):
        if os.getuid() == 0 and subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    pytest.skip("needs root, and setpriv")


RUN = ("-m", "everstep.cli", "run")
LS = ("-m", "everstep.cli", "checkpoint", "ls")


def test_a_user_without_a_name_or_a_home_in_a_folder_that_is_not_his_saves_where_he_may(place, nobody):
    rw = place.own("rw")
    code, told = place.call(*RUN, "train.py", user=nobody)
    assert code == 78, told
    assert re.search(
        r"everstep-runs/\S+ cannot be written: Permission denied. Name another folder with --run-dir", told
    )
    assert "Traceback" not in told
    assert place.call("save.py", rw / "ckpt", user=nobody) == (0, "saved 1\n")
    code, told = place.call(*LS, rw / "ckpt", user=nobody)
    assert code == 0, told
    assert "step-1" in told


@pytest.mark.long
@pytest.mark.parametrize("umask", [0o077, 0o000, 0o777])
def test_such_a_user_trains_with_any_umask_or_is_told(place, nobody, umask):
    rw = place.own("rw")
    flags = ["--run-dir", rw / "run", "--checkpoint-dir", rw / "ckpt", "--nproc-per-node", "2"]
    code, told = place.call(*RUN, *flags, "train.py", user=nobody, umask=umask)
    if umask == 0o777:
        assert code == 78, told
        assert "Permission denied" in told
        assert "Traceback" not in told
        return
    assert code == 0, told
    assert told.count(f"trained by {NOBODY}") == 2
    assert "Traceback" not in told
    code, told = place.call(*LS, rw / "ckpt", user=nobody)
    assert code == 0
    assert "step-3" in told


@pytest.mark.long
def test_what_another_user_keeps_to_himself_is_told_and_never_taken_for_nothing(place, nobody, weak):
    rw = place.own("rw")
    assert place.call("save.py", rw / "ckpt", user=nobody, umask=0o077)[0] == 0
    for words in (LS, ("-m", "everstep.cli", "checkpoint", "verify"), ("save.py",)):
        code, told = place.call(*words, rw / "ckpt", user=weak)
        assert code != 0, told
        assert "Permission denied" in told
    (rw / "ckpt").chmod(0o777)
    (rw / "ckpt" / ".everstep.lock").unlink()
    code, told = place.call(*LS, rw / "ckpt", user=weak)
    assert re.search(r"1 +\?.* \?  /", told), told
    code, told = place.call("save.py", rw / "ckpt", user=weak, GRACE="10", EVERSTEP_STORAGE_DEADLINE="1")
    assert code != 0, told
    assert "UnreachableStorage" in told
    assert "Permission denied" in told
    assert "saved" not in told


@pytest.mark.long
@pytest.mark.parametrize("kind", ["missing", "full"])
def test_no_room_for_temporary_files_is_no_concern_of_ours(place, kind):
    temporary = place.folder / "temporary"
    if kind == "full":
        temporary.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(temporary)]
        if subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("nothing can be mounted here")
    try:
        with contextlib.suppress(OSError):
            (temporary / "filler").write_bytes(bytes(1 << 20))
        flags = ["--run-dir", place.folder / "run", "--checkpoint-dir", place.folder / "kept", "--nproc-per-node", "2"]
        code, told = place.call(*RUN, *flags, "train.py", TMPDIR=str(temporary))
        assert code == 0, told
        assert place.call("save.py", place.folder / "ckpt", TMPDIR=str(temporary)) == (0, "saved 1\n")
        assert place.call(*LS, place.folder / "kept", TMPDIR=str(temporary))[0] == 0
    finally:
        if kind == "full":
            subprocess.run(["umount", str(temporary)], check=True)
