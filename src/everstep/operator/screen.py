"""Where the operator's commands print: a terminal as wide as it is, anything else without folding a row."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

WIDE = 1000
"""Columns for who reads lines: `grep` must find a row as one."""


def console() -> Console:
    """Return one for standard output."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDE)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return rows under their columns, without lines."""
    made = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        made.add_row(*row)
    return made
