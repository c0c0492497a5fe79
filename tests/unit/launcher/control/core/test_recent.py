"""What is kept of what is over: bounded, the newest last."""

from everstep.events import FaultNoticed, Notice, Record, Stamp, StepDone, TierEvent
from everstep.launcher.control.core.recent import MOST, MOST_KINDS, Recent


def stamped(event, at):
    return Record(Stamp(mono_s=at, wall_s=at, boot_id="b", pid=1, role="agent"), event)


def test_the_last_faults_and_notices_are_kept_with_their_age():
    recent = Recent()
    for number in range(3 * MOST):
        kind = "death" if number % 2 else "exception"
        recent.write(stamped(FaultNoticed(number=number, kind=kind, noticed_by="pidfd", injured_rank=1), number))
        recent.write(stamped(Notice(text=f"n{number}", level="warning"), number))
        recent.write(stamped(StepDone(step=number, seconds=1.0), number))
    faults, notices = recent.faults(100.0), recent.notices(100.0)
    assert [fault["generation"] for fault in faults] == list(range(2 * MOST, 3 * MOST))
    assert faults[-1]["age_s"] == 100.0 - (3 * MOST - 1)
    assert notices[-1] == {"level": "warning", "text": f"n{3 * MOST - 1}", "age_s": faults[-1]["age_s"]}
    assert recent.fault_count == {"death": 3 * MOST // 2, "exception": 3 * MOST // 2}


def test_of_each_tier_the_last_save_that_came_to_each_end():
    recent = Recent()
    for at, (tier, what, step) in enumerate(
        [
            ("disk", "planned", 4),
            ("disk", "committed", 4),
            ("disk", "failed", 6),
            ("disk", "failed", 8),
            ("peer", "committed", 9),
        ]
    ):
        recent.write(stamped(TierEvent(tier=tier, what=what, step=step, bytes=7, seconds=0.5, text="t"), at))
    found = {(row["tier"], row["what"]): row["step"] for row in recent.tiers(10.0)}
    assert found == {
        ("disk", "planned"): 4, ("disk", "committed"): 4, ("disk", "failed"): 8, ("peer", "committed"): 9,
    }  # fmt: skip
    assert recent.failed_saves == {"disk": 2}


def test_kinds_without_end_do_not_grow_it():
    recent = Recent()
    for number in range(3 * MOST_KINDS):
        recent.write(stamped(TierEvent(tier=f"t{number}", what="committed", step=1), 0))
    assert len(recent.tiers(1.0)) == MOST_KINDS
