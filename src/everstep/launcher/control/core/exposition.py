"""What one agent's node looks like to Prometheus, in its text format 0.0.4: pure.

Rule 1: numbers alone, for anybody who reaches the end point: no path, no argument, no text of an error.
Rule 2: a series is of a rank or of a node, never of a process: pids would make series without end.
Rule 3: what is not known is left out; a 0 would be a lie.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

KIND = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "everstep_"
PHASES = ("gathering", "publishing", "running", "draining", "finishing", "ended")
Found = Mapping[str, Any]
Sample = tuple[Mapping[str, object], float | None]
Family = tuple[str, str, str, Iterable[Sample]]
"""Name, type, help, samples."""


def text(view: Found, faults: Mapping[str, int], failed_saves: Mapping[str, int]) -> bytes:
    """Return the exposition of one node; `faults` by kind and `failed_saves` by tier since the agent began."""
    lines: list[str] = []
    for name, kind, about, samples in (
        *_of_node(view),
        *_of_ranks(view),
        *_of_tiers(view, failed_saves),
        *_of_faults(faults),
    ):
        known = [(labels, value) for labels, value in samples if value is not None and math.isfinite(value)]
        if known:
            lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]
            lines += [f"{PREFIX}{name}{_labels(labels)} {float(value)!r}" for labels, value in known]
    return ("\n".join(lines) + "\n").encode()


def _of_node(view: Found) -> Iterator[Family]:
    phase, processes = view["phase"], view["processes"]
    kinds = sorted({str(p["role"]) for p in processes})
    yield (
        "info",
        "gauge",
        "The job and the node that this agent is of.",
        [({"job": view["job"], "node": view["node"]}, 1)],
    )
    yield "phase", "gauge", "1 for the phase that the job is in.", [({"phase": p}, float(p == phase)) for p in PHASES]
    yield "generation", "gauge", "Of the present roster, counted from 0.", [({}, view["generation"])]
    yield "world_size", "gauge", "Ranks of the job.", [({}, view["world_size"])]
    yield "restarts", "gauge", "Generations that ended before the present one.", [({}, view["restarts"])]
    yield "step", "gauge", "The last step that all ranks of this node have done.", [({}, view["step"])]
    yield "step_seconds", "gauge", "What nine of ten recent steps did not exceed.", [({}, view["typical_step_s"])]
    yield (
        "processes",
        "gauge",
        "Processes of the job on this node.",
        [({"role": kind}, sum(p["role"] == kind for p in processes)) for kind in kinds],
    )
    for name, role in (("agent", "agent"), ("zygote", "zygote")):
        seconds: list[Sample] = [({}, p["cpu_s"]) for p in processes if p["role"] == role]
        yield f"{name}_cpu_seconds_total", "counter", f"CPU time of the {name}.", seconds


def _of_ranks(view: Found) -> Iterator[Family]:
    ranks = [(({"rank": p["rank"]}), p) for p in view["processes"] if p["rank"] is not None]

    def of(field: str) -> list[Sample]:
        return [(labels, p.get(field)) for labels, p in ranks]

    stopped = [(labels, float(p["state"] in ("T", "t"))) for labels, p in ranks]
    yield "rank_step", "gauge", "Steps that the rank has done.", of("step")
    yield "rank_mark_age_seconds", "gauge", "Since the rank's last sign of progress.", of("mark_age_s")
    yield "rank_cpu_seconds_total", "counter", "CPU time of the process that holds the rank.", of("cpu_s")
    yield "rank_resident_bytes", "gauge", "Memory in use, shared pages included.", of("resident_bytes")
    yield "rank_stopped", "gauge", "1 while the process is stopped.", stopped


def _of_tiers(view: Found, failed: Mapping[str, int]) -> Iterator[Family]:
    rows = [({"tier": row["tier"]}, row) for row in view["tiers"] if row["what"] in ("committed", "kept")]

    def of(field: str) -> list[Sample]:
        return [(labels, row.get(field)) for labels, row in rows]

    yield "tier_step", "gauge", "The newest step that the tier has, as this agent knows it.", of("step")
    yield "tier_bytes", "gauge", "Of that step; in memory: what all snapshots of the node take.", of("bytes")
    yield "tier_save_seconds", "gauge", "What saving that step took.", of("seconds")
    yield "tier_age_seconds", "gauge", "Since that step was committed.", of("age_s")
    yield (
        "saves_failed_total",
        "counter",
        "Saves that failed or were found damaged.",
        [({"tier": tier}, count) for tier, count in sorted(failed.items())],
    )


def _of_faults(faults: Mapping[str, int]) -> Iterator[Family]:
    samples = [({"kind": kind}, count) for kind, count in sorted(faults.items())]
    yield "faults_total", "counter", "Faults that ended a generation.", samples


def _labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
