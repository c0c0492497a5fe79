"""`ft_launcher`'s flags on the parser of `everstep run`: heard and done, said to change nothing, or refused by name.

Runs in the zygote, once. Flags come before the YAML of `--ft-cfg-path`, which comes before defaults; `PET_<NAME>`
stands for a flag that was not given. What stands in the YAML is judged as the flag of that name is.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from everstep import environ
from everstep.errors import UsageError
from everstep.fault_tolerance.config import NOTHING, FaultToleranceConfig, section_of, sections
from everstep.fault_tolerance.core.terms import DONE, DONE_OTHERWISE, REFUSED, judge
from everstep.fault_tolerance.storage import paths_of
from everstep.process.monitor import SETTINGS

TERM_TIMEOUT_S = 1800.0
"""NVRx's time from SIGTERM to SIGKILL where the launcher itself was told to end."""

HIDDEN = argparse.SUPPRESS
"""The help of a spelling, and of a flag that changes nothing or is refused."""

Finish = Callable[[dict[str, Any]], None]


def _yes_or_no(text: str) -> bool | None:
    """Read what NVRx's flags of this kind are given."""
    word = text.strip().lower()
    if word in NOTHING:
        return None
    if word in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        return word in ("true", "1", "yes", "on")
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "enable_nic_monitor": _yes_or_no, "enable_nic_healthcheck": _yes_or_no, "skip_section_response": _yes_or_no,
    "enable_dist_storage_healthcheck": _yes_or_no, "check_remaining_processes": _yes_or_no,
    "install_exception_hook": _yes_or_no, "numa_bind_strict": _yes_or_no, "enable_log_server": _yes_or_no,
    "no_restart_exit_code": int,
}  # fmt: skip


def add_run_arguments(parser: argparse.ArgumentParser) -> Finish:
    """Add the `--ft-…` flags; return what reads them once the command line stands."""
    title = "NVRx's settings of rank monitors and restarts; docs/launcher-flags.md has those that are not done here too"
    group = parser.add_argument_group("ft_launcher", title)

    def add(name: str, *others: str, **settings: Any) -> None:
        """One spelling stands in the help."""
        first, *more = spellings(name)
        group.add_argument(first, dest=name, default=None, **settings)
        again: dict[str, Any] = settings | {"default": argparse.SUPPRESS, "help": HIDDEN}
        group.add_argument(*more, *others, dest=name, **again)

    path = "YAML with a section `fault_tolerance`, at any depth; flags come before it."
    add("ft_cfg_path", "--fault-tol-cfg-path", metavar="FILE", help=path)
    missing = "Go on with defaults where that file is not there, or has no such section."
    add("ft_ignore_missing_cfg", "--ignore-missing-fault-tol-cfg", action="store_true", help=missing)
    policies, others = ("any-failed", "min-healthy"), ("--restart-policy", "--restart_policy")
    add("ft_restart_policy", *others, choices=policies, help=DONE["restart_policy"])
    for name in sorted({*DONE, *DONE_OTHERWISE, *REFUSED} - {"restart_policy", "workers_stop_timeout"}):
        add(f"ft_{name}", *_deprecated(name), type=_TYPES.get(name, str), metavar="X", help=DONE.get(name, HIDDEN))
    add("term_timeout", type=float, metavar="SECONDS", help="NVRx's name for --grace.")
    add("workers_stop_timeout", type=float, metavar="SECONDS", help=HIDDEN)
    return finish


def act_as_ft_launcher(parser: argparse.ArgumentParser) -> Finish:
    """Be `ft_launcher`: its name, and its defaults where they are not ours."""
    parser.prog = "ft_launcher"
    parser.set_defaults(rdzv_backend=environ.get("PET_RDZV_BACKEND") or "c10d")

    def take_its_defaults(given: dict[str, Any]) -> None:
        given["max_restarts_unwrapped"] = 0
        least, colon, most = str(given["nnodes"]).partition(":")
        if colon and least.isdigit() and most.isdigit() and int(least) <= int(most):  # MIN at work, the others wait
            given["nnodes"], given["spare_nodes"] = least, int(most) - int(least) + int(given["spare_nodes"])
        if given.get("grace") is None:
            given["grace"] = TERM_TIMEOUT_S
        if not given.get("rdzv_endpoint"):
            given["rdzv_endpoint"] = f"{given.get('master_addr') or '127.0.0.1'}:{given.get('master_port') or 29500}"

    return take_its_defaults


def spellings(name: str) -> tuple[str, ...]:
    """Return `--ft-a-b`, `--ft_a_b`, and NVRx's own mixture of both."""
    dashes = name.replace("_", "-")
    return tuple(dict.fromkeys((f"--{dashes}", f"--{name}", f"--{name.replace('ft_', 'ft-', 1)}")))


def _deprecated(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--ft-param-{name}", f"--ft-param-{name.replace('_', '-')}", f"--ft_param_{name}")))


def finish(given: dict[str, Any]) -> None:
    """Judge what was given, and put it where the launcher and the rank monitors look for it. Raises UsageError."""
    flags = {name: _given(given, name) for name in sorted({*DONE, *DONE_OTHERWISE, *REFUSED})}
    flags = {name: value for name, value in flags.items() if value is not None}
    told: list[str] = []
    file = _file(_given(given, "cfg_path"), bool(given.get("ft_ignore_missing_cfg")), told)
    settings = file | flags
    told += judge(settings, set(file) - set(flags))
    if isinstance(settings.get("rank_section_timeouts"), str):
        settings["rank_section_timeouts"] = sections(settings["rank_section_timeouts"])
    config = asdict(FaultToleranceConfig.from_kwargs(**settings))
    asked = {name: config[name] for name in settings if name in config}
    given["fault_tolerance"] = _of_variable() | asked if asked else None
    given["cycle_log"] = _cycle_log(settings.get("per_cycle_applog_prefix"))
    given["ft_cycles"] = {
        "iteration_file": config["checkpoint_iteration_file"], "most": config["max_no_progress_cycles"],
        "least": config["min_progress_iterations"], "info_dir": config["cycle_info_dir"],
    }  # fmt: skip
    if given.get("grace") is None and _timeout(given, "term_timeout") is not None:
        given["grace"] = _timeout(given, "term_timeout")
    if _timeout(given, "workers_stop_timeout") is not None:
        told += [f"--workers-stop-timeout changes nothing: {DONE_OTHERWISE['workers_stop_timeout']}"]
    for name in ("gpu_memory_reclaim_timeout", "gpu_memory_tolerance_mb"):
        if name in settings:
            given[name] = config[name]
    path = settings.get("storage_health_check_path") or settings.get("storage_healthcheck_path")
    given["must_reach"] = paths_of(path)
    given["must_reach_mounts"] = config["enable_dist_storage_healthcheck"] is True
    given["nvrx_logfile"] = settings.get("nvrx_logfile")
    given["no_restart_exit_code"] = settings.get("no_restart_exit_code")
    given["ft_notices"] = told


def _given(given: Mapping[str, Any], name: str) -> Any:
    """Return a flag, else its variable, else None."""
    value = given.get(f"ft_{name}")
    if value is None and name in ("cfg_path",):
        value = environ.get(f"PET_FT_{name.upper()}")
    return value


def _of_variable() -> dict[str, Any]:
    """Return what workers would find without any flag: a flag takes the place of its own setting alone."""
    try:
        found = json.loads(environ.get(SETTINGS) or "{}")
    except ValueError as error:
        raise UsageError(f"{SETTINGS} is no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{SETTINGS}={found!r}: a JSON object of settings is expected.")
    return {str(name): value for name, value in found.items()}


def _cycle_log(prefix: str | None) -> list[str] | None:
    """Return what a cycle's number stands between in NVRx's name for its log: `run.log` becomes `run_cycle3.log`."""
    if not prefix:
        return None
    if not prefix.startswith("/"):
        raise UsageError(f"--ft-per-cycle-applog-prefix {prefix}: give an absolute path; all nodes write there.")
    stem, ending = os.path.splitext(prefix)
    return [f"{stem}_cycle", ending or ".log"]


def _timeout(given: Mapping[str, Any], name: str) -> float | None:
    value = given.get(name)
    text = environ.get(f"PET_{name.upper()}") if value is None else value
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"PET_{name.upper()} {text!r} is no number of seconds.") from None


def _file(path: str | None, ignore_missing: bool, told: list[str]) -> dict[str, Any]:
    """Return the settings of the YAML file, without those that are written as null."""
    if path is None:
        return {}
    try:
        found = section_of(path)
    except UsageError as error:
        if not ignore_missing:
            raise UsageError(f"{error} Or give --ft-ignore-missing-cfg, and defaults hold.") from None
        told.append(f"--ft-cfg-path: {error} Defaults hold.")
        return {}
    known = {*DONE, *DONE_OTHERWISE, *REFUSED}
    unknown = sorted(set(found) - known)
    if unknown:
        told.append(f"--ft-cfg-path {path}: {', '.join(unknown)} are no settings of ft_launcher, and change nothing")
    return {name: value for name, value in found.items() if name in known}
