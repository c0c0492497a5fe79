"""What `ft_launcher` and its rank monitors were asked for, under NVRx's names: a mapping, YAML, or flags.

Rule 1: the union of the fields of NVRx 0.4.1 and HEAD; where the two differ in a default, 0.4.1's.
Rule 2: what cannot be meant is refused where it is made, by name; NVRx finds it when a rank is watched.
Rule 3: a value goes over JSON and back: `from_kwargs(**asdict(config))` is equal to it.

Times are seconds; None is no limit. No torch here: the agent reads it.
"""

import argparse
import logging
import math
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import yaml

from everstep.errors import UsageError

NOTHING = ("", "none", "null")
"""Texts of a flag that mean None, in any case."""
SECTION = "fault_tolerance"
"""The key that the settings stand under in a YAML file, at whatever depth."""
_LEVELS = {"DBG": logging.DEBUG, "WARN": logging.WARNING, "FATAL": logging.CRITICAL}
_LIMITS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout")
_TIMES = ("workload_check_interval", "node_health_check_interval", "restart_check_interval", "gpu_memory_poll_interval")
_COUNTS = ("max_no_progress_cycles", "min_progress_iterations", "num_warmup_iterations")


@dataclass
class FaultToleranceConfig:
    """Settings of `ft_launcher`. Raises UsageError (a ValueError) for a value that cannot be meant."""

    workload_check_interval: float = 5.0
    initial_rank_heartbeat_timeout: float | None = 3600.0
    rank_heartbeat_timeout: float | None = 2700.0
    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    rank_out_of_section_timeout: float | None = None
    node_health_check_interval: float = 5.0
    safety_factor: float = 5.0  # a calculated timeout is so many times the longest interval that was seen
    rank_termination_signal: signal.Signals = signal.SIGKILL
    log_level: int = logging.INFO
    restart_check_interval: float = 60.0
    enable_nic_monitor: bool = True
    pci_topo_file: str | None = None
    link_down_path_template: str | None = None
    enable_nic_healthcheck: bool = True
    enable_dist_storage_healthcheck: bool = False
    storage_healthcheck_path: str | None = None
    link_state_path_template: str | None = None
    skip_section_response: bool = True
    segment: int | None = None
    numa_bind_strict: bool = True
    gpu_memory_reclaim_timeout: float = 50.0
    gpu_memory_tolerance_mb: float = 512.0
    gpu_memory_poll_interval: float = 2.0
    check_remaining_processes: bool = False
    max_no_progress_cycles: int = 3
    min_progress_iterations: int = 1
    checkpoint_iteration_file: str | None = None
    install_exception_hook: bool = False
    num_warmup_iterations: int = 5
    attribution_endpoint: str | None = None
    attribution_stop_action: str | None = None
    attribution_export_url: str | None = None
    cycle_info_dir: str | None = None

    def __post_init__(self) -> None:
        self.rank_termination_signal = _signal(self.rank_termination_signal)
        self.log_level = _level(self.log_level)
        for name in _LIMITS:
            setattr(self, name, limit(name, getattr(self, name)))
        for name in _TIMES:
            seconds = limit(name, getattr(self, name))
            if seconds is None:
                raise UsageError(f"{name}: give seconds, more than 0.")
            setattr(self, name, seconds)
        for name in ("gpu_memory_reclaim_timeout", "gpu_memory_tolerance_mb"):
            setattr(self, name, _amount(name, getattr(self, name)))
        for name in _COUNTS:
            setattr(self, name, _count(name, getattr(self, name)))
        given = self.rank_section_timeouts
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # YAML has anything
            raise UsageError(f"rank_section_timeouts {given!r}: give a mapping of names to seconds.")
        self.rank_section_timeouts = {
            str(name): limit(f"rank_section_timeouts {name}", value) for name, value in given.items()
        }
        factor = limit("safety_factor", self.safety_factor)
        if factor is None or factor < 1:
            raise UsageError(f"safety_factor {self.safety_factor!r}: give 1 or more, or healthy ranks are called hung.")
        self.safety_factor = factor

    @property
    def is_progress_tracking_enabled(self) -> bool:
        """True where cycles without a step more are counted: a file is named, and so is how many are too many."""
        return bool(self.checkpoint_iteration_file) and self.max_no_progress_cycles > 0

    @classmethod
    def from_kwargs(cls, ignore_not_recognized: bool = True, **kwargs: Any) -> Self:
        """Return a config of these settings; what is no setting is ignored, or a UsageError."""
        known = {one.name for one in fields(cls)}
        unknown = sorted(set(kwargs) - known)
        if unknown and not ignore_not_recognized:
            raise UsageError(f"{', '.join(unknown)}: no setting of fault tolerance; {_near(unknown[0], known)}")
        return cls(**{name: value for name, value in kwargs.items() if name in known})

    @classmethod
    def from_yaml_file(cls, cfg_path: str, ignore_not_recognized: bool = True) -> Self:
        """Return what a YAML file has below `fault_tolerance`. UsageError where it cannot be read or has none."""
        return cls.from_kwargs(ignore_not_recognized, **section_of(cfg_path))

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Return flags over YAML over defaults: `ft_<setting>` where it is not None, and `ft_cfg_path`.

        UsageError where neither a file with such a section nor a flag is given.
        """
        given = {one.name: getattr(args, f"ft_{one.name}", None) for one in fields(cls)}
        flags = {name: value for name, value in given.items() if value is not None}
        path = getattr(args, "ft_cfg_path", None)
        if path is None and not flags:
            raise UsageError("no setting of fault tolerance is given: name a file with --ft-cfg-path, or give a flag.")
        if isinstance(flags.get("rank_section_timeouts"), str):
            flags["rank_section_timeouts"] = sections(flags["rank_section_timeouts"])
        return cls.from_kwargs(**({} if path is None else section_of(path)) | flags)

    def to_yaml_file(self, cfg_path: str) -> None:
        """Write all settings below `fault_tolerance`, so that `from_yaml_file` returns an equal config."""
        words = asdict(self) | {"rank_termination_signal": _signal(self.rank_termination_signal).name}
        Path(cfg_path).write_text(yaml.safe_dump({SECTION: words | {"log_level": _level(self.log_level)}}))


def section_of(path: str) -> dict[str, Any]:
    """Return the settings of a YAML file as they stand there. UsageError where it has none or cannot be read."""
    try:
        found = _find(yaml.safe_load(Path(path).read_text()))
    except OSError as error:
        raise UsageError(f"the file of fault tolerance {path!r} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path!r} is no YAML: {error}") from None
    if found is None:
        raise UsageError(f"{path!r} has no section `{SECTION}`, at any depth: put the settings below that key.")
    if not isinstance(found, dict):
        raise UsageError(f"{path!r}: `{SECTION}` is {found!r}; a mapping of settings is expected.")
    return {str(name): value for name, value in found.items()}


def _find(tree: object) -> object:
    """Return what stands under the key nearest to the top of a branch, or None."""
    if isinstance(tree, dict) and SECTION in tree:
        return tree[SECTION]
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return next((found for found in map(_find, below) if found is not None), None)


def sections(text: str) -> dict[str, float | None]:
    """Read `name:seconds,name2:seconds`, where `none`, `null` and nothing are no limit."""
    found: dict[str, float | None] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, colon, value = pair.rpartition(":")
        if not colon or not name.strip():
            raise UsageError(f"section timeouts {text!r}: {pair!r} is not NAME:SECONDS; write for example step:60.")
        found[name.strip()] = limit(f"section {name.strip()}", value)
    return found


def limit(name: str, value: object) -> float | None:
    """Read seconds, more than 0, or None. Raises UsageError that names the setting."""
    if value is None or (isinstance(value, str) and value.strip().lower() in NOTHING):
        return None
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        seconds = math.nan
    if math.isnan(seconds) or seconds <= 0:
        raise UsageError(f"{name} {value!r}: give a number of seconds, more than 0, or none for no limit.")
    return seconds


def _amount(name: str, value: object) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise UsageError(f"{name} {value!r}: give a number, 0 or more.")
    return found


def _count(name: str, value: object) -> int:
    try:
        if not isinstance(value, bool) and float(str(value)).is_integer():
            return int(float(str(value)))
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{name} {value!r}: give a whole number.")


def _signal(given: signal.Signals | int | str) -> signal.Signals:
    try:
        if isinstance(given, str) and not given.isdigit():
            return signal.Signals[given.strip().upper()]
        return signal.Signals(int(given))
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"rank_termination_signal {given!r}: give a signal's name or number, as SIGKILL.") from None


def _level(given: int | str) -> int:
    name = str(given).strip().upper()
    known = logging.getLevelNamesMapping() | _LEVELS
    level = int(name) if name.isdigit() else known.get(name, -1)
    if not logging.DEBUG <= level <= logging.CRITICAL:
        raise UsageError(f"log_level {given!r}: give DEBUG, INFO, WARNING, ERROR or CRITICAL, or 10 to 50.")
    return level


def _near(name: str, known: set[str]) -> str:
    import difflib  # noqa: PLC0415 - only where a name is wrong

    near = difflib.get_close_matches(name, known, 1)
    return f"perhaps {near[0]} is meant." if near else f"they are {', '.join(sorted(known))}."
