"""Each finding holds for a run that deserves it, and every way to fall short of it is seen."""

import json
from dataclasses import replace

import pytest

from everstep.errors import LedgerError
from everstep.experiments.proof import (
    Ending,
    Evidence,
    Execution,
    Struck,
    Tape,
    prove,
    read_tape,
    same_training,
    step_s,
)
from everstep.faults.core.plan import PlannedFault, Spec, plan_of

STEPS, WORLD = 40, 2
PLANNED = (
    PlannedFault(0, 6, 1, "exception", "forward"),
    PlannedFault(1, 13, 0, "sigkill", "backward"),
    PlannedFault(2, 20, 1, "hang", "optimizer"),
    PlannedFault(3, 27, 1, "sigkill", "optimizer"),
    PlannedFault(4, 34, 0, "exception", "backward"),
)


def loss(rank: int, step: int) -> str:
    return (5.0 - step / 20 + rank / 1000).hex()


def ending(rank: int, pid: int) -> Ending:
    return Ending(pid, rank, f"model-{rank}", f"optimizer-{rank}")


def twin() -> Tape:
    steps = [Execution(10 + r, r, s, loss(r, s), 100 + s + r / 10) for s in range(1, STEPS + 1) for r in range(WORLD)]
    return Tape(tuple(steps), tuple(ending(r, 10 + r) for r in range(WORLD)))


def evidence(planned=PLANNED) -> Evidence:
    """Make the record of a run that survives `planned` as promised: each step that was begun is done again."""
    pids, spares = {0: 20, 1: 21}, iter(range(22, 99))
    started = {20: 1.0, 21: 1.0}
    now, executions, struck = 200.0, [], []
    by_step = {f.step: f for f in planned}
    spare = next(spares)
    started[spare] = 2.0
    for step in range(1, STEPS + 1):
        fault = by_step.get(step)
        if fault:
            if fault.position == "optimizer":  # the other rank was through with this step, and does it again
                peer = 1 - fault.rank
                executions.append(Execution(pids[peer], peer, step, loss(peer, step), now))
            now += 0.1
            struck.append(Struck(fault.index, now))
            if fault.type == "sigkill":
                pids[fault.rank], spare = spare, next(spares)
                started[spare] = now + 0.1
            now += 1.0
        for rank in range(WORLD):
            executions.append(Execution(pids[rank], rank, step, loss(rank, step), now))
            now += 0.05
    endings = tuple(ending(r, pids[r]) for r in range(WORLD))
    return Evidence(
        twin(), Tape(tuple(executions), endings), STEPS, WORLD, planned, tuple(struck), started, {"twin": 0, "run": 0}
    )


def failed(e: Evidence) -> dict[str, str]:
    return {f.name: f.text for f in prove(e) if not f.holds}


def edited(tape: Tape, edit) -> Tape:
    return replace(tape, executions=tuple(x for x in map(edit, tape.executions) if x is not None))


def test_a_run_that_lost_nothing_is_proven():
    findings = {f.name: f for f in prove(evidence())}
    assert [f for f in findings.values() if not f.holds] == []
    assert "82 losses equal bit for bit, 2 of them of steps redone" in findings["losses"].text
    assert "2 exception, 1 hang, 2 sigkill" in findings["faults"].text
    assert "process 22 had stood ready" in findings["successors"].text
    assert "42 on rank 0, 40 on rank 1; allowed are 40 + 5" in findings["executions"].text
    assert all(f.text for f in findings.values())


@pytest.mark.sample(80)
@pytest.mark.parametrize("seed", range(200))
def test_every_seeded_plan_that_is_survived_is_proven(seed):
    planned = plan_of(Spec(5, seed, ("exception", "hang", "sigkill")), WORLD, STEPS).faults
    assert set(failed(evidence(planned))) <= set(), planned


# Each mutation of the record, and the finding that must see it.

LAST_BIT = float.fromhex(loss(1, 17))


def other_loss(x: Execution) -> Execution:
    import math

    return replace(x, loss=math.nextafter(LAST_BIT, 9).hex()) if (x.rank, x.step) == (1, 17) else x


def test_one_bit_in_one_loss_of_one_rank_is_seen_with_both_values():
    e = evidence()
    text = failed(replace(e, run=edited(e.run, other_loss)))["losses"]
    assert "they part at step 17 on rank 1" in text
    assert loss(1, 17) in text
    assert f"{LAST_BIT!r}" in text


@pytest.mark.parametrize("index", range(len(evidence().run.executions)))
def test_every_loss_counts(index):
    """Those of steps that were done again too: the first of two executions is as good a witness as the second."""
    e = evidence()
    changed = list(e.run.executions)
    changed[index] = replace(changed[index], loss=(float.fromhex(changed[index].loss) + 1e-9).hex())
    assert "losses" in failed(replace(e, run=replace(e.run, executions=tuple(changed))))


@pytest.mark.parametrize("index", range(len(evidence().run.executions)))
def test_every_line_counts(index):
    """Without any one line of the record, some finding fails, unless the line was of a step done twice."""
    e = evidence()
    gone = e.run.executions[index]
    twice = sum((x.rank, x.step) == (gone.rank, gone.step) for x in e.run.executions) > 1
    kept = tuple(x for i, x in enumerate(e.run.executions) if i != index)
    assert bool(failed(replace(e, run=replace(e.run, executions=kept)))) != twice


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("what", ["model", "optimizer"])
@pytest.mark.parametrize("side", ["twin", "run"])
def test_another_hash_at_the_end_is_seen(rank, what, side):
    e = evidence()
    tape: Tape = getattr(e, side)
    ends = tuple(replace(x, **{what: "other"}) if x.rank == rank else x for x in tape.endings)
    text = failed(replace(e, **{side: replace(tape, endings=ends)}))["state"]
    assert f"rank {rank}: the {what} hashes to" in text
    missing = tuple(x for x in tape.endings if x.rank != rank)
    assert f"no hash at the end of the {side}" in failed(replace(e, **{side: replace(tape, endings=missing)}))["state"]


def test_a_loss_that_is_no_number_is_no_proof_though_both_have_it():
    e = evidence()
    nan = lambda x: replace(x, loss="nan") if x.step == 30 else x  # noqa: E731
    assert "no number" in failed(replace(e, twin=edited(e.twin, nan), run=edited(e.run, nan)))["losses"]


def test_a_model_that_does_not_learn_proves_nothing():
    e = evidence()
    flat = lambda x: replace(x, loss=(4.0).hex())  # noqa: E731
    assert "learning" in failed(replace(e, twin=edited(e.twin, flat), run=edited(e.run, flat)))


def test_a_twin_that_had_a_fault_is_no_twin():
    e = evidence()
    again = replace(e.twin, executions=(*e.twin.executions, e.twin.executions[-1]))
    assert "once each" in failed(replace(e, twin=again))["twin"]
    moved = edited(e.twin, lambda x: replace(x, pid=77) if x.rank == 1 and x.step > 20 else x)
    assert "changed its process" in failed(replace(e, twin=moved))["twin"]


@pytest.mark.parametrize(("name", "code"), [("twin", 1), ("run", 1), ("run", -9)])
def test_an_exit_code_counts(name, code):
    e = evidence()
    assert failed(replace(e, exit_codes={**e.exit_codes, name: code})) == {"exit codes": f"{name} ended with {code}"}


def test_a_missing_step_is_seen_in_either_run():
    e = evidence()
    for side in ("twin", "run"):
        tape = edited(getattr(e, side), lambda x: None if x.step == 25 and x.rank == 0 else x)
        assert failed(replace(e, **{side: tape}))["complete"] == f"{side}: rank 0 has no step 25"
    more = replace(e.run, executions=(*e.run.executions, Execution(21, 1, STEPS + 1, loss(1, STEPS + 1), 999)))
    assert "outside the job" in failed(replace(e, run=more))["complete"]


def with_repeats(e: Evidence, rank: int, step: int, times: int, width: int = 1) -> Evidence:
    """Have `rank` do `width` steps up to `step` again, `times` times."""
    out: list[Execution] = []
    for x in e.run.executions:
        out.append(x)
        if (x.rank, x.step) == (rank, step):
            redo = [replace(x, step=s, loss=loss(rank, s)) for s in range(step - width + 1, step + 1)]
            out += redo * times
    return replace(e, run=replace(e.run, executions=tuple(out)))


def test_more_executions_than_steps_and_faults_are_seen():
    assert "executions" not in failed(with_repeats(evidence(), 1, 30, 5))
    assert "rank 1 did 46 steps, more than 40 + 5" in failed(with_repeats(evidence(), 1, 30, 6))["executions"]


def test_two_steps_lost_at_once_are_seen():
    assert "steps lost" not in failed(with_repeats(evidence(), 1, 30, 1))
    assert failed(with_repeats(evidence(), 1, 30, 1, width=2))["steps lost"] == "rank 1 went from step 30 to step 29"


def test_more_rollbacks_than_faults_are_seen():
    assert "went back" in failed(with_repeats(evidence(), 1, 30, 6))["steps lost"]


def test_a_step_left_out_and_done_later_is_seen():
    e = evidence()
    swapped = {(0, 30): 31, (0, 31): 30}
    run = edited(e.run, lambda x: replace(x, step=swapped.get((x.rank, x.step), x.step)))
    assert "rank 0 went from step 29 to step 31" in failed(replace(e, run=run))["steps lost"]


def test_a_survivor_in_a_new_process_is_seen():
    """An exception or a hang leaves the process alive: the rank must come back in it."""
    e = evidence()
    run = edited(e.run, lambda x: replace(x, pid=50) if x.rank == 1 and x.step in range(20, 27) else x)
    started = {**e.started, 50: 3.0}
    assert (
        "rank 1 went from process 21 to 50 after step 19" in failed(replace(e, run=run, started=started))["survivors"]
    )


def test_a_peer_that_was_replaced_though_another_was_killed_is_seen():
    e = evidence()
    run = edited(e.run, lambda x: replace(x, pid=50) if x.rank == 1 and x.step >= 13 and x.pid == 21 else x)
    assert "no fault had ended it" in failed(replace(e, run=run, started={**e.started, 50: 3.0}))["survivors"]


def test_an_end_in_another_process_than_the_last_step_is_seen():
    e = evidence()
    run = replace(e.run, endings=tuple(replace(x, pid=66) for x in e.run.endings))
    assert "ended in process 66" in failed(replace(e, run=run))["survivors"]


def test_a_process_started_after_the_fault_is_no_spare():
    e = evidence()
    killed = e.struck[1].at_s
    text = failed(replace(e, started={**e.started, 22: killed + 0.25}))["successors"]
    assert text == "process 22 took over rank 0 but began 0.250 s after the fault"


def test_a_successor_that_the_ledger_does_not_know_is_seen():
    e = evidence()
    started = {pid: at for pid, at in e.started.items() if pid != 22}
    assert "does not stand in the ledger" in failed(replace(e, started=started))["successors"]


def test_a_kill_after_which_nobody_took_over_is_seen():
    e = evidence()
    run = edited(e.run, lambda x: replace(x, pid=20 + x.rank))
    run = replace(run, endings=tuple(replace(x, pid=20 + x.rank) for x in run.endings))
    assert "nobody was seen to take over" in failed(replace(e, run=run))["successors"]


@pytest.mark.parametrize("index", range(5))
def test_a_fault_that_did_not_strike_or_struck_twice_is_seen(index):
    e = evidence()
    assert f"fault {index}" in failed(replace(e, struck=tuple(s for s in e.struck if s.index != index)))["faults"]
    assert "struck 2 times" in failed(replace(e, struck=(*e.struck, e.struck[index])))["faults"]


def test_an_unplanned_fault_and_an_empty_plan_are_seen():
    e = evidence()
    assert "nobody planned" in failed(replace(e, struck=(*e.struck, Struck(9, 300.0))))["faults"]
    assert failed(replace(e, planned=(), struck=()))["faults"] == "no fault was planned"


@pytest.mark.parametrize("position", ["forward", "backward", "optimizer"])
def test_a_plan_that_spares_a_place_of_the_step_is_seen(position):
    planned = tuple(replace(f, position="boundary") if f.position == position else f for f in PLANNED)
    assert f"no fault {position}" in failed(evidence(planned))["places"]


def test_a_plan_that_spares_rank_0_is_seen():
    planned = tuple(replace(f, rank=1) for f in PLANNED)
    assert "no fault on rank 0" in failed(evidence(planned))["places"]


def test_nothing_at_all_is_no_proof():
    empty = Tape((), ())
    bad = failed(Evidence(empty, empty, STEPS, WORLD, (), (), {}, {}))
    assert set(bad) >= {"exit codes", "complete", "twin", "losses", "state", "learning", "faults", "places"}


def lines(tape: Tape) -> list[str]:
    steps = [{"pid": x.pid, "rank": x.rank, "at": x.at_s, "step": x.step, "loss": x.loss} for x in tape.executions]
    ends = [{"pid": x.pid, "rank": x.rank, "at": 0.0, "model": x.model, "optimizer": x.optimizer} for x in tape.endings]
    return [json.dumps(body) for body in steps + ends]


def test_a_record_is_read_back_as_it_was_written():
    assert read_tape([*lines(evidence().run), "", "\n"], "record") == evidence().run


@pytest.mark.parametrize(
    "line",
    ['{"pid": 1', "[]", "7", '{"pid": 1, "rank": 0, "at": 1.0}',
     '{"pid": 1, "rank": 0, "at": 1.0, "step": 3, "loss": "x"}',
     '{"pid": 1, "rank": 0, "at": 1.0, "step": 3, "loss": 2.5}', '{"rank": 0, "at": 1.0, "step": 3, "loss": "0x1p+1"}'],
)  # fmt: skip
def test_a_line_that_is_no_record_is_named(line):
    with pytest.raises(LedgerError, match=r"run\.jsonl, line 3 is no record of a step"):
        read_tape([*lines(twin())[:2], line], "run.jsonl")


def test_the_step_time_leaves_out_warm_up_rollbacks_and_new_processes():
    seconds = step_s(twin())
    assert seconds == pytest.approx(1.0)
    assert step_s(evidence().run) == pytest.approx(0.1)
    assert step_s(Tape((), ())) is None


def test_the_lethal_types_are_known_to_the_injector():
    from everstep.experiments.proof import LETHAL
    from everstep.faults.core.plan import TYPES

    assert set(TYPES) > LETHAL


def test_the_plain_loop_must_train_to_the_twins_bits():
    tape = twin()
    assert same_training(tape, tape).holds
    lost = edited(tape, lambda x: replace(x, loss=(9.0).hex()) if (x.rank, x.step) == (1, 5) else x)
    assert "step 5 on rank 1" in same_training(lost, tape).text
    other = replace(tape, endings=(ending(0, 10), replace(ending(1, 11), optimizer="other")))
    assert "other values" in same_training(other, tape).text
    for empty in (Tape((), ()), replace(tape, endings=())):
        assert not same_training(empty, tape).holds
        assert not same_training(empty, empty).holds
