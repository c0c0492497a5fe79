"""Everything that one GPU can show, each part with a limit, going on after a failed one. Results go to $OUT.

usage: python3 scripts/gpu/on_one_gpu.py [PART[:WORDS] …]        (wheels that the machine lacks lie in .wheels/)

Parts that measure run alone, one after another; tests run several at a time. `results.jsonl` has a line for each part
and each test, `figures.jsonl` what was measured, `logs.tgz` all that was said. WORDS go to the part's command.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = Path(os.environ.get("OUT", "/tmp"))
LOGS = Path("/tmp/parts")
PYTHON = sys.executable
GPU = [PYTHON, "-m", "pytest", "-v", "-rA", "-p", "no:benchmark"]
BENCH = [
    PYTHON, "-m", "everstep.cli", "bench", "checkpoint", "--device", "cuda", "--state", "2GB", "--step", "0.05",
    "--work", "matmul", "--intervals", "1,10,40", "--seconds", "6", "--python", PYTHON, "--limit", "60", "--json",
    "--modes", "everstep,torch.save,dcp.async_save-thread,nvrx",
]  # fmt: skip
MEASURED = {
    "environment": (60, ["bash", "-c", "nvidia-smi --query-gpu=name,driver_version --format=csv; nproc; "
                         "free -g | head -2; df -h /tmp /dev/shm; ls -la /dev/fuse"]),
    "snapshots": (240, [PYTHON, "tests/gpu/checkpoint/test_device.py"]),
    "tests-anew": (120, [*GPU, "tests/gpu/launcher/test_begins_anew.py"]),  # looks at all of the GPU's memory: alone
    "beside-nvrx": (300, [PYTHON, "scripts/gpu/beside_nvrx.py"]),
    "bench": (280, [*BENCH, "--bandwidth", "unlimited", "--store", "/tmp"]),
}  # fmt: skip
TESTS = {
    "tests-checkpoint": (350, [*GPU, "tests/gpu/checkpoint", "-n", "3"]),
    "tests-inprocess": (350, [*GPU, "tests/gpu/inprocess", "-n", "3"]),
    "tests-jobs": (350, [*GPU, "tests/gpu/launcher/test_jobs.py", "-n", "4"]),
    "abort-gloo": (150, [PYTHON, "scripts/gpu/abort_behind.py", "--cpu"]),
    "abort-order": (150, [PYTHON, "scripts/gpu/abort_behind.py", "--order", "--one-gpu"]),
    "abort-nccl": (150, [PYTHON, "scripts/gpu/abort_behind.py", "--one-gpu"]),
}


def environment() -> dict[str, str]:
    """What every part is run in."""
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])),
        "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_CPP_LOG_LEVEL": "error",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2",
    }  # fmt: skip
    return os.environ | own


def say(**facts) -> None:
    """Write one line."""
    line = json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()})
    with (OUT / "results.jsonl").open("a") as out:
        out.write(line + "\n")
    print(line[:300], flush=True)


class Part:
    """One command under way."""

    def __init__(self, name: str, limit_s: float, words: list[str]) -> None:
        self.name, self.until, self.begun = name, time.monotonic() + limit_s, time.monotonic()
        LOGS.mkdir(exist_ok=True)
        self.log, self.xml = LOGS / f"{name}.log", LOGS / f"{name}.xml"
        words = [*words, f"--junitxml={self.xml}"] if "pytest" in words else words
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment(), start_new_session=True
            )

    def over(self) -> bool:
        """True when it has ended; one that is late is ended."""
        if self.process.poll() is None and time.monotonic() > self.until:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        return self.process.poll() is not None

    def tell(self) -> None:
        """Write what became of it."""
        say(part=self.name, code=self.process.returncode, s=time.monotonic() - self.begun)
        if self.xml.exists():
            for case in ET.parse(self.xml).getroot().iter("testcase"):
                wrong = [child.get("message", "") for child in case if child.tag in ("failure", "error")]
                how = "failed" if wrong else "skipped" if case.find("skipped") is not None else "passed"
                name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
                say(test=name, how=how, s=float(case.get("time") or 0), **({"why": wrong[0][:300]} if wrong else {}))
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                told = json.loads(line) if line.startswith('{"') else None
                with (OUT / "figures.jsonl").open("a") as out:
                    out.write(json.dumps({"part": self.name} | told) + "\n" if told else "")
        with tarfile.open(OUT / "logs.tgz", "w:gz") as out:
            out.add(LOGS, arcname="logs")


def main() -> None:
    """Run the parts that are named, or all."""
    wanted = {name: shlex.split(words) for name, _, words in (a.partition(":") for a in sys.argv[1:])}
    wanted = wanted or {part: [] for part in (*MEASURED, *TESTS)}
    for name in [name for name in MEASURED if name in wanted]:
        limit_s, words = MEASURED[name]
        part = Part(name, limit_s, [*words, *wanted[name]])
        while not part.over():
            time.sleep(0.2)
        part.tell()
    running = [Part(name, TESTS[name][0], [*TESTS[name][1], *wanted[name]]) for name in TESTS if name in wanted]
    while running:
        for part in [part for part in running if part.over()]:
            running.remove(part)
            part.tell()
        time.sleep(0.2)


if __name__ == "__main__":
    main()
