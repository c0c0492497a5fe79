"""What each kind of fault costs, from the fault to the end of the first new step on all ranks, on this machine.

usage: python scripts/measure_recovery.py [--types exception,hang,…] [--ranks 2,4] [--faults 5] [--runs 3] [--json FILE]

Each run is a real job under `everstep run` with seeded faults of one type; the figures are its report's. Medians over
all faults of all runs, with the least and the most; `after` is recovery without the time that noticing took.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from everstep.goodput import report, summary

HERE = Path(__file__).parent
STEPS = 120
PARTS = ("detect_s", "stop_s", "regroup_s", "rebuild_s", "restore_s", "redo_s", "new_step_s")


def one(kind: str, ranks: int, faults: int, seed: int, folder: Path) -> list[dict]:
    run_dir = folder / f"{kind}-{ranks}-{seed}"
    command = [
        sys.executable, "-m", "everstep.cli", "run", "--nproc-per-node", str(ranks), "--run-dir", str(run_dir),
        "--fault-count", str(faults), "--fault-seed", str(seed), "--fault-types", kind,
        str(HERE / "recovery_job.py"), str(STEPS),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return summary.to_json(report.load(run_dir)[0])["faults"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="exception,hang,lock,sigkill,sigstop,gil")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--faults", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; seconds: median (least to most)")
    with tempfile.TemporaryDirectory(prefix="everstep-measure-") as folder:
        for ranks in map(int, args.ranks.split(",")):
            for kind in args.types.split(","):
                faults = [f for seed in range(args.runs) for f in one(kind, ranks, args.faults, seed, Path(folder))]
                rows.append(row(kind, ranks, faults))
                print(line(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def row(kind: str, ranks: int, faults: list[dict]) -> dict:
    whole = [f["recovery_s"] for f in faults]
    after = [f["recovery_s"] - f["detect_s"] for f in faults]
    parts = {part: statistics.median(f[part] or 0.0 for f in faults) for part in PARTS}
    lost = max(f["steps_lost"] for f in faults)
    return {"type": kind, "ranks": ranks, "faults": len(faults), "steps_lost": lost, "parts": parts} | {
        name: [statistics.median(values), min(values), max(values)]
        for name, values in (("recovery", whole), ("after", after))
    }


def line(found: dict) -> str:
    def span(values: list[float]) -> str:
        return f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"

    parts = " ".join(f"{name.removesuffix('_s')} {value:.3f}" for name, value in found["parts"].items())
    return (
        f"{found['ranks']} ranks {found['type']:10} {found['faults']:3} faults: recovery {span(found['recovery'])}, "
        f"after noticing {span(found['after'])}, steps lost at most {found['steps_lost']}\n            {parts}"
    )


if __name__ == "__main__":
    main()
