"""Unit tests where torch is not installed (CI runs them so on Python 3.12).

A module that needs torch is skipped by that name. What mirrors a `core/` may not need it: there it is an error.
"""

import importlib.abc
import importlib.machinery
import importlib.util

import pytest

HEAVY = {name for name in ("torch", "torchdata", "transformers") if importlib.util.find_spec(name) is None}


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Turns the import of a heavy package that is not here into a skip of whoever wants it."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in HEAVY else None

    def create_module(self, spec):
        pytest.skip(f"needs {spec.name}, which is not installed here", allow_module_level=True)

    def exec_module(self, module):
        raise NotImplementedError("create_module never returns")


if HEAVY:
    import sys

    sys.meta_path.append(_Absent())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if HEAVY and report.outcome == "skipped" and "core" in collector.path.parts:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: tests of a core/ must run without {', '.join(sorted(HEAVY))}"
    return report
