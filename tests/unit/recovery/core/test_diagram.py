"""The page shows the tables that run."""

from everstep.recovery.core import diagram, member, world


def test_the_page_is_what_the_tables_are(root):
    page = (root / "docs" / "recovery.md").read_text()
    assert page == diagram.fill(page), "a table has changed: run `python scripts/draw_tables.py`"


def test_every_phase_is_drawn():
    for phase in world.Phase:
        assert f" {phase.value}" in diagram.draw_world()
    for own in member.Phase:
        assert f" {own.value}" in diagram.draw_member()


def test_every_phase_has_a_row():
    assert set(world.TRANSITIONS) == set(world.Phase)
    assert set(member.TRANSITIONS) == set(member.Phase)
