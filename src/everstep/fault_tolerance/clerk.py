"""A helper process for files of NVRx's on storage that may hang, so that the agent never waits for it.

agent ─▶ read {path, generation}            ◀─ read {generation, iteration}: null where there is none to be read
agent ─▶ write {folder, name, link, is}     writes JSON beside its name and renames; `link` leads to it then
agent ─▶ last {…}                           the same, ◀─ written {text}: empty, or why it could not be
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.recovery.link import Link, LinkClosed

ENTRY = "everstep.fault_tolerance.clerk:serve"


def serve(link: Link) -> None:
    """Do what the agent asks until it goes."""
    with contextlib.suppress(LinkClosed):
        while True:
            order, _ = link.receive()
            if order["kind"] == "read":
                told = {"generation": order["generation"], "iteration": read(order["path"])}
                link.send({"kind": "read"} | told)
            else:
                text = write(order)
                if text or order["kind"] == "last":
                    link.send({"kind": "written", "text": text, "last": order["kind"] == "last"})


def read(path: str) -> int | None:
    """Return the whole number that stands in a file; None where none can be read."""
    try:
        return int(Path(path).read_text().strip())
    except (OSError, ValueError):
        return None


def write(order: Mapping[str, Any]) -> str:
    """Write one file, and lead the link to it; return why that failed, or nothing."""
    folder = Path(order["folder"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{order['name']}.part"
        beside.write_text(json.dumps(order["is"], indent=2) + "\n")
        os.replace(beside, folder / order["name"])
        beside.symlink_to(order["name"])
        os.replace(beside, folder / order["link"])
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""
