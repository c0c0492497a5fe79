"""`ft_launcher` under NVRx's path: `python -m everstep.fault_tolerance.launcher`, or by `packages/ft-launcher`."""

import importlib
import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run a job with `ft_launcher`'s flags and defaults, or with `sys.argv`'s; return the exit code."""
    command_line = importlib.import_module("everstep.cli")  # by name: it lies above all features
    return int(command_line.ft_launcher(args))


if __name__ == "__main__":
    sys.exit(main())
