"""From RUN to the agent that is asked."""

import os
import socket

import pytest

from everstep.errors import UsageError
from everstep.operator.core.reach import NobodyThere, Reach
from everstep.operator.finding import find
from everstep.recovery.control_file import NAME, ControlFile

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("EVERSTEP_RUN_DIR", "EVERSTEP_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def run(folder, port, host=HERE, written=None):
    folder.mkdir(parents=True)
    ControlFile("127.0.0.1", port, f"token-{port}", host, "node-0", 7, "job").write(folder)
    if written is not None:
        os.utime(folder / NAME, (written, written))
    return folder


def test_a_run_folder_leads_to_its_agent_or_to_the_one_on_this_machine(tmp_path):
    folder = run(tmp_path / "a", 1)
    assert find(str(folder)) == Reach("127.0.0.1", 1, "token-1")
    folder = run(tmp_path / "b", 2, host="elsewhere")
    run(folder / "node-3", 3)
    assert find(str(folder)) == Reach("127.0.0.1", 3, "token-3")


def test_of_several_agents_one_that_listens_is_asked(tmp_path):
    """The first node is lost, and has left its file: any of the others answers for all."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        folder = run(tmp_path / "a", 1)
        run(folder / "node-1", 2)
        run(folder / "node-2", door.getsockname()[1])
        assert find(str(folder)).port == door.getsockname()[1]
    assert find(str(folder)).port == 1, "nobody listens: the first says so"


def test_runs_of_other_machines_in_one_folder_are_passed_over(tmp_path):
    runs = tmp_path / "everstep-runs"
    run(runs / "theirs", 1, host="elsewhere", written=2000)
    (runs / "damaged").mkdir()
    (runs / "damaged" / NAME).write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        find(None)
    (runs / "damaged" / NAME).unlink()
    with pytest.raises(NobodyThere, match="elsewhere"):
        find(None)
    run(runs / "ours", 3, written=1000)
    assert find(None).port == 3


def test_nothing_is_the_newest_run_that_goes_on(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no job of everstep-runs/ goes on"):
        find(None)
    runs = tmp_path / "everstep-runs"
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_server(("127.0.0.1", 0)) as later:
        old, new = (each.getsockname()[1] for each in (door, later))
        run(runs / "old", old, written=1000)
        run(runs / "new", new, written=2000)
        (runs / "over").mkdir()
        assert find(None).port == new
        later.close()
        assert find(None).port == old, "the agent of the newest was killed, and its file is left"
    assert find(None).port == new, "nobody goes on: the newest says so"
    monkeypatch.setenv("EVERSTEP_RUN_DIR", str(run(tmp_path / "own", 3)))
    assert find(None).port == 3


def test_a_run_that_is_over_leads_to_its_report(tmp_path):
    (tmp_path / "over").mkdir()
    with pytest.raises(NobodyThere, match=r"job is over.*everstep report"):
        find(str(tmp_path / "over"))


def test_an_end_point_is_asked_with_the_token_of_the_environment(monkeypatch):
    monkeypatch.setenv("EVERSTEP_TOKEN", "t")
    assert find("node7:4000") == Reach("node7", 4000, "t")
    with pytest.raises(UsageError, match="neither a run folder nor HOST:PORT"):
        find("no-such-folder")
    with pytest.raises(UsageError, match="neither a run folder nor HOST:PORT"):
        find(__file__)


def test_a_file_that_is_damaged_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / NAME).write_text("{")
    with pytest.raises(UsageError, match=rf"a/{NAME} cannot be read"):
        find(str(tmp_path / "a"))
