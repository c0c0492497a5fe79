"""How the ranks of one host come to their keeper: rank 0 starts it, the others find it through the group's store.

A world of one needs nobody: no group, no store, no launcher. Several ranks meet in the default process group's store
(a few small keys, no collective); where they are on several hosts all of them are told so, at once.
"""

import datetime
import json
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
from everstep.checkpoint.given import in_our_words
from everstep.errors import CheckpointError, ConfigurationError, ExitCode, UsageError
from everstep.process import detach, mark
from everstep.recovery.link import Link, LinkClosed
from everstep.recovery.session import current
from everstep.telemetry import boot_id, say

MEET_S = 300.0
ANSWER_S = 1000
"""Longer than a keeper waits for ranks (300 s), or for the keeper before it (600 s): it tells what it waits for."""
_KEEPER = "everstep.checkpoint.keeper"
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
        link = _start(settings, 1, pid, None)
    elif rank == 0:
        link = _lead(settings, world_size, pid)
    else:
        link = _follow(settings, rank, world_size)
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
                kinds = {int(ExitCode.CONFIGURATION): ConfigurationError, int(ExitCode.USAGE): UsageError}
                raise kinds.get(code, CheckpointError)(in_our_words(str(message["text"])))
            case "ckpt.waiting" if rank == 0:
                say(str(message["text"]))
            case _:
                continue


def _start(settings: Mapping[str, Any], world_size: int, pid: int, door: socket.socket | None) -> Link:
    ours, theirs = Link.pair()
    training = {"torch": str(torch.__version__), "python": platform.python_version()}
    where = {"world_size": world_size, "pid": pid, "training": training, "ledger": _ledger()}
    ours.send({"kind": "ckpt.begin", **settings, **where})
    fds = (theirs.fileno(),) if door is None else (theirs.fileno(), door.fileno())
    environment = environ.snapshot()
    for name in mark.words(""):
        environment.pop(name, None)  # an agent ends what a lost worker leaves behind: not what writes its last state
    try:
        detach.start(_KEEPER, fds=fds, env=environment)
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
    return f"{socket.gethostname()} {boot_id()}"


def _lead(settings: Mapping[str, Any], world_size: int, pid: int) -> Link:
    store, prefix = _meeting()
    name = f"everstep-checkpointer-{secrets.token_hex(16)}"
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        door.bind(f"\0{name}")
        door.listen(world_size)
        others = [json.loads(v) for v in _wait(store, [f"{prefix}/at/{rank}" for rank in range(1, world_size)])]
        refusal = _refusal(others, settings)
        if refusal:
            store.set(f"{prefix}/keeper", json.dumps({"refused": refusal}))
            raise ConfigurationError(refusal)
        link = _start(settings, world_size, pid, door)
        store.set(f"{prefix}/keeper", json.dumps({"name": name}))
        return link
    finally:
        door.close()


def _follow(settings: Mapping[str, Any], rank: int, world_size: int) -> Link:
    store, prefix = _meeting()
    del world_size
    store.set(f"{prefix}/at/{rank}", json.dumps({"rank": rank, "host": _host(), "settings": dict(settings)}))
    told = json.loads(_wait(store, [f"{prefix}/keeper"])[0])
    if "refused" in told:
        raise ConfigurationError(told["refused"])
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        end.connect(f"\0{told['name']}")
    except OSError as error:
        end.close()
        raise ConfigurationError(
            f"rank {rank} cannot reach the keeper that rank 0 has started on this host: {error.strerror}. Ranks of one "
            "host must share its network namespace (one container, or --net=host)."
        ) from error
    return Link(end)


def _wait(store: Any, keys: list[str]) -> list[bytes]:
    try:
        store.wait(keys, datetime.timedelta(seconds=MEET_S))
        return [store.get(key) for key in keys]
    except RuntimeError as error:
        raise ConfigurationError(
            f"not all ranks have made their Checkpointer within {MEET_S:.0f} s: make it on every rank ({error})"
        ) from error


def _refusal(others: list[dict[str, Any]], settings: Mapping[str, Any]) -> str:
    hosts = {_host().split()[0]} | {str(one["host"]).split()[0] for one in others}
    if {one["host"] for one in others} != {_host()}:
        return (
            f"the ranks are on several hosts ({', '.join(sorted(hosts))}), and a Checkpointer serves those of one. "
            "Until it does, save with torch.distributed.checkpoint.async_save."
        )
    for one in others:
        differing = sorted(name for name in settings if one["settings"].get(name) != settings[name])
        if differing:
            return (
                f"rank {one['rank']} made its Checkpointer with other {', '.join(differing)} than rank 0: "
                f"{[one['settings'].get(name) for name in differing]} where rank 0 has "
                f"{[settings[name] for name in differing]}. Give all ranks the same."
            )
    return ""
