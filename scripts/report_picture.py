"""Writes a simulated run's folder and its report page; the docs' picture is a browser's view of it.

usage: python scripts/report_picture.py [--out DIR] [--steps N] [--time]
"""

import argparse
import time
from pathlib import Path

from everstep.goodput.report import draw, load
from everstep.testing.simulated_run import showcase

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=Path("build/report-picture"))
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--time", action="store_true", help="print how long reading and drawing take")
args = parser.parse_args()

run = showcase()
run.steps = args.steps
folder = run.write(args.out / "simulated-run")
begun = time.perf_counter()
ledger, _ = load(folder)
read = time.perf_counter()
draw(ledger, folder.name, args.out / "report.html")
drawn = time.perf_counter()
print(f"{args.out / 'report.html'} written")
if args.time:
    print(f"{len(run.records)} records: accounted for in {read - begun:.2f} s, drawn in {drawn - read:.2f} s")
