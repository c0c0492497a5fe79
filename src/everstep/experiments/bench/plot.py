"""Results as pictures, where matplotlib is installed (the extra `plots`)."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.errors import ConfigurationError, UsageError
from everstep.experiments.bench import checkpoint_show
from everstep.experiments.core.figures import PARTS, name_of


def check() -> None:
    """Raise ConfigurationError where nothing can be drawn: before minutes of measuring, not after."""
    _pyplot()


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed: pip install 'everstep[plots]'; or leave --plot out and "
            "draw the saved --json later with `everstep bench show FILE --plot PICTURE`."
        ) from error


def draw(result: Mapping[str, Any], target: Path) -> None:
    """Draw a result into `target`; the ending names the format (.png, .svg)."""
    if result["bench"] not in ("inprocess", "controlplane", "checkpoint"):
        raise UsageError(f"--plot: results of bench {result['bench']} are tables alone.")
    split = [row for row in result["rows"] if row.get("parts_s")]
    twofold = bool(split) or result["bench"] == "checkpoint"
    figure = _pyplot().figure(figsize=(9, 5 + 3 * twofold), layout="constrained")
    try:
        if result["bench"] == "checkpoint":
            checkpoint_show.draw(figure, result, _told(result))
        else:
            _restarts(figure, result, split)
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {target}: {error}") from error
    finally:
        _pyplot().close(figure)


def _restarts(figure: Any, result: Mapping[str, Any], split: Sequence[Mapping[str, Any]]) -> None:
    all_axes = figure.subplots(1 + bool(split))
    (_inprocess if result["bench"] == "inprocess" else _controlplane)(all_axes[0] if split else all_axes, result)
    if split:
        _parts(all_axes[1], split)


def _inprocess(axes: Any, result: Mapping[str, Any]) -> None:
    """Draw bars on a logarithm, a colour for each implementation; where nothing was over, a word."""
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    names = list(dict.fromkeys(name_of(r) for r in rows))
    cases = list(dict.fromkeys(f"{r['fault']}\n{r['ranks']} ranks" for r in rows))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        for row in (r for r in rows if name_of(r) == name):
            at = cases.index(f"{row['fault']}\n{row['ranks']} ranks") - 0.4 + width * (number + 0.5)
            if row["recovery_s"]:
                axes.bar(at, row["recovery_s"][0], width, color=f"C{number}")
            if row["recovered"] < row["faults"]:
                axes.annotate("not over", (at, 1e-2), rotation=90, ha="center", va="bottom")
        axes.bar(0, 0, color=f"C{number}", label=name)
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-2)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("fault to first new step on all ranks, s")
    axes.set_title(_told(result))
    axes.legend()


def _parts(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw where our own time went after the fault was noticed, part by part."""
    names = [f"{name_of(row)}: {row['fault']}, {row['ranks']} ranks" for row in rows]
    ends = [0.0] * len(rows)
    for number, part in enumerate(PARTS[1:]):
        lengths = [row["parts_s"].get(part, 0.0) for row in rows]
        axes.barh(names, lengths, left=ends, color=f"C{number}", label=part.removesuffix("_s").replace("_", " "))
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("s after the fault was noticed, by our ledger")
    axes.legend()


def _controlplane(axes: Any, result: Mapping[str, Any]) -> None:
    for name, label in (("ours", "fault to next roster"), ("barrier", "NVRx: fault to past its barrier")):
        points = [(r["ranks"], r[name]["whole_s"][0]) for r in result["rows"] if r.get(name)]
        if points:
            axes.loglog(*zip(*points, strict=True), "o-", label=label)
    axes.set_xlabel("ranks")
    axes.set_ylabel("s")
    axes.set_title(_told(result))
    axes.legend()


def _told(result: Mapping[str, Any]) -> str:
    found = result["machine"]
    return f"{found['cores']} cores, load {found['load']:.1f} to {found['load_at_end']:.1f}, {found['when']}"
