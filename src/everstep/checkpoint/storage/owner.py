"""The object that says which job writes to a prefix of an object store, and how it is told."""

import json
from collections.abc import Mapping
from typing import Any

from everstep.checkpoint.storage.bucket import Bucket

OWNER = ".everstep-owner.json"


def read_owner(bucket: Bucket) -> dict[str, Any]:
    """What the owner's object says; nothing where there is none, or it cannot be understood. OSError: not now."""
    try:
        found: object = json.loads(bucket.get(OWNER))
    except (FileNotFoundError, ValueError):
        return {}
    return dict(found) if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownArgumentType]


def told(owner: Mapping[str, Any]) -> str:
    """Say who an owner is."""
    return f"the run {owner.get('run')} (process {owner.get('pid')} on {owner.get('host')})"
