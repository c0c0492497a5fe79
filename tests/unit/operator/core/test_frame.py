"""One frame of `everstep top`."""

import pytest

from everstep.operator.core.frame import NODE_COLUMNS, RANK_COLUMNS, TIER_COLUMNS, frame


def rank(number, *, state="S", step=9, mark=0.1, cpu=1.0, **more):
    base = {
        "role": "rank",
        "name": f"worker-{number}",
        "pid": 100 + number,
        "state": state,
        "cpu_s": cpu,
        "rank": number,
    }
    return base | {"resident_bytes": 5_000_000, "step": step, "mark_age_s": mark, "phase": "step"} | more


def other(role, name):
    return {"role": role, "name": name, "pid": 1, "state": "S", "cpu_s": 0.0, "resident_bytes": 1, "rank": None}


def tier(name, what, step, age=1.0, **more):
    return {"tier": name, "what": what, "step": step, "bytes": 0, "seconds": 0.0, "text": "", "age_s": age} | more


def fault(generation, age, kind="death", number=1, step=7, text="ended by signal 9\na stack"):
    told = {"generation": generation, "kind": kind, "rank": number, "step": step, "noticed_by": "pidfd", "text": text}
    return told | {"age_s": age}


def told(*processes, step=9, tiers=(), faults=(), notices=(), typical=None, more=()):
    def node(name, own):
        facts = {
            "node": name,
            "step": step,
            "typical_step_s": typical,
            "processes": list(own),
            "host": f"host of {name}",
        }
        facts |= {"phase": "running", "generation": 2, "restarts": 1}
        return facts | {"tiers": list(tiers), "faults": list(faults), "notices": list(notices)}

    return {"nodes": [node("node-0", processes), *([node("node-1", more)] if more else [])], "silent": []}


def ranks_of(found):
    return [int(row[0]) for row in found.ranks]


def test_ranks_stand_in_their_order_and_what_does_not_fit_is_counted_the_ones_worth_a_look_kept():
    processes = [rank(n, mark=0.1) for n in range(100)]
    processes[40] = rank(40, state="T")
    processes[70] = rank(70, mark=30.0)
    found = frame(told(*processes), None, 0.0, 3)
    assert ranks_of(found) == [0, 40, 70]
    assert found.more == 97
    assert ranks_of(frame(told(*processes), None, 0.0, 1000)) == list(range(100))
    assert all(len(row) == len(RANK_COLUMNS) for row in found.ranks)


def test_a_rank_that_tells_nothing_of_its_steps_shows_none():
    (row,) = frame(told(rank(0, step=None, mark=None, phase="script")), None, 0.0, 9).ranks
    assert row == ("0", "node-0", "sleeps", "", "5.0 MB", "", "", "script")


def test_nodes_are_shown_where_there_are_several_the_silent_ones_too():
    assert frame(told(rank(0)), None, 0.0, 9).nodes == ()
    several = told(rank(0), rank(1), rank(2), more=[rank(3)]) | {"silent": ["node-2"]}
    found = frame(several, None, 0.0, 9).nodes
    assert found[0] == ("node-0", "host of node-0", "running", "2", "9", "0-2", "1")
    assert [row[0] for row in found] == ["node-0", "node-1", "node-2"]
    assert found[2][2] == "does not answer"
    assert all(len(row) == len(NODE_COLUMNS) for row in found)


def test_rates_need_two_looks_and_are_of_the_same_process():
    before, now = told(rank(0, cpu=1.0), rank(1), step=5), told(rank(0, cpu=2.0), rank(1, pid=7, cpu=3.0), step=9)
    first = frame(before, None, 0.0, 9)
    assert (first.pace, first.ranks[0][3]) == ("", "")
    second = frame(now, before, 2.0, 9)
    assert second.pace == "2.00 steps/s"
    assert [row[3] for row in second.ranks] == ["50 %", ""]


@pytest.mark.parametrize(("earlier", "later"), [(9, 5), (None, 5), (5, None)])
def test_no_rate_is_told_where_steps_were_lost_or_none_is_done(earlier, later):
    assert frame(told(step=later), told(step=earlier), 1.0, 9).pace == ""


def test_of_each_tier_what_it_has_and_what_came_to_no_good_end():
    tiers = [
        tier("disk", "planned", 300), tier("disk", "committed", 250, bytes=5_000_000, seconds=0.5),
        tier("disk", "failed", 200, text="no space"), tier("disk", "removed", 100), tier("disk", "coalesced", 290),
        {"tier": "memory", "what": "kept", "step": 262, "bytes": 10},
        tier("peer", "taken", 260), tier("peer", "committed", 261),
    ]  # fmt: skip
    found = frame(told(tiers=tiers), None, 0.0, 9).tiers
    assert [row[:3] for row in found] == [
        ("disk", "250", "committed 1.0 s ago"), ("disk", "200", "failed 1.0 s ago"),
        ("disk", "300", "planned 1.0 s ago"),
        ("memory", "262", "kept"), ("peer", "261", "committed 1.0 s ago"),
    ]  # fmt: skip
    assert found[0][3:] == ("5.0 MB", "0.5 s", "")
    assert found[1][5] == "no space"
    assert all(len(row) == len(TIER_COLUMNS) for row in found)


def test_of_several_nodes_the_newest_of_each_tier():
    one = told(rank(0), tiers=[tier("disk", "committed", 5)], more=[rank(1)])
    one["nodes"][1]["tiers"] = [tier("disk", "committed", 8, age=0.1)]
    assert [row[:2] for row in frame(one, None, 0.0, 9).tiers] == [("disk", "8")]


def test_the_last_faults_each_once_the_newest_last():
    faults = [fault(n, 100.0 - n) for n in range(8)]
    found = frame(told(faults=faults, more=[rank(1)]), None, 0.0, 9).faults
    assert len(found) == 5
    assert found[-1] == "93.0 s ago: death of rank 1 after step 7, noticed by pidfd: ended by signal 9"
    nobody = fault(0, 1.0, number=None, step=None, text="the store")
    assert frame(told(faults=[nobody]), None, 0.0, 9).faults == ("1.0 s ago: death, noticed by pidfd: the store",)


def test_what_a_job_says_does_not_act_on_the_terminal():
    said = "\x1b[2J\x07gone\r\n"
    notices = [{"level": "error", "text": said, "age_s": 1.0}]
    process = rank(0, phase=f"phase {said}")
    shown = frame(
        told(process, notices=notices, faults=[fault(0, 1.0, text=said)], tiers=[tier("d", "failed", 1, text=said)]),
        None,
        0.0,
        9,
    )
    words = [*shown.notices, *shown.faults, *shown.ranks[0], *shown.tiers[0]]
    assert all(word.isprintable() for word in words)
    assert sum("gone" in word for word in words) == 4


def test_warnings_are_shown_and_what_is_only_said_is_not():
    notices = [{"level": level, "text": level, "age_s": 2.0} for level in ("info", "warning", "error")]
    assert set(frame(told(notices=notices), None, 0.0, 9).notices) == {"2.0 s ago: warning", "2.0 s ago: error"}


def test_what_stands_beside_the_ranks_is_counted():
    processes = [other("agent", "agent"), other("spare", "s"), other("writer", "w0"), other("writer", "w1"), rank(0)]
    assert frame(told(*processes), None, 0.0, 9).others == "1 spare, 2 writers"
