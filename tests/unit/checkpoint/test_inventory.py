"""What could not be read when the job began: there to be restored, and neither counts nor goes."""

from everstep.checkpoint.core.findings import Findings, Hurt, Known
from everstep.checkpoint.core.retention import Keep
from everstep.checkpoint.inventory import Inventory


def known():
    made = Inventory("/ckpt", "disk")
    made.know(
        Findings(
            told=(),
            found=(
                Known(80, False, None, unread=True),  # not even its manifest
                Known(60, True, 4, {"loss": 0.5}, unread=True),
                Known(40, True, 4, {"loss": 0.7}),
                Known(30, True, 4),  # its content proved damaged
                Known(20, False, None),
            ),
            wounds=(Hurt(30, "__0_0.distcp", "has checksum 1, not 2"), Hurt(20, "manifest.json", "cut")),
            unread=(Hurt(80, "manifest.json", "cannot be read now: no"),),
        )
    )
    return made


def test_what_could_not_be_read_comes_first_by_its_step_and_is_no_durable_one():
    made = known()
    assert [(one.step, one.world_size) for one in made.committed()] == [(80, None), (60, 4), (40, 4)]
    assert (made.newest, made.highest) == (40, 80)
    assert made.lost == ""


def test_it_neither_counts_nor_goes_and_is_whole_when_it_is_saved_again():
    made = known()
    made.add(90, 4)
    assert made.going(Keep(2), besides=90).remove == ()
    made.add(100, 4)
    assert made.going(Keep(2), besides=100).remove == (40,)
    made.add(80, 2)
    assert made.unread == {60}
    assert made.committed()[2].world_size == 2


def test_all_that_was_whole_is_lost_only_when_what_could_not_be_read_is_too():
    made = known()
    made.struck |= {40, 60}
    assert made.lost == ""
    made.struck.add(80)
    assert "no checkpoint in /ckpt is whole any more" in made.lost
    assert made.committed() == []
