"""All that is looked at, in one go: trials run beside one another, and each has its end. Called on the main thread."""

from dataclasses import dataclass

from everstep.checkpoint import memory
from everstep.checkpoint.storage.opening import is_url
from everstep.doctor import machine
from everstep.doctor.core import disk, libraries, network
from everstep.doctor.core import machine as machines
from everstep.doctor.core.findings import Finding
from everstep.doctor.trial import Trial
from everstep.doctor.zygote_trial import ZygoteTrial
from everstep.launcher.nodes.core.endpoint import Endpoint, endpoint_of

LIBRARIES_S = 120.0
"""For torch, its devices and the zygote: a first import from a network file system takes a minute."""
NAMES_S = 15.0
DISK_S = 30.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What the job will be, as far as it was said."""

    ranks: int
    state: int | None = None  # bytes, which the ranks of this node hold together
    endpoint: Endpoint | None = None
    directory: str | None = None


def asked_of(ranks: int, state: int | None, endpoint: str | None, directory: str | None) -> Asked:
    """Read the end point as `everstep run` would. Raises UsageError."""
    met = None if endpoint is None else endpoint_of({"rdzv_backend": "c10d", "rdzv_endpoint": endpoint})
    return Asked(ranks, state, met, directory)


def examine(asked: Asked) -> list[Finding]:
    """Look at everything; return what was found. Takes as long as torch does to import, twice."""
    torch, zygote = Trial("torch", {}, LIBRARIES_S), ZygoteTrial(LIBRARIES_S)
    names = None
    if asked.endpoint is not None:
        names = Trial("names", {"host": asked.endpoint.host, "port": asked.endpoint.port}, NAMES_S)
    tried = None
    if asked.directory is not None and not is_url(asked.directory):
        tried = Trial("disk", {"directory": asked.directory}, DISK_S)
    found = machines.judge(machine.look(), asked.ranks)
    found.append(machines.memory(memory.read(), asked.ranks, asked.state))
    if names is not None:
        found += network.judge(network.Network.from_facts(str(asked.endpoint), *names.collect()))
    if tried is not None:
        found += disk.judge(disk.Disk.from_facts(str(asked.directory), *tried.collect()), asked.state, asked.ranks)
    elif asked.directory is not None:
        found.append(disk.elsewhere(asked.directory))
    found += libraries.torch(libraries.Torch.from_facts(*torch.collect(), machine.driver()), asked.ranks)
    return found + libraries.zygote(*zygote.collect())
