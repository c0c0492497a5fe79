"""IR-02: where a `CallWrapper` is put, and where not."""

from __future__ import annotations

import functools
from typing import Optional

import pytest

from everstep.inprocess import injection


class CallWrapper:
    pass


HELD = CallWrapper()


def annotated(a, call: CallWrapper):
    return a, call


def optional(a, call: Optional[CallWrapper] = None):  # noqa: UP045 - the spelling is what is tested
    return a, call


def with_none(a, call: CallWrapper | None = None):
    return a, call


def keyword_only(a, *, call: CallWrapper):
    return a, call


def first(call: CallWrapper, a):
    return a, call


def positional_only(call: CallWrapper, a, /):
    return a, call


def unresolvable(a, other: NotImported | None = None, call: CallWrapper | None = None):  # noqa: F821
    return a, call


def by_text(a, other: "NotImported" = None, call: "mod.CallWrapper | None" = None):  # noqa: F821, UP037
    return a, call


def wrapped_well(function):
    @functools.wraps(function)
    def adapter(*args, **kwargs):
        return function(*args, **kwargs)

    return adapter


class Trainer:
    def method(self, a, call: CallWrapper):
        return a, call

    @classmethod
    def of_class(cls, a, call: CallWrapper):
        return a, call

    @staticmethod
    def static(a, call: CallWrapper):
        return a, call

    def __call__(self, a, call: CallWrapper):
        return a, call


FORMS = {
    "annotated": annotated,
    "optional": optional,
    "with None": with_none,
    "keyword-only": keyword_only,
    "first": first,
    "positional-only": positional_only,
    "another name is unknown": unresolvable,
    "text": by_text,
    "partial": functools.partial(annotated),
    "partial of a partial": functools.partial(functools.partial(annotated)),
    "method": Trainer().method,
    "class method": Trainer.of_class,
    "static method": Trainer.static,
    "object": Trainer(),
    "adapter with wraps": wrapped_well(annotated),
    "adapters with wraps": wrapped_well(wrapped_well(first)),
}


def call(function, *args, **kwargs):
    names = injection.wanted(function, CallWrapper)
    given, named = injection.fill(function, names, HELD, args, kwargs)
    return function(*given, **named)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_put_into_every_form(form):
    assert call(FORMS[form], 1) == (1, HELD)


@pytest.mark.parametrize("form", [name for name in FORMS if name != "positional-only"])
def test_what_the_caller_gives_wins(form):
    own = CallWrapper()
    assert call(FORMS[form], a=1, call=own) == (1, own)


def test_by_position_too():
    own = CallWrapper()
    assert call(annotated, 1, own) == (1, own)
    assert call(first, own, 1) == (1, own)
    assert call(functools.partial(annotated, 2)) == (2, HELD)
    assert call(functools.partial(annotated, call=own), 1) == (1, own)


def test_two_places_are_both_filled():
    def two(one: CallWrapper, a, other: CallWrapper | None = None):
        return one, a, other

    assert call(two, 1) == (HELD, 1, HELD)


def test_no_place_and_nothing_breaks():
    def plain(a, call=None):
        return a, call

    def swallowing(*args, **kwargs):
        return args, kwargs

    def other(a, call: int | None = None):
        return a, call

    assert call(plain, 1) == (1, None)
    assert call(swallowing, 1, x=2) == ((1,), {"x": 2})
    assert call(other, 1) == (1, None)
    assert injection.wanted(len, CallWrapper) == ()
    assert call(max, 1, 2) == 2


def test_a_wrong_call_is_the_users_own_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        call(annotated)
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(annotated, 1, b=2)
