"""`everstep run`: zygote first, then flags, then the agent. No torch in this process."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from everstep import environ
from everstep.clock import SYSTEM
from everstep.errors import BadNode, ConfigurationError, EverstepError, ExitCode
from everstep.events import Notice, RunStarted
from everstep.launcher import early, fitness, imports, left_out
from everstep.launcher.again import Job
from everstep.launcher.agent.agent import Agent
from everstep.launcher.agent.nursery import Nursery
from everstep.launcher.agent.zygotes import OWN, Refused
from everstep.launcher.config import UNNAMED, LaunchConfig, from_flags, writable
from everstep.launcher.core.unlike import notices
from everstep.launcher.nodes.core.endpoint import Endpoint
from everstep.launcher.nodes.joining import Meeting
from everstep.launcher.nodes.membership import Membership
from everstep.launcher.preload import settings, top_level_imports
from everstep.process import kernel
from everstep.process.loop import Loop
from everstep.recovery.api import Companion
from everstep.recovery.core import words
from everstep.telemetry import JsonLines, Sink, Telemetry, say


@dataclass
class Riders:
    """What the command line, which knows the features, has ride on the agent."""

    companions: list[Companion] = field(default_factory=list[Companion])
    environment: dict[str, str] = field(default_factory=dict[str, str])  # workers find it in theirs
    sinks: list[Sink] = field(default_factory=list[Sink])  # hear the agent's own events as they come
    notices: list[str] = field(default_factory=list[str])  # what the operator should know before it begins


MakeRiders = Callable[[LaunchConfig], Riders]


def main(argv: Sequence[str], extensions: Sequence[str], riders: MakeRiders, version: str) -> int:
    """Run a job on this node to its end; return the exit code of the process. Its nodes must have one `version`."""
    job = os.urandom(6).hex()
    telemetry = Telemetry("agent")
    loop = Loop(SYSTEM)
    nursery = Nursery(loop, telemetry, job)
    try:
        _stand_somewhere()
        return _run(argv, extensions, riders, version, job, telemetry, loop, nursery)
    except Refused as refused:
        if refused.args[0]:
            say(refused.args[0])
        return refused.code
    except EverstepError as error:
        say(str(error))
        return int(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        say(f"the agent is out of file descriptors ({error.strerror}): raise `ulimit -n`, or start fewer ranks")
        return int(ExitCode.CONFIGURATION)
    except KeyboardInterrupt:
        return int(ExitCode.SIGNALLED) + 2
    finally:
        early.deaf()
        left = nursery.close()
        if left:
            places = ", ".join(f"{pid} ({kernel.place(pid)})" for pid in left)
            say(f"processes {places} do not end, not even by SIGKILL: they wait inside the kernel")
        loop.close()
        early.deaf()


def _run(
    argv: Sequence[str],
    extensions: Sequence[str],
    riders: MakeRiders,
    version: str,
    job: str,
    telemetry: Telemetry,
    loop: Loop,
    nursery: Nursery,
) -> int:
    nursery.start_zygote()
    flags = nursery.zygotes.ask({"argv": list(argv), "extensions": list(extensions)}, "zygote.flags")["flags"]
    config = named(from_flags(flags), job)
    riding = riders(config)  # what is refused leaves no folder behind
    line: Membership | None = None
    config = _fit(config, flags.get("run_dir"))
    if config.endpoint is not None:
        line, config = _meet(config, config.endpoint, version, loop, nursery)
    run_dir = run_folder(flags.get("run_dir"), line.name if line is not None and line.number else "")
    with _asked_together(line), _held(run_dir):
        here = Job.of(config)
        other = here.check(run_dir)
        telemetry.sinks.append(JsonLines(run_dir / "events" / f"agent-{os.getpid()}.jsonl"))
        nursery.run_dir = str(run_dir)
        for event in nursery.early:
            telemetry.emit(event)
        say(f"run folder {run_dir}")
        nursery.environment |= riding.environment
        telemetry.sinks += riding.sinks
        for text in nursery.notices:
            nursery.notice(text)
        started = RunStarted(
            job=job, argv=tuple(argv), world_size=config.most_ranks, spares=config.spares, wrapped=config.wrapped,
            script=here.script, arguments=here.arguments,
        )  # fmt: skip
        telemetry.emit(started)
        for text in (*riding.notices, *other):
            telemetry.emit(Notice(text=text, level="warning"))
        for text in notices(flags):
            telemetry.emit(Notice(text=text))
        if not config.wrapped and flags.get("spares") is None:
            text = f"{config.script} wraps no function: no spare is kept, a fault begins all of its workers anew"
            telemetry.emit(Notice(text=text))
        config, preloads = _preloads(config, run_dir, here.script, nursery)
        nursery.zygotes.ask(preloads, "zygote.ready")
        agent = Agent(config, loop, nursery, telemetry, run_dir, riding.companions, line)
        code = agent.run()
        known = flags.get("no_restart_exit_code")
        return code if known is None or code != ExitCode.DO_NOT_REQUEUE else int(known)


def _preloads(
    config: LaunchConfig, run_dir: Path, script: str, nursery: Nursery
) -> tuple[LaunchConfig, dict[str, list[str]]]:
    """Return what the zygote imports beforehand: what was named, else what the script names and its last run loaded.

    Where the script sets variables that what it imports may read then, it imports that itself.
    """
    if config.preload or config.cold or config.no_python:
        return config, {"preload": [*config.preload]}
    one_each = config.nproc > 1 and "OMP_NUM_THREADS" not in nursery.environment
    own = settings(config, (OWN if one_each else {}) | nursery.environment)
    if own.cold:
        text = f"{config.script} sets {', '.join(own.cold)}, which is read when torch is loaded: each worker is a new "
        nursery.notice(text + "interpreter, and slow to begin. Set it for everstep run instead, or name a --preload")
        return replace(config, cold=True), {"preload": []}
    if own.alone:
        names = ", ".join(own.alone).replace("…", "variables by computed names")
        text = f"{config.script} sets {names}: what it imports beyond torch is not preloaded, since it "
        nursery.notice(text + "may read that. Set it for everstep run instead, or name a --preload")
        return config, {"preload": []}
    last_run = imports.of_last_run(run_dir, script)
    return config, {"preload": [], "unnamed": [*top_level_imports(config), *last_run], "last_run": last_run}


def named(config: LaunchConfig, job: str) -> LaunchConfig:
    """Give a job of one node that was given no name a name of its own, as torchrun does."""
    return replace(config, run_id=job) if config.run_id == UNNAMED and not config.several else config


def _fit(config: LaunchConfig, run_dir: str | None) -> LaunchConfig:
    """See that this node may take part. Raises BadNode. The configuration knows from then on where that is written."""
    named_dir = run_dir or environ.get("EVERSTEP_RUN_DIR")
    base = None if named_dir is None else Path(named_dir).absolute()
    if config.several and base is not None and (known := left_out.why(base, socket.gethostname())):
        raise BadNode(known)
    if config.health_check:
        fitness.check(config.health_check)
    return replace(config, base_dir=base)


def _meet(
    config: LaunchConfig, endpoint: Endpoint, version: str, loop: Loop, nursery: Nursery
) -> tuple[Membership, LaunchConfig]:
    """Come together with the agents of the other nodes; nothing of the job exists before all are here."""
    meeting = Meeting(loop, endpoint, nursery.reap, nursery.spared.add)
    limits = {
        "soft_s": config.soft_timeout_s, "hard_s": config.hard_timeout_s, "first_s": config.first_timeout_s,
        "automatic": False,
    }  # fmt: skip
    joined = meeting.join(config.terms(version), limits, config.local_addr)
    nursery.home = f"{nursery.home}/{joined.name}"  # machines with one boot id (containers) may number alike
    config = replace(config, local_addr=joined.present[joined.name], at_work=joined.at_work)
    told = {name: f"{name} at {address}" for name, address in joined.present.items()}
    others, spare = ", ".join(told[n] for n in joined.at_work), [told[n] for n in told if n not in joined.at_work]
    if joined.late:
        say(f"this is {joined.name}; the job runs already, with {', '.join(n for n in told if n != joined.name)}")
        return Membership(loop, joined, meeting.linger), config
    less = f", {len(joined.at_work)} of {config.nnodes} nodes" if len(joined.at_work) < config.nnodes else ""
    waits = f"; spare {'is' if len(spare) == 1 else 'are'} {', '.join(spare)}" if spare else ""
    say(f"this is {joined.name}; the job runs on {others}{less}{waits}")
    return Membership(loop, joined, meeting.linger), config


def _stand_somewhere() -> None:
    """Refuse a current folder that has been removed: neither paths nor workers have a place in it."""
    try:
        os.getcwd()
    except OSError:
        raise ConfigurationError(
            "the current folder has been removed; go to one that exists, and start again."
        ) from None


def run_folder(given: str | None, node: str = "") -> Path:
    """Return the folder of this run: the flag, else EVERSTEP_RUN_DIR, else a new one under ./everstep-runs.

    `node`: where there are several, all but the first have a folder of this name in it, lest they share one.
    """
    chosen = given or environ.get("EVERSTEP_RUN_DIR")
    if chosen is None:
        stamp = datetime.fromtimestamp(SYSTEM.wall(), UTC).strftime("%Y%m%d-%H%M%S")
        chosen = f"everstep-runs/{stamp}-{os.urandom(2).hex()}"
    return writable(Path(chosen).absolute() / node)


@contextlib.contextmanager
def _asked_together(line: Membership | None) -> Generator[None]:
    """A signal that comes when all have met, and before our agent hears any, is all agents' as each later one is."""
    try:
        yield
    except (early.Asked, KeyboardInterrupt) as asked:
        if line is not None:
            number, name = (asked.number, asked.name) if isinstance(asked, early.Asked) else (signal.SIGINT, "SIGINT")
            line.ends_early(words.EndRequested(ExitCode.SIGNALLED + number, f"ended by {name} from outside"))
        raise


@contextlib.contextmanager
def _held(run_dir: Path) -> Generator[None]:
    """Hold the run folder with a lock that dies with us: two living jobs never share one."""
    fd = os.open(run_dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigurationError(
            f"the run folder {run_dir} belongs to a job that is still running; name another with --run-dir, or end "
            "that job."
        ) from None
    try:
        yield
    finally:
        os.close(fd)
