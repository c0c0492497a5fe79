"""From RUN, as an operator gives it, to the end point of a running agent."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from everstep import environ
from everstep.errors import EverstepError, UsageError
from everstep.goodput.log import RUNS
from everstep.operator.core.reach import NobodyThere, Reach, choices, endpoint
from everstep.recovery.control_file import NAME, ControlFile

KNOCK_S = 2.0
HELP = "a run folder, or HOST:PORT of an agent, with EVERSTEP_TOKEN set; left out, the newest run here that goes on"


def find(run: str | None) -> Reach:
    """Return whom to ask. UsageError for what is neither; NobodyThere for a run that is over."""
    if run is None:
        return _newest()
    folder = Path(run)
    if not folder.is_dir():
        there = endpoint(run, environ.get("EVERSTEP_TOKEN"))
        if there is None:
            raise UsageError(f"{run} is neither a run folder nor HOST:PORT of an agent")
        return there
    found = _files(folder)
    if not found:
        raise NobodyThere(
            f"{folder} has no {NAME}: its job is over, never began, or was started with --control-endpoint none; "
            f"`everstep report {folder}` tells what there was"
        )
    return _who_listens(choices(found, socket.gethostname()))


def _newest() -> Reach:
    given = environ.get("EVERSTEP_RUN_DIR")
    tops = [Path(given)] if given else [folder for folder in RUNS.glob("*") if folder.is_dir()]
    running = [(max(_written(path) for path in paths), folder) for folder in tops if (paths := _paths(folder))]
    if not running:
        where = given or f"{RUNS}/"
        raise UsageError(f"no RUN was given, and no job of {where} goes on; name its run folder, or HOST:PORT")
    reaches: list[Reach] = []
    errors: list[EverstepError] = []
    for _, folder in sorted(running, reverse=True):
        try:
            reaches.append(find(str(folder)))
        except EverstepError as error:  # of another machine, or of another user
            errors.append(error)
    if not reaches:
        raise errors[0]
    return _who_listens(reaches)


def _who_listens(reaches: Sequence[Reach]) -> Reach:
    """Return the first where somebody does, else the first: who asks it hears why not."""
    if len(reaches) == 1:
        return reaches[0]
    return next((reach for reach in reaches if _listens(reach)), reaches[0])


def _listens(reach: Reach) -> bool:
    """Whether somebody does: an agent that was killed has left its file."""
    try:
        socket.create_connection((reach.host, reach.port), KNOCK_S).close()
    except TimeoutError:  # it is busy, or stopped: the job goes on all the same
        return True
    except OSError:
        return False
    return True


def _paths(folder: Path) -> list[Path]:
    return [path for path in (folder / NAME, *sorted(folder.glob(f"node-*/{NAME}"))) if path.exists()]


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it is over since
        return 0


def _files(folder: Path) -> list[ControlFile]:
    found: list[ControlFile] = []
    for path in _paths(folder):
        try:
            found.append(ControlFile.read(path))
        except FileNotFoundError:
            continue
        except PermissionError:
            owner = path.stat().st_uid
            raise UsageError(
                f"{path} can be read by its owner alone (user {owner}, and this is {os.geteuid()}): run the command as "
                "that user"
            ) from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
    return found
