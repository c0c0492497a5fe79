"""What Prometheus reads: its format, no series without end, nothing that is not a number."""

import re

import pytest

from everstep.launcher.control.core.exposition import PHASES, text
from everstep.recovery.core.world import Phase

LINE = re.compile(r'(everstep_[a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*\})? (-?[0-9][0-9.e+-]*)')


def rank(number, **more):
    base = {"role": "rank", "name": f"worker-{number}", "pid": 123_456, "state": "S", "cpu_s": 1.5, "rank": number}
    return base | {"resident_bytes": 5_000_000_123, "step": 9, "mark_age_s": 0.25, "phase": "step"} | more


def view(*processes, **more):
    agent = {"role": "agent", "name": "agent", "pid": 7, "state": "R", "cpu_s": 2.0, "resident_bytes": 1, "rank": None}
    base = {
        "node": "node-0", "job": "abc", "phase": "running", "generation": 1, "world_size": 4, "restarts": 1, "step": 9,
        "typical_step_s": 0.02, "tiers": [], "script": "/secret/path.py", "run_dir": "/secret",
        "faults": [{"text": "secret"}], "notices": [{"text": "secret"}],
    }  # fmt: skip
    return base | {"processes": [agent, *processes]} | more


def read(body):
    """Parse as strictly as the format's page has it; return values by series, and the types by name."""
    found, types, told = {}, {}, []
    for line in body.decode().splitlines():
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            if word == "TYPE":
                assert name not in types, "a family twice"
                types[name] = rest
            told.append(name)
            continue
        match = LINE.fullmatch(line)
        assert match, line
        assert match[1] in types, "its type comes before it"
        assert told[-1] == match[1], "a family stands together"
        assert (match[1], match[2] or "") not in found, "a series twice"
        found[match[1], match[2] or ""] = float(match[3])
    assert body.endswith(b"\n")
    return found, types


def test_a_node_and_its_ranks():
    found, types = read(text(view(rank(0), rank(1, state="T", step=8)), {"death": 2}, {"disk": 1}))
    assert found["everstep_info", '{job="abc",node="node-0"}'] == 1
    assert found["everstep_phase", '{phase="running"}'] == 1
    assert sum(value for (name, _), value in found.items() if name == "everstep_phase") == 1
    assert found["everstep_rank_step", '{rank="1"}'] == 8
    assert found["everstep_rank_stopped", '{rank="1"}'] == 1
    assert found["everstep_rank_resident_bytes", '{rank="0"}'] == 5_000_000_123
    assert found["everstep_faults_total", '{kind="death"}'] == 2
    assert found["everstep_saves_failed_total", '{tier="disk"}'] == 1
    assert found["everstep_processes", '{role="rank"}'] == 2
    assert {name for name, kind in types.items() if kind == "counter"} == {n for n in types if n.endswith("_total")}


def test_tiers():
    tiers = [
        {"tier": "disk", "what": "committed", "step": 5, "bytes": 10, "seconds": 0.5, "age_s": 3.0, "text": "secret"},
        {"tier": "disk", "what": "failed", "step": 6, "bytes": 0, "seconds": 0.0, "age_s": 1.0, "text": ""},
        {"tier": "memory", "what": "kept", "step": 9, "bytes": 30},
    ]
    found, _ = read(text(view(tiers=tiers), {}, {}))
    assert {k[1]: v for k, v in found.items() if k[0] == "everstep_tier_step"} == {
        '{tier="disk"}': 5,
        '{tier="memory"}': 9,
    }
    assert [k[1] for k in found if k[0] == "everstep_tier_age_seconds"] == ['{tier="disk"}']


def test_what_is_not_known_is_left_out():
    early = view(
        rank(0, step=None, mark_age_s=None), generation=None, step=None, typical_step_s=None, phase="gathering"
    )
    names = {name for name, _ in read(text(early, {}, {}))[0]}
    assert not names & {"everstep_generation", "everstep_step", "everstep_step_seconds", "everstep_rank_step"}
    assert "everstep_world_size" in names


def test_what_is_no_number_is_left_out():
    body = text(view(rank(0, mark_age_s=float("inf"), cpu_s=float("nan"))), {}, {})
    assert not {name for name, _ in read(body)[0]} & {
        "everstep_rank_mark_age_seconds",
        "everstep_rank_cpu_seconds_total",
    }


def test_no_text_of_the_job_is_told_and_no_pid():
    body = text(view(rank(0)), {}, {})
    assert b"secret" not in body
    assert b"123456" not in body


@pytest.mark.parametrize("job", ['a"b', "a\\b", "a\nb", "ä"])
def test_a_name_may_be_anything(job):
    read(text(view(job=job), {}, {}))


def test_every_phase_has_its_series():
    assert set(PHASES) == {phase.value for phase in Phase}
