"""Print what each fault of a run cost, from its report; or compare the losses of runs step by step.

usage: recoveries.py RUN_DIR          recoveries.py --compare TWIN.jsonl RUN.jsonl…
"""

import json
import sys
from pathlib import Path

from everstep.goodput import report, summary


def losses(path: str) -> dict[tuple[int, int], set[str]]:
    found: dict[tuple[int, int], set[str]] = {}
    for line in Path(path).read_text().splitlines():
        body = json.loads(line)
        if "step" in body:
            found.setdefault((body["rank"], body["step"]), set()).add(body["loss"])
    return found


def main() -> None:
    if sys.argv[1] == "--compare":
        twin = losses(sys.argv[2])
        for path in sys.argv[3:]:
            run = losses(path)
            parted = sorted(k[::-1] for k in twin if run.get(k) != twin[k])
            print(
                Path(path).name,
                "equal to the twin at every step" if not parted else f"parts at (step, rank) {parted[:3]}",
            )
        return
    ledger, _ = report.load(Path(sys.argv[1]))
    body = summary.to_json(ledger)
    for fault in body["faults"]:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in fault.items()})
    print({k: body[k] for k in ("wall_s", "steps", "training_goodput", "infra_goodput", "checkpoint_efficiency")})


if __name__ == "__main__":
    main()
