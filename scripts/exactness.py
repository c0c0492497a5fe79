"""Run the whole matrix of exactness and write docs/results/exactness.md: `python scripts/exactness.py [ROWS]`.

With a file of rows (what the tests wrote with ROWS in the environment) it makes the page alone.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
TEST = "tests/procs/launcher/test_exactness_matrix.py"
PAGE = HERE / "docs/results/exactness.md"
HEAD = """# Exactness: every recoverable fault against its fault-free twin

    python scripts/exactness.py

Each cell is a job of its own, `tests/procs/launcher/exact_job.py`: AdamW, a cosine schedule, dropout that differs by
rank, data shuffled by `GlobalSampler`, checkpoints on disk every 2 steps, FSDP2 or DDP with one layout of buckets. The
fault strikes once, inside a step, after the backward; for "during a save" in the midst of the snapshot that the disk
tier asked for. Compared with a twin without faults: each rank's loss of each step, the samples in it and the learning
rate, by their bits, a step that is done again too; and a hash of parameters and optimizer state at the end.

"exact (n)": all of n losses are the twin's, to the bit; "+ m": so many steps were done again, counted on all ranks.

"""


def page(rows: list[dict]) -> str:
    """Return the page's text."""
    alone = {(r["parallel"], r["world"], r["kinds"][0]): r for r in rows if len(r["kinds"]) == 1}
    together = {(r["parallel"], r["world"]): r for r in rows if len(r["kinds"]) > 1}
    columns = sorted({key[:2] for key in alone} | set(together), key=lambda c: (c[0] != "FSDP2", c[1]))
    kinds = list(dict.fromkeys(key[2] for key in alone))
    lines = ["| fault | " + " | ".join(f"{p}, {w} ranks" for p, w in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {kind} | " + " | ".join(told(alone.get((*column, kind))) for column in columns) + " |" for kind in kinds
    ]
    lines.append("| all of them in one job | " + " | ".join(told(together.get(column)) for column in columns) + " |")
    return HEAD + "\n".join(lines) + "\n"


def told(row: dict | None) -> str:
    """Return what one cell says."""
    return "missing" if row is None else f"exact ({row['losses']}) + {row['redone']}"


def main() -> None:
    """Run, or read, and write the page."""
    if len(sys.argv) > 1:
        rows = Path(sys.argv[1])
    else:
        rows = Path(tempfile.mkdtemp()) / "rows.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "long", TEST]
        done = subprocess.run(command, cwd=HERE, env=os.environ | {"ROWS": str(rows)})
        if done.returncode:
            raise SystemExit(f"{TEST} failed; no page is written")
    PAGE.write_text(page([json.loads(line) for line in rows.read_text().splitlines()]))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
