"""The page shows the tables that run."""

import pytest

from everstep.recovery.core import diagram, member, world


@pytest.mark.parametrize("name", diagram.PAGES)
def test_the_page_is_what_the_tables_are(root, name):
    page = (root / name).read_text()
    assert page == diagram.fill(page, diagram.PAGES[name]), "a table has changed: run `python scripts/draw_tables.py`"


def test_every_phase_is_drawn():
    for phase in world.Phase:
        assert f" {phase.value}" in diagram.draw_world()
    for own in member.Phase:
        assert f" {own.value}" in diagram.draw_member()


def test_an_arrow_says_what_is_done_where_that_is_asked():
    assert "    running --> unwinding: Told / abort, interrupt\n" in diagram.draw_member(actions=True)
    assert "    running --> unwinding: Told\n" in diagram.draw_member()


def test_every_phase_has_a_row():
    assert set(world.TRANSITIONS) == set(world.Phase)
    assert set(member.TRANSITIONS) == set(member.Phase)
