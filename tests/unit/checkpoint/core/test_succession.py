"""What a successor does with the save of a coordinator that is gone."""

import pytest

from everstep.checkpoint.core.commit import Phase, Save
from everstep.checkpoint.core.succession import Standing, resume

SAVE = Save("token", 10, 4)
ALL = frozenset(range(4))


def standing(*staged, save="token", ended=("", "")):
    return Standing(save, 4, frozenset(staged), ended)


@pytest.mark.parametrize(
    ("standings", "reported", "living", "phase"),
    [
        ([standing(2, 3)], ALL, {2, 3}, Phase.MERGING),  # every fragment is here, whoever is gone
        ([standing(2, 3)], {0, 1, 2}, {2, 3}, Phase.WRITING),  # the missing one lives
        ([standing(2, 3)], {0, 2, 3}, {2, 3}, Phase.VOID),  # rank 1 never staged, as far as anybody knows
        ([standing(2, 3), standing(0, 1)], {0, 2, 3}, {2, 3}, Phase.FAILED),  # it staged, and its node is gone
        ([standing(0, 1), standing(2, 3)], set(), ALL, Phase.WRITING),
        ([standing(0), standing(2, 3)], set(), ALL, Phase.VOID),
        ([standing(2, 3), standing(save="", ended=("token", "committed"))], {2}, {2, 3}, Phase.COMMITTED),
        ([standing(2, 3), standing(save="", ended=("token", "void"))], ALL, ALL, Phase.VOID),
        ([standing(2, 3), standing(save="", ended=("older", "failed"))], ALL, ALL, Phase.MERGING),
    ],
)
def test_the_table(standings, reported, living, phase):
    save = resume(SAVE, standings, dict.fromkeys(reported, 1), living)
    assert save.phase is phase
    assert save.ended == bool(save.text)
    assert set(save.written) == (set(reported) if phase is not Phase.COMMITTED and not _told(standings) else set())


def _told(standings):
    return any(one.ended[0] == "token" for one in standings)


def test_it_travels_as_json():
    one = standing(3, 1, ended=("x", "void"))
    assert Standing.from_json(one.to_json()) == one
    with pytest.raises((KeyError, TypeError, ValueError)):
        Standing.from_json({"save": "x"})
