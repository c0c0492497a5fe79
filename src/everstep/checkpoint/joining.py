"""How the ranks of a world come to their keepers: the first of each host starts one, the others find it.

A world of one needs nobody: no group, no store, no launcher. Several ranks meet in the default process group's store
(a few small keys, no collective). Rank 0 hears where all are, starts the keeper that decides, and says who stands
together and how that keeper is reached; on every other host the lowest rank starts one that goes there (deputy.py).
"""

import contextlib
import datetime
import json
import os
import platform
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from everstep import environ
from everstep.checkpoint import host_addresses
from everstep.checkpoint.core.hosts import Hosts, arrange
from everstep.checkpoint.given import in_our_words
from everstep.checkpoint.tier_settings import LOCAL
from everstep.clock import SYSTEM
from everstep.errors import (
    CheckpointError,
    ConfigurationError,
    EverstepError,
    ExitCode,
    UnreachableStorage,
    UsageError,
)
from everstep.process import detach, mark
from everstep.recovery.link import Link, LinkClosed
from everstep.recovery.session import current
from everstep.telemetry import boot_id, say

MEET_S = 300.0
ANSWER_S = 1000
"""Longer than a keeper waits for ranks (300 s), or for the keeper before it (600 s): it tells what it waits for."""
TOKEN_BYTES = 32
LOOK_S = (0.005, 0.5)
"""How often a rank looks whether it was heard: at first, and in the end."""
_KEEPER = "everstep.checkpoint.keeper"
_DEPUTY = "everstep.checkpoint.deputy"
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Joined:
    """This rank's place beside its keeper."""

    link: Link
    rank: int
    world_size: int
    welcome: Message


def join(settings: Mapping[str, Any], pid: int) -> Joined:
    """Start or find the keeper, and wait until all ranks have. ConfigurationError says why it cannot be."""
    rank, world_size = _place()
    if world_size == 1:
        link = _start(_KEEPER, _words(settings, 1, pid), ())
    elif rank == 0:
        link = _lead(settings, world_size, pid)
    else:
        link = _follow(settings, rank, world_size, pid)
    try:
        link.send({"kind": "ckpt.hello", "rank": rank, "pid": pid})
        return Joined(link, rank, world_size, _welcome(link, rank))
    except LinkClosed:
        link.close()
        raise CheckpointError("the keeper of the checkpoints ended before it had begun; see what it printed") from None
    except BaseException:
        link.close()
        raise


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    where = environ.placement()
    if where.world_size > 1:
        raise ConfigurationError(
            f"this is rank {where.rank} of {where.world_size}, and there is no process group in which the ranks could "
            "find their Checkpointer: call torch.distributed.init_process_group() first."
        )
    return 0, 1


def _welcome(link: Link, rank: int) -> Message:
    link.patience(ANSWER_S)
    while True:
        try:
            message, _ = link.receive()
        except BlockingIOError:
            raise CheckpointError(f"the keeper of the checkpoints has said nothing for {ANSWER_S} s") from None
        match message["kind"]:
            case "ckpt.welcome":
                link.patience(0)
                return message
            case "ckpt.refused":
                code = int(message["code"])
                kinds: dict[int, type[EverstepError]] = {
                    int(ExitCode.CONFIGURATION): ConfigurationError, int(ExitCode.USAGE): UsageError,
                    int(ExitCode.BAD_NODE): UnreachableStorage,
                }  # fmt: skip
                raise kinds.get(code, CheckpointError)(in_our_words(str(message["text"])))
            case "ckpt.waiting" if rank == 0:
                say(str(message["text"]))
            case _:
                continue


def _words(settings: Mapping[str, Any], world_size: int, pid: int) -> dict[str, Any]:
    training = {"torch": str(torch.__version__), "python": platform.python_version()}
    return {**settings, "world_size": world_size, "pid": pid, "training": training, "ledger": _ledger()}


def _start(program: str, words: Mapping[str, Any], doors: tuple[socket.socket, ...]) -> Link:
    ours, theirs = Link.pair()
    ours.send({"kind": "ckpt.begin", **words})
    environment = environ.snapshot()
    for name in mark.words(""):
        environment.pop(name, None)  # an agent ends what a lost worker leaves behind: not what writes its last state
    try:
        detach.start(program, fds=(theirs.fileno(), *(door.fileno() for door in doors)), env=environment)
    except OSError as error:
        ours.close()
        raise ConfigurationError(
            f"the process that keeps the checkpoints cannot be started: {error.strerror}"
        ) from error
    finally:
        theirs.close()
    return ours


def _ledger() -> dict[str, Any]:
    """In which run folder the keeper tells what became of the saves; `own`: nobody else says there that a run began."""
    session = current()
    if session is not None:
        return {"run_dir": str(session.run_dir), "own": False}
    return {"run_dir": environ.get("EVERSTEP_RUN_DIR") or "", "own": True, "argv": sys.argv}


# Several ranks.

_meetings: tuple[object, int] = (None, 0)


def _meeting() -> tuple[Any, str]:
    """The store of the default group, and a prefix that is the same on every rank: the n-th meeting in this group."""
    global _meetings
    group: Any = dist.group.WORLD
    number = _meetings[1] + 1 if _meetings[0] is group else 0
    _meetings = group, number
    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it  # pyright: ignore[reportPrivateUsage]
    return store, f"everstep/checkpointer/{number}"


def _host() -> str:
    """Whose ranks reach one another by local sockets, and see one another's processes: first a name for people."""
    spaces: list[int] = []
    with contextlib.suppress(OSError):  # a kernel without them has one of each
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
    return " ".join([socket.gethostname(), boot_id(), *map(str, spaces)])


def _door(count: int) -> tuple[socket.socket, str]:
    """Return where the ranks of this host come, and its name."""
    name = f"everstep-checkpointer-{secrets.token_hex(16)}"
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    door.bind(f"\0{name}")
    door.listen(count)
    return door, name


def _lead(settings: Mapping[str, Any], world_size: int, pid: int) -> Link:
    store, prefix = _meeting()
    prefix = _call(store, prefix)
    door, name = _door(world_size)
    far: socket.socket | None = None
    try:
        others = [json.loads(v) for v in _wait(store, [f"{prefix}/at/{rank}" for rank in range(1, world_size)])]
        hosts = arrange({0: _host(), **{int(one["rank"]): str(one["host"]) for one in others}})
        refusal = _refusal(others, settings, hosts)
        if refusal:
            _answer(store, prefix, others, {"refused": refusal})
            raise ConfigurationError(refusal)
        words = _words(settings, world_size, pid) | {"hosts": hosts.to_json()}
        told: dict[str, Any] = {"name": name, "hosts": hosts.to_json()}
        if hosts.several:
            far = host_addresses.listening()
            token = secrets.token_hex(TOKEN_BYTES)
            words["token"] = token
            told |= {"token": token, "addresses": host_addresses.ours(), "port": far.getsockname()[1]}
        link = _start(_KEEPER, words, (door,) if far is None else (door, far))
        _answer(store, prefix, others, told)
        return link
    finally:
        door.close()
        if far is not None:
            far.close()


def _follow(settings: Mapping[str, Any], rank: int, world_size: int, pid: int) -> Link:
    store, prefix = _meeting()
    prefix, told = _come(store, prefix, {"rank": rank, "host": _host(), "settings": dict(settings)})
    if "refused" in told:
        raise ConfigurationError(told["refused"])
    hosts = Hosts.from_json(told["hosts"])
    home = hosts.home[rank]
    if home:
        key = f"{prefix}/keeper/{home}"
        if rank == hosts.ranks(home)[0]:
            return _stand_in(_words(settings, world_size, pid) | told | {"host": home}, hosts, store, key)
        told = json.loads(_wait(store, [key])[0])
        if "refused" in told:
            raise ConfigurationError(told["refused"])
    return _reach(rank, str(told["name"]))


# A store may outlive the processes that met in it: torchrun's agents may keep one for all attempts. So rank 0 calls a
# meeting by a name that is new, and who comes knows by an answer of its own that it has come to that one.


def _call(store: Any, prefix: str) -> str:
    name = secrets.token_hex(8)
    store.set(f"{prefix}/meeting", name)
    return f"{prefix}/{name}"


def _answer(store: Any, prefix: str, others: list[dict[str, Any]], told: Mapping[str, Any]) -> None:
    store.set(f"{prefix}/keeper", json.dumps(told))
    for one in others:
        store.set(f"{prefix}/heard/{one['nonce']}", "1")


def _come(store: Any, prefix: str, facts: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Come to the meeting that is called, and to the next where one is called meanwhile; return what rank 0 says."""
    nonce, called, pause_s = secrets.token_hex(8), "", LOOK_S[0]
    deadline = SYSTEM.now() + MEET_S
    while SYSTEM.now() < deadline:
        now_called = _wait(store, [f"{prefix}/meeting"])[0].decode()
        if now_called != called:
            called = now_called
            store.set(f"{prefix}/{called}/at/{facts['rank']}", json.dumps({**facts, "nonce": nonce}))
        if store.check([f"{prefix}/{called}/heard/{nonce}"]):
            return f"{prefix}/{called}", json.loads(store.get(f"{prefix}/{called}/keeper"))
        SYSTEM.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S[1])
    raise _nobody_came("")


def _stand_in(words: Mapping[str, Any], hosts: Hosts, store: Any, key: str) -> Link:
    """Start the keeper of a host on which rank 0 does not stand."""
    door, name = _door(len(hosts.home))
    try:
        link = _start(_DEPUTY, words, (door,))
    except ConfigurationError as error:
        store.set(key, json.dumps({"refused": f"on {hosts.names[int(words['host'])]} {error}"}))
        raise
    finally:
        door.close()
    store.set(key, json.dumps({"name": name}))
    return link


def _reach(rank: int, name: str) -> Link:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        end.connect(f"\0{name}")
    except OSError as error:
        end.close()
        raise ConfigurationError(
            f"rank {rank} cannot reach the keeper that another rank has started on this host: {error.strerror}; see "
            "what that one printed."
        ) from error
    return Link(end)


def _wait(store: Any, keys: list[str]) -> list[bytes]:
    try:
        store.wait(keys, datetime.timedelta(seconds=MEET_S))
        return [store.get(key) for key in keys]
    except RuntimeError as error:
        raise _nobody_came(f" ({error})") from error


def _nobody_came(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"not all ranks have made their Checkpointer within {MEET_S:.0f} s: make it on every rank{why}"
    )


def _refusal(others: list[dict[str, Any]], settings: Mapping[str, Any], hosts: Hosts) -> str:
    for one in others:
        differing = sorted(name for name in settings if one["settings"].get(name) != settings[name])
        if differing:
            return (
                f"rank {one['rank']} made its Checkpointer with other {', '.join(differing)} than rank 0: "
                f"{[one['settings'].get(name) for name in differing]} where rank 0 has "
                f"{[settings[name] for name in differing]}. Give all ranks the same."
            )
    if hosts.several and any(tier["tier"] == LOCAL for tier in settings["tiers"]):
        return (
            f"tiers: the ranks are on several hosts ({', '.join(hosts.names)}), and what is in the {LOCAL!r} directory "
            "of one is lost with that host, and so is every checkpoint of which it holds a part. Leave "
            f"{LOCAL!r} out, and give a directory that all hosts share."
        )
    return ""
