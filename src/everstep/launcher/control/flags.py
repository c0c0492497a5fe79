"""What `everstep run` is told of its control end point."""

import argparse

from everstep.launcher.control.core.place import FLAG


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag to the parser of `everstep run`; `core.place.place_of` reads it."""
    group = parser.add_argument_group("operators")
    group.add_argument(
        FLAG,
        FLAG.replace("control-endpoint", "control_endpoint"),
        metavar="ADDRESS:PORT",
        default=None,
        help="Where this agent answers `everstep ps` and its like (default 127.0.0.1 and a free port, or "
        "EVERSTEP_CONTROL_ENDPOINT); `none`: nowhere. On another address the token and all answers travel in clear.",
    )
