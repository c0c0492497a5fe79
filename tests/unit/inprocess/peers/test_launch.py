"""How a process was started is read from its environment, and what cannot work is an error with its mend."""

import sys
import types

import pytest

from everstep.errors import ConfigurationError, UsageError
from everstep.inprocess.peers.core import launch
from everstep.inprocess.peers.session import in_notebook
from everstep.inprocess.peers.settings import Settings

MASTER = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}


def read(env, rank=1, size=4, launched=True, notebook=False):
    return launch.read(env, rank, size, launched=launched, notebook=notebook)


def test_bare_processes():
    found = read(MASTER)
    assert (found.kind, found.rank, found.world_size, found.master) == ("bare", 1, 4, ("node-0", 29500))
    assert found.bind == "0.0.0.0"
    assert "nobody puts a process in the place of one that dies" in launch.words(found)
    assert read(MASTER | {"SLURM_JOB_ID": "77"}).job == "77"


def test_torchrun_and_what_is_lost_under_it():
    found = read(MASTER | TORCHRUN)
    assert (found.kind, found.job) == ("torchrun", "none/2")
    said = launch.words(found)
    assert "torchrun ends all ranks as soon as one process dies" in said
    assert "`everstep run` keeps the job" in said


def test_loopback_stays_loopback():
    for address in ("localhost", "127.0.0.1"):
        assert read(MASTER | {"MASTER_ADDR": address}).bind == "127.0.0.1"


def test_a_script_by_itself_is_a_world_of_one():
    for found in (read({}, 0, 1, launched=False), read(MASTER | TORCHRUN, 0, 1)):
        assert (found.kind, found.rank, found.world_size, found.bind) == ("alone", 0, 1, "127.0.0.1")


def test_a_notebook_is_a_world_of_one_or_an_error_that_says_everstep_run():
    assert read({}, 0, 1, launched=False, notebook=True).kind == "alone"
    with pytest.raises(UsageError, match=r"everstep run --nproc-per-node 4 script\.py"):
        read(MASTER, notebook=True)


@pytest.mark.parametrize(
    "broken", [{}, {"MASTER_ADDR": "a"}, MASTER | {"MASTER_PORT": "x"}, MASTER | {"MASTER_PORT": "0"}]
)
def test_ranks_that_do_not_know_where_to_meet(broken):
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        read(broken)


@pytest.mark.parametrize("wrong", [{"soft_s": 0.0}, {"min_world_size": 0}, {"max_restarts": -1}])
def test_settings_that_cannot_be_meant(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Settings(**wrong)


class Shell:
    """What IPython's `get_ipython` returns: in a kernel its configuration names the kernel's application."""

    def __init__(self, *applications):
        self.config = {name: {} for name in applications}


@pytest.mark.parametrize(
    ("shell", "expected"),
    [(Shell("IPKernelApp"), True), (Shell("TerminalIPythonApp"), False), (None, False)],
    ids=["notebook", "terminal", "none"],
)
def test_a_notebook_is_known_by_its_kernel(monkeypatch, shell, expected):
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", module)
    assert in_notebook() is expected


def test_without_ipython_there_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
