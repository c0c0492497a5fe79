"""What torch, CUDA, NCCL, the driver and the zygote's trial mean for a job."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.doctor.core.findings import Finding, ok, problem, warning

OLDEST_TORCH = (2, 8)
NEWEST_TORCH = (2, 13)
SEEN_NCCL = "2.28.9"
"""With which docs/results/gpu-h200.md and gpu-h200x2.md were measured."""
_WANTED = "2.8 to 2.13"


@dataclass(frozen=True, slots=True)
class Torch:
    """What a child with torch has seen. `trouble`: why there is nothing more to say."""

    trouble: str = ""
    version: str = ""
    cuda: str = ""  # that torch was built with; empty: none
    nccl: str = ""
    devices: Sequence[str] = ()  # their names; each has been computed on
    device_trouble: str = ""
    driver: str = ""  # the kernel's NVIDIA driver; empty: none is loaded

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], trouble: str, driver: str) -> "Torch":
        """Read what the child said; what it did not say is empty."""
        words = {name: str(facts.get(name, "")) for name in ("version", "cuda", "nccl", "device_trouble")}
        return cls(
            trouble or str(facts.get("trouble", "")), devices=tuple(facts.get("devices", ())), driver=driver, **words
        )


def torch(seen: Torch, ranks: int) -> list[Finding]:
    """Judge torch, and the devices behind it, for `ranks` ranks on this node."""
    if seen.trouble:
        return [
            problem("torch", seen.trouble, f"torch {_WANTED}", "Mend the installation of torch in this environment.")
        ]
    return [_version(seen.version), *_devices(seen, ranks)]


def _version(text: str) -> Finding:
    version = tuple(map(int, re.findall(r"\d+", text)[:2]))
    if version < OLDEST_TORCH:
        return problem("torch", text, _WANTED, "Install a newer torch.")
    if version > NEWEST_TORCH:
        return warning("torch", text, _WANTED, f"Nothing is known against it; tried are {_WANTED}.")
    return ok("torch", text)


def _devices(seen: Torch, ranks: int) -> list[Finding]:
    if not seen.driver and not seen.devices:
        return [ok("devices", "no NVIDIA driver: ranks train on the host, over gloo")]
    if not seen.cuda:
        mend = "Install a build of torch with CUDA, or start the job where no GPU is expected."
        return [problem("devices", f"driver {seen.driver}, and a torch without CUDA", "a torch with CUDA", mend)]
    if seen.device_trouble or not seen.devices:
        trouble = seen.device_trouble or "no device is seen"
        mend = (
            "Compare the driver with torch's CUDA (`nvidia-smi`), and look at CUDA_VISIBLE_DEVICES and the container."
        )
        text = f"CUDA {seen.cuda}, driver {seen.driver or 'unknown'}: {trouble}"
        return [problem("devices", text, "devices that compute", mend)]
    return [_count(seen, ranks), _nccl(seen.nccl)]


def _count(seen: Torch, ranks: int) -> Finding:
    names = ", ".join(dict.fromkeys(seen.devices))
    text = f"{len(seen.devices)} × {names}, CUDA {seen.cuda}, driver {seen.driver or 'unknown'}"
    if ranks > len(seen.devices):
        mend = "Lower --nproc-per-node, or show the job more devices."
        return warning("devices", text, f"{ranks}, one for each rank", mend)
    return ok("devices", text)


def _nccl(version: str) -> Finding:
    if not version:
        return problem("nccl", "torch was built without it", "NCCL", "Install a build of torch with NCCL.")
    if version.split(".")[:2] != SEEN_NCCL.split(".")[:2]:
        return warning("nccl", version, SEEN_NCCL, f"Nothing is known against it; measured was {SEEN_NCCL}.")
    return ok("nccl", version)


def zygote(trouble: str, notices: Sequence[str]) -> list[Finding]:
    """Judge the trial of a zygote: why there can be none, and what it had to say."""
    if trouble:
        mend = "Mend what it says; nothing of a job begins without its zygote."
        return [problem("zygote", trouble, "a process that imports torch, and a fork of it that computes", mend)]
    found = [ok("zygote", "torch imported once, and a fork of it has computed")]
    return found + [
        warning(
            "zygote", text, "a zygote with one thread", "Find what begins it at import (sitecustomize, a .pth file)."
        )
        for text in notices
    ]
