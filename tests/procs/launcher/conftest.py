"""Real jobs under `everstep run`, each in its own run folder; nothing of a job may outlive its test."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HEAD = """
import os, sys, signal, time, ctypes
import torch, torch.distributed as dist
import everstep
def note(what, **facts):
    import json
    who = {"pid": os.getpid(), "rank": int(os.environ["RANK"]), "at": time.monotonic()}
    with open(os.environ["NOTES"], "a") as f:
        f.write(json.dumps({"what": what, **who, **facts}) + "\\n")
"""


@dataclass
class Ended:
    """What a job left behind."""

    code: int
    out: str
    err: str
    seconds: float
    run_dir: Path
    notes: list[dict] = field(default_factory=list)

    def of(self, what: str) -> list[dict]:
        return [n for n in self.notes if n["what"] == what]

    def events(self, kind: str, node: str = "") -> list[dict]:
        """Of an agent; where there are several, all but the first write in a folder of their own."""
        return [e for e in agent_events(self.run_dir / node) if e["event"] == kind]


def agent_events(run_dir: Path) -> list[dict]:
    """What agents have written into the ledger so far; a torn last line is left out."""
    found = []
    for path in sorted((run_dir / "events").glob("agent-*.jsonl")):
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                found.append(line["is"] | {"event": line["event"], "mono_s": line["at"]["mono_s"]})
    return found


class Job:
    """One running `everstep run`."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *flags: str,
        args: tuple[str, ...] = (),
        env: dict | None = None,
        run_dir: Path | None = None,
        streams: dict | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.run_dir = run_dir or folder / "run"
        self.notes_file = folder / "notes.jsonl"
        self.temporary = Path(tempfile.mkdtemp(prefix="job-"))  # short: torch's loaders put Unix sockets there
        script = folder / "script.py"
        script.write_text(text)
        own = {"NOTES": str(self.notes_file), "EVERSTEP_TEST_MARK": self.mark, "TMPDIR": str(self.temporary)}
        environment = os.environ | own | (env or {})
        command = [
            *prefix,
            sys.executable,
            "-m",
            "everstep.cli",
            "run",
            "--run-dir",
            str(self.run_dir),
            *flags,
            str(script),
            *args,
        ]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | (streams or {})),
            text=True,
            errors="replace",
            env=environment,
            cwd=folder,
            process_group=0,
        )

    def notes(self) -> list[dict]:
        if not self.notes_file.exists():
            return []
        return [json.loads(line) for line in self.notes_file.read_text().splitlines() if line.strip()]

    def of_now(self, what: str) -> list[dict]:
        return [n for n in self.notes() if n["what"] == what]

    def events(self) -> list[dict]:
        return agent_events(self.run_dir)

    def wait_for(self, what: str, count: int = 1, limit_s: float = 120.0) -> list[dict]:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            found = [n for n in self.notes() if n["what"] == what]
            if len(found) >= count:
                return found
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        raise AssertionError(f"{count} x {what!r} did not come in {limit_s} s; notes: {self.notes()}")

    def ended(self, limit_s: float = 240.0) -> Ended:
        out, err = self.process.communicate(timeout=limit_s)
        seconds = time.monotonic() - self.began
        return Ended(self.process.returncode, out or "", err or "", seconds, self.run_dir, self.notes())

    def left(self) -> list[int]:
        """Processes that carry this job's mark, zombies apart."""
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, IndexError):
                if name.isdigit() and self.mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append(int(name))
        return found

    def gone_within(self, limit_s: float) -> float:
        """Wait until nothing of the job is left; return how long it took."""
        began = time.monotonic()
        while self.left():
            assert time.monotonic() - began < limit_s, f"still there after {limit_s} s: {self.left()}"
            time.sleep(0.02)
        return time.monotonic() - began

    def end(self) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path):
    """Start a job: `start(text, *flags, args=…, env=…)`, in the folder of another with `again`.

    `wrapped=None`: the text stands as it is; False: without our import in its head.

    Whatever is left at the end, a process or a temporary file, is a failure.
    """
    jobs: list[Job] = []

    def begin(text: str, *flags: str, wrapped: bool | None = True, again: Job | None = None, **settings) -> Job:
        folder = again.folder if again else tmp_path / f"job{len(jobs)}"
        folder.mkdir(exist_ok=True)
        head = "" if wrapped is None else HEAD if wrapped else HEAD.replace("import everstep\n", "")
        jobs.append(Job(folder, head + text, *flags, **settings))
        return jobs[-1]

    yield begin
    left = {job.folder.name: job.left() for job in jobs if job.process.poll() is not None and job.left()}
    for job in jobs:
        job.end()
    assert not left, f"left behind: {left}"
    files = [file.name for job in jobs for file in job.temporary.iterdir()]
    for job in jobs:
        shutil.rmtree(job.temporary)
    # torch's cache; what multiprocessing keeps in a child, of a user's, that was killed
    assert not [name for name in files if not name.startswith(("torchinductor_", "pymp-"))]
