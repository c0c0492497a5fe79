"""A cold start of a script that names everstep: a new interpreter, exec'd in the place of the zygote's child.

It has the child's line, page and identity, so that its agent sees one process; nothing but the speed differs.
A script that does not name everstep needs none of this: it is exec'd as torchrun starts it.

usage: python -u -m everstep.launcher.cold LINK_FD PAGE_FD BEGIN_FD
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.launcher import fresh
from everstep.process.page import Page
from everstep.recovery.core.words import Incarnation
from everstep.recovery.link import Link
from everstep.recovery.session import Session


def unpack(link: int, page: int, told: int) -> tuple[Session, Mapping[str, Any]]:
    """Take over what `birth.pack` has left open."""
    for fd in (link, page):
        os.set_inheritable(fd, False)
    with open(told) as file:
        file.seek(0)
        known = json.load(file)
    with fresh.low_taken():
        fd = os.open(f"/proc/self/fd/{page}", os.O_RDWR | os.O_CLOEXEC)
        mapped = Page(fd, stacks=True)
    me = Session(
        link=Link.from_fd(link), page=mapped, job=known["job"], run_dir=Path(known["run_dir"]), slot=known["slot"],
        incarnation=Incarnation.parse(known["incarnation"]),
    )  # fmt: skip
    os.close(fd)
    os.close(page)
    return me, known["begin"]


def main(argv: list[str]) -> None:
    """Run the script, and end with its exit code."""
    fresh.begin()
    from everstep.launcher import birth, console  # noqa: PLC0415 - what they import is not of this interpreter's start

    console.renew()
    birth.leave(birth.run(*unpack(*map(int, argv))))


if __name__ == "__main__":
    main(sys.argv[1:])
