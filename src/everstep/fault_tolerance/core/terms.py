"""Which of NVRx's launcher settings are done here, which change nothing, and which are refused. Pure.

Rule 1: every setting of `ft_launcher`, of 0.4.1 and of HEAD, stands in one of three tables.
Rule 2: a setting is judged by what it asks for: a refused one that asks for nothing (false, null) is accepted.
Rule 3: what stands in a YAML file is judged as the flag of that name, and told by where it stands.
"""

from collections.abc import Collection, Mapping
from typing import Any

from everstep.errors import UsageError

DONE: Mapping[str, str] = {
    "initial_rank_heartbeat_timeout": "Seconds to a rank's first heartbeat (3600); none: no limit.",
    "rank_heartbeat_timeout": "Seconds from one heartbeat of a rank to the next (2700); none: no limit.",
    "rank_out_of_section_timeout": "Seconds outside of all sections (no limit).",
    "rank_section_timeouts": "Seconds in each section: NAME:SECONDS,NAME2:SECONDS; none: no limit.",
    "safety_factor": "A calculated timeout is so many times the longest interval that was seen (5).",
    "log_level": "Of the rank monitor's own logger (INFO).",
    "num_warmup_iterations": "So many openings of the section step have the limit of warmup, where both have one (5).",
    "storage_health_check_path": "Absolute paths that this node must be able to read before it joins, with commas.",
    "storage_healthcheck_path": "The same, as the YAML file has it.",
    "enable_dist_storage_healthcheck": "true: so must each mount of a distributed file system, and Lustre be healthy.",
    "gpu_memory_reclaim_timeout": "NVRx's name for --gpu-memory-reclaim-timeout.",
    "gpu_memory_tolerance_mb": "NVRx's name for --gpu-memory-tolerance-mb.",
    "nvrx_logfile": "A file for what the agent does, a line an event.",
    "restart_policy": "any-failed: a failure anywhere is a restart of all workers. min-healthy: in a wrapped function "
    "alone, where healthy ones keep their processes anyway.",
    "checkpoint_iteration_file": "A file with the iteration of the last checkpoint, by which starts are judged.",
    "max_no_progress_cycles": "So many starts in a row without progress by that file end the job, with 93 (3).",
    "min_progress_iterations": "So many iterations more are progress (1).",
    "cycle_info_dir": "A folder for a JSON file that tells of each start of all workers.",
    "per_cycle_applog_prefix": "What all ranks print, in one file for each start: PREFIX_cycle<N>.log.",
    "no_restart_exit_code": "The exit code that tells a scheduler not to start the job again (93).",
}
"""Settings that are done, each with its help."""
DONE_OTHERWISE: Mapping[str, str] = {
    "workload_check_interval": "every rank is looked at five times a second",
    "node_health_check_interval": "no GPU or NIC check runs by itself; @everstep.inprocess.health_check has them",
    "restart_check_interval": "NVRx does not use it either; a restart under way is known",
    "rank_termination_signal": "a rank that hangs shows its stack, and is ended with all that it has started",
    "skip_section_response": "a heartbeat is a store into shared memory, nothing answers",
    "gpu_memory_poll_interval": "nothing is polled",
    "check_remaining_processes": "what a worker has started is ended with it, always",
    "install_exception_hook": "an exception is told to the agent as it is raised, always",
    "rdzv_impl": "the nodes meet at a hub",
    "workers_stop_timeout": "workers that begin anew are ended at once, since what they hold of a failed step is void",
}
"""Settings that change nothing, each with the reason."""
_NO_LOG_SERVER = "every node keeps its own logs, and there is no log server"
_NO_ATTRIBUTION = "no language model reads logs; `everstep report` names the rank at fault"
_NO_DEVICES = "no NIC and no health service is looked at before nodes meet"
REFUSED: Mapping[str, str] = {
    "enable_nic_monitor": _NO_DEVICES,
    "enable_nic_healthcheck": _NO_DEVICES,
    "pci_topo_file": _NO_DEVICES,
    "link_down_path_template": _NO_DEVICES,
    "link_state_path_template": _NO_DEVICES,
    "node_health_check_endpoint": _NO_DEVICES,
    "segment": "nodes have no segments here; --failure-domain says what fails together",
    "numa_bind_strict": "workers are not bound to CPUs; --no-python numactl … binds them",
    **dict.fromkeys(
        (
            "enable_log_server", "log_server_port", "log_aggregator_count", "log_leaf_max_queue_chunks",
            "log_server_log_prefix", "log_server_graceful_shutdown_timeout",
        ),
        _NO_LOG_SERVER,
    ),
    **dict.fromkeys(
        (
            "attribution_endpoint", "attribution_startup_timeout", "attribution_llm_api_key_file",
            "attribution_llm_base_url", "attribution_llm_model", "attribution_analysis_backend",
            "attribution_stop_action", "attribution_log_level", "attribution_export_url",
        ),
        _NO_ATTRIBUTION,
    ),
}  # fmt: skip
"""Settings that are refused where they ask for something, each with the reason."""
_USUAL: Mapping[str, Collection[Any]] = {
    "rank_termination_signal": ("SIGKILL", "sigkill", 9, "9"), "skip_section_response": (True,),
    "check_remaining_processes": (True,), "install_exception_hook": (True,), "rdzv_impl": ("barrier",),
    "restart_check_interval": (60, "60", "60.0"),
}  # fmt: skip
"""Values of settings that change nothing which ask for no more than is done anyway."""
_SIGNALS = ("SIGKILL", "SIGTERM", "9", "15")


def judge(settings: Mapping[str, Any], in_file: Collection[str] = ()) -> list[str]:
    """Return what to say of settings that change nothing; UsageError for one that is refused. Names as in YAML."""
    told: list[str] = []
    for name, value in settings.items():
        where = f"{name} (in the file of --ft-cfg-path)" if name in in_file else f"--ft-{name.replace('_', '-')}"
        if name in REFUSED and value not in (None, False, "", {}):
            raise UsageError(f"{where} {value} is ft_launcher's, and is not done here: {REFUSED[name]}. Leave it out.")
        if name in DONE_OTHERWISE and value is not None and value not in _USUAL.get(name, ()):
            told.append(f"{where} {value} changes nothing: {DONE_OTHERWISE[name]}")
    _check_signal(settings.get("rank_termination_signal"))
    return told


def of_policy(given: str | None, *, wrapped: bool) -> str | None:
    """Return what to say of `--ft-restart-policy`; UsageError where healthy workers cannot be kept."""
    if given in (None, "any-failed"):
        return None
    if wrapped:
        return f"--ft-restart-policy {given} changes nothing: healthy ranks of a wrapped function keep their processes"
    raise UsageError(
        f"--ft-restart-policy {given}: healthy workers can go on without the others in a wrapped function alone, and "
        "the script names no wrapper. Wrap the training function in @everstep.inprocess.Wrapper, or leave the flag out."
    )


def _check_signal(given: object) -> None:
    if given is not None and str(given).strip().upper() not in _SIGNALS:
        raise UsageError(
            f"rank_termination_signal {given}: a rank that hangs is ended by SIGKILL here, once its stack is known. "
            "Leave it out."
        )
