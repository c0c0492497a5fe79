"""What Slurm's variables say of a job's nodes, where no flag does: pure.

`srun --ntasks-per-node=1 everstep run …` starts one agent a node. How many there are, which one this is and where they
meet then need no flag. A flag, or torchrun's variable, always comes before Slurm's.
"""

from collections.abc import Mapping
from typing import Any

from everstep.errors import UsageError

FIRST_PORT, PORTS = 20000, 10000
"""Jobs of one node meet at ports of their own, below those that a kernel hands out by itself."""


def fill(given: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Fill in what the flags leave out. Raises UsageError where a node has more tasks than one.

    What was filled in, or should be known, is a sentence under `scheduler`.
    """
    if given.get("standalone"):
        return
    if "SLURM_STEP_ID" not in environment:
        nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
        if "SLURM_JOB_ID" in environment and nodes != "1" and _one_node(given):
            given["scheduler"] = (
                f"this Slurm job has {nodes} nodes, and only this one is used: start an agent on each, with "
                "`srun --ntasks-per-node=1 everstep run …`"
            )
        return
    tasks = _whole(environment, "SLURM_STEP_NUM_TASKS")
    if tasks <= 1 or (_said(given) and given.get("node_rank") is not None):
        return
    _check_tasks(environment)
    filled = _filled(given, environment, tasks)
    given.update(filled)
    if given["nnodes"] != "1":
        shown = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in filled.items())
        given["scheduler"] = f"from Slurm: {shown}" if shown else None


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: `a[08-11,14],b` is a08."""
    depth, first = 0, ""
    for letter in nodes:
        if letter == "," and not depth:
            break
        depth += {"[": 1, "]": -1}.get(letter, 0)
        first += letter
    while "[" in first:
        before, _, rest = first.partition("[")
        inside, _, after = rest.partition("]")
        first = before + inside.partition(",")[0].partition("-")[0] + after
    return first


def _filled(given: Mapping[str, Any], environment: Mapping[str, str], tasks: int) -> dict[str, Any]:
    job, step = _whole(environment, "SLURM_JOB_ID"), environment["SLURM_STEP_ID"]
    found: dict[str, Any] = {}
    if given.get("nnodes") in (None, "1:1"):
        found["nnodes"] = str(max(1, tasks - int(given.get("spare_nodes") or 0)))
    elif str(given["nnodes"]) in ("1", "1:1"):
        return found
    if given.get("node_rank") is None:
        found["node_rank"] = _whole(environment, "SLURM_PROCID")
    if not given.get("rdzv_endpoint") and given.get("master_addr") in (None, "127.0.0.1"):
        host = first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
        if not host:
            raise UsageError(
                "SLURM_STEP_NODELIST names no node; give --rdzv-endpoint HOST:PORT, the same on all nodes."
            )
        number = job * 31 + (int(step) if step.isdigit() else 0)
        port = given.get("master_port") or FIRST_PORT + number % PORTS
        found["rdzv_endpoint"] = f"{host}:{port}"
    if given.get("rdzv_id") in (None, "none"):
        found["rdzv_id"] = f"slurm-{job}.{step}"
    return found


def _check_tasks(environment: Mapping[str, str]) -> None:
    """`1(x2)`, `1`: one on each."""
    each = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    most = max((int(part.partition("(")[0]) for part in each.split(",") if part.partition("(")[0].isdigit()), default=1)
    if most > 1:
        raise UsageError(
            f"Slurm has started {most} tasks on a node, and everstep run is one a node: it starts the ranks itself. "
            "Give `srun --ntasks-per-node=1`, and the number of ranks to --nproc-per-node. Jobs that share nothing "
            "take --standalone."
        )


def _one_node(given: Mapping[str, Any]) -> bool:
    return str(given.get("nnodes")) in ("None", "1", "1:1")


def _said(given: Mapping[str, Any]) -> bool:
    """The flags name more nodes than one, and where they meet."""
    place = given.get("rdzv_endpoint") or given.get("master_addr") not in (None, "127.0.0.1")
    return not _one_node(given) and bool(place)


def _whole(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise UsageError(
            f"{name} is {text!r} and should be a whole number: give --nnodes, --node-rank and --rdzv-endpoint."
        )
    return int(text)
