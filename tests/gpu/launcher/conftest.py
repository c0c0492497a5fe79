"""Whole jobs on GPUs are started as those of the launcher's own tests are."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "jobs_of_the_launcher", Path(__file__).parents[2] / "procs/launcher/conftest.py"
)
jobs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(jobs)
start = jobs.start
