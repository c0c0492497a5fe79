"""Who may ask what."""

import json

import pytest

from everstep.launcher.control.core.http import Request
from everstep.launcher.control.core.rights import ROUTES, admit

TOKEN = "a-token"


def asked(path, method=None, authorization=f"Bearer {TOKEN}"):
    headers = {} if authorization is None else {"authorization": authorization}
    refused = admit(Request(method or ROUTES.get(path, ("GET",))[0], path, headers), TOKEN)
    return None if refused is None else refused.status


@pytest.mark.parametrize("path", ROUTES)
def test_with_the_token_each_path_is_answered_by_its_method_alone(path):
    assert asked(path) is None
    assert asked(path, "PUT") == 405
    assert asked(path, authorization=f"bearer  {TOKEN} ") is None


@pytest.mark.parametrize("path", [path for path, (_, guarded) in ROUTES.items() if guarded])
@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", "Bearer other", f"Basic {TOKEN}", TOKEN, "Bearer \xff"]
)
def test_without_it_nothing_is_told_and_the_words_say_where_it_lies(path, given):
    assert asked(path, authorization=given) == 401
    headers = {} if given is None else {"authorization": given}
    text = json.loads(admit(Request("GET", path, headers), TOKEN).body)["error"]
    assert "control.json" in text
    assert "EVERSTEP_TOKEN" in text
    assert TOKEN not in text


def test_what_is_answered_without_the_token_is_the_numbers_alone():
    assert {path for path in ROUTES if asked(path, authorization=None) is None} == {"/metrics"}


def test_a_path_that_is_not_there_is_told_to_who_has_the_token_alone():
    assert asked("/v2/ps") == 404
    assert asked("/v2/ps", authorization=None) == 401
