"""What is tried in a child of `everstep doctor`: torch and its devices, names and the port, a checkpoint directory.

usage: python -m everstep.doctor.child torch|names|disk JSON
"""

import errno
import importlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.directory import Claim
from everstep.doctor.trial import MARK
from everstep.errors import EverstepError

_CONNECT_S = 5.0
_PREFIX = ".everstep-doctor-"
Asked = Mapping[str, Any]


def tell(**facts: object) -> None:
    """Say facts, or under `doing` what comes next."""
    sys.stdout.write(f"{MARK}{json.dumps(facts)}\n")
    sys.stdout.flush()


# -- torch -------------------------------------------------------------------------------------------------------------


def try_torch(asked: Asked) -> None:
    """Import it, and compute on each device that it sees."""
    del asked
    tell(doing="importing torch")
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        tell(trouble=f"cannot be imported: {error!r}")
        return
    tell(version=str(torch.__version__), cuda=str(torch.version.cuda or ""))
    if not torch.version.cuda:
        return
    tell(doing="asking for NCCL")
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        tell(nccl=".".join(map(str, torch.cuda.nccl.version())))
    try:
        tell(devices=_devices(torch))
    except Exception as error:  # noqa: BLE001 - likewise
        tell(device_trouble=str(error).partition("\n")[0])


def _devices(torch: Any) -> list[str]:
    tell(doing="asking the driver for its devices")
    number = int(torch.cuda.device_count())
    if not number:
        torch.cuda.init()  # raises with the reason
    names: list[str] = []
    for index in range(number):
        tell(doing=f"computing on device {index}")
        torch.ones(8, device=f"cuda:{index}").sum().item()
        names.append(str(torch.cuda.get_device_name(index)))
    return names


# -- names -------------------------------------------------------------------------------------------------------------


def try_names(asked: Asked) -> None:
    """Resolve the end point and our own name; open the port where it is ours, else reach it."""
    host, port = str(asked["host"]), int(asked["port"])
    tell(doing=f"resolving {host}")
    addresses = _resolved(host, "addresses", "unresolved")
    if addresses:
        ours = [address for address in addresses if _is_ours(address)]
        tell(ours=bool(ours), doing=f"{'opening' if ours else 'reaching'} port {port}")
        tell(port=_opened(ours[0], port) if ours else _reached(host, port))
    name = socket.gethostname()
    tell(name=name, doing=f"resolving {name}")
    _resolved(name, "name_addresses", "name_unresolved")


def _resolved(host: str, known: str, unknown: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        tell(**{unknown: f"does not resolve ({error.strerror})"})
        return []
    addresses = [str(info[4][0]) for info in found]
    tell(**{known: addresses})
    return addresses


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_ours(address: str) -> bool:
    try:
        with socket.socket(_family(address)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _opened(address: str, port: int) -> str:
    try:
        socket.create_server((address, port), family=_family(address)).close()
    except OSError as error:
        return os.strerror(error.errno or 0)  # its own text repeats the address
    return "free"


def _reached(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return error.strerror or str(error)
    return "open"


# -- a checkpoint directory --------------------------------------------------------------------------------------------


def try_disk(asked: Asked) -> None:
    """Do what a job does, in a directory of our own there, or in the nearest that there is; it is removed."""
    directory = os.path.abspath(str(asked["directory"]))
    tell(doing="looking at it")
    there = directory
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    tell(doing=f"making a directory in {there}", tried_in=there)
    try:
        own = tempfile.mkdtemp(prefix=_PREFIX, dir=there)
    except OSError as error:
        tell(refused=f"nothing can be made in {there}: {error.strerror}")
        return
    try:
        _space(own)
        _claims(own)
        _renames(own)
    finally:
        tell(doing=f"removing {own}")
        shutil.rmtree(own, ignore_errors=True)


def _space(own: str) -> None:
    tell(doing="asking for its free space")
    stat = os.statvfs(own)
    tell(free=stat.f_bavail * stat.f_frsize, files=stat.f_favail if stat.f_files else None)


def _claims(own: str) -> None:
    """A job's own claim, and a second one that must be refused."""
    tell(doing="creating, syncing, renaming, listing and locking files")
    first, second = Claim(own), Claim(own)
    try:
        first.take("everstep doctor")
    except EverstepError as error:
        tell(refused=str(error))
        return
    try:
        second.take("everstep doctor")
        tell(unlocked=True)
    except EverstepError:
        tell(unlocked=False)
    finally:
        second.close()
        first.close()


def _renames(own: str) -> None:
    """A commit is a rename of a directory; it must not swallow another that holds something."""
    tell(doing="renaming directories")
    paths = [os.path.join(own, name) for name in ("one", "other")]
    for path in paths:
        os.mkdir(path)
        with open(os.path.join(path, "held"), "wb"):
            pass
    try:
        os.rename(*paths)
        tell(replaced=True)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            tell(refused=f"{own} cannot rename a directory: {error.strerror}")


_TRIALS: Mapping[str, Callable[[Asked], None]] = {"torch": try_torch, "names": try_names, "disk": try_disk}

if __name__ == "__main__":
    _TRIALS[sys.argv[1]](json.loads(sys.argv[2]))
