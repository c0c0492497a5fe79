"""What torchrun's flags ask for that is otherwise here: refused by its words, or said. Nothing is swallowed. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from everstep.errors import UsageError

REFUSED = ("logs_specs", "numa_binding", "virtual_local_rank")
"""Flags that mean something we do not do."""
HEARD = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The signals that end a job, as torchrun's default has them."""
_AS_TORCH_HAS_IT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "monitor_interval": (
        lambda given: float(given) == 0.1,  # noqa: PLR2004 - torch's default
        "workers are not looked at by turns here, an end is heard of at once",
    ),
    "start_method": (
        lambda given: given == "spawn",
        "every worker is forked here, from a process that has done the imports; it begins as a new interpreter does",
    ),
    "event_log_handler": (
        lambda given: given == "null",
        "what happens is written to the run folder's events, as JSON lines, and `everstep report` tells it",
    ),
}


def refuse(given: Mapping[str, Any]) -> None:
    """Raise UsageError for what is not done here, with the flag's name and the mend."""
    for name in REFUSED:
        if given.get(name):
            raise UsageError(f"{flag(name)} is torchrun's, and everstep run does not do it; leave it out.")
    wanted = {name.strip() for name in str(given.get("signals_to_handle") or "").split(",")}
    unheard = wanted.difference(HEARD, {""})
    if unheard:
        raise UsageError(
            f"--signals-to-handle {','.join(sorted(unheard))}: everstep run ends the job at SIGTERM, SIGINT, "
            "SIGHUP and SIGQUIT, and hears no other signal; leave it out."
        )


def notices(given: Mapping[str, Any]) -> list[str]:
    """Return what to say of flags that change nothing here, each with the reason."""
    told: list[str] = [str(given["scheduler"])] if given.get("scheduler") else []
    for name, (usual, why) in _AS_TORCH_HAS_IT.items():
        value = given.get(name)
        if value is not None and not usual(value):
            told.append(f"{flag(name)} {value} changes nothing: {why}")
    if given.get("nodes") == 1 and not given.get("spare_nodes"):
        if given.get("rdzv_conf"):
            told.append(f"--rdzv-conf {given['rdzv_conf']} changes nothing: one node meets nobody")
        told += [
            f"{flag(name)} {given[name]} changes nothing: the ranks of one node meet at 127.0.0.1"
            for name in ("master_addr", "local_addr")
            if given.get(name) not in (None, "127.0.0.1", "localhost", "::1")
        ]
    return told


def grace_s(given: Mapping[str, Any], usual: float) -> float:
    """Return the seconds between asking everything to end and SIGKILL: `--grace`, else torchrun's name for it."""
    for name in ("grace", "shutdown_timeout"):
        if given.get(name) is not None:
            return float(given[name])
    return usual


def flag(name: str) -> str:
    """Return a destination's flag, as torchrun writes it."""
    return f"--{name.replace('_', '-')}"
