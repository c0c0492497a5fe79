"""What has to be installed for the launcher, and what of torch is changed for it: little, and nothing (W36)."""

import re
import tomllib

from everstep.launcher.zygote import BASE_IMPORTS

NEEDED = {"torch", "numpy", "psutil", "pydantic", "PyYAML", "rich", "Jinja2", "xxhash"}
ASSIGNED = re.compile(r"^\s*(?:torch\.|dist\.|elastic\.)[\w.]+ = (?!=)", re.MULTILINE)
"""An attribute of torch's own modules that is set: a patch of it."""


def test_eight_packages_are_needed_and_no_more(root):
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[<>=\[]", name)[0] for name in project["dependencies"]} == NEEDED


def test_no_part_of_torch_is_replaced(root):
    """A workaround in a worker's own process is no patch of the launcher's: those stand in `inprocess`."""
    found = [
        f"{path.name}: {match.group().strip()}"
        for part in ("launcher", "recovery", "process", "fault_tolerance")
        for path in (root / "src/everstep" / part).rglob("*.py")
        for match in ASSIGNED.finditer(path.read_text())
    ]
    assert found == []
    assert not any(name.startswith("torch.distributed.elastic") for name in BASE_IMPORTS)
