"""Whether two looks at a stack stand in one loop: over real code, paused where a test wants it."""

import sys

import pytest

from everstep.inprocess.core.loops import loops_of, together


def path():
    """Where our caller stands, as far as it is this file's."""
    found, frame = [], sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found[::-1]


def deeper(look):
    return look()


def job(looks):
    for _ in range(2):
        looks["set-up"] = path()
    looks["between"] = path()
    for number in range(3):
        looks["turn"] = path()
        if number == 2:
            looks["same loop"] = path()
            deeper(lambda: looks.update(called=path()))
        for _ in range(2):
            looks["inner"] = path()
    looks["after"] = path()
    while True:
        looks["while"] = path()
        if len(looks) > 7:
            looks["late in while"] = path()
            break
    return looks


@pytest.fixture(scope="module")
def looks():
    return job({})


@pytest.mark.parametrize("place", ["turn", "same loop", "called", "inner"])
def test_one_loop_encloses_both(looks, place):
    assert together(looks["turn"], looks[place])
    assert together(looks[place], looks["turn"])


@pytest.mark.parametrize("place", ["set-up", "between", "after", "while"])
def test_another_loop_or_none(looks, place):
    assert not together(looks["turn"], looks[place])


def test_a_while_is_a_loop_too():
    def spins(found):
        done = 0
        while done < 2:
            found.append(path())
            done += 1
            found.append(path())
        found.append(path())
        return found

    first, second, *_, after = spins([])
    assert together(first, second)
    assert not together(first, after)
    assert len(loops_of(spins.__code__)) == 1


def test_a_function_called_again_and_again_by_a_loop_above_it():
    """A trainer's `fit` turns; what it calls has no loop of its own."""

    def advance(found):
        found.append(path())
        deeper(lambda: found.append(path()))

    def fit(found):
        for _ in range(2):
            advance(found)
        return found

    one, other, *_ = fit([])
    assert together(one, other)
    advance(alone := [])
    assert not together(*alone)


def test_nothing_is_known_of_nothing():
    assert not together((), path())


def test_a_generator_s_wait_is_no_loop():
    def waits():
        yield from range(3)

    assert loops_of(waits.__code__) == ()


def test_an_await_is_no_loop_and_an_async_for_is_one():
    async def waits(it):
        await it

    async def turns(it):
        async for _ in it:
            await it
        await it

    assert loops_of(waits.__code__) == ()
    assert len(loops_of(turns.__code__)) == 1


def test_an_except_block_at_the_function_s_end_is_no_loop():
    def straight(found):
        try:
            raise KeyError
        except KeyError:
            found.append(path())
        found.append(path())
        try:
            raise KeyError
        except KeyError:
            found.append(path())
        return found

    assert loops_of(straight.__code__) == ()
    one, *others = straight([])
    assert not any(together(one, other) for other in others)


def test_an_except_block_belongs_to_the_loop_that_goes_on_behind_it():
    def retries(found):
        done = 0
        while done < 2:
            try:
                found.append(path())
                raise KeyError
            except KeyError:
                found.append(path())
                done += 1
        try:
            raise KeyError
        except KeyError:
            found.append(path())
        return found

    first, handled, again, _, after = retries([])
    assert together(first, handled)
    assert together(handled, again)
    assert not together(handled, after)
    assert len(loops_of(retries.__code__)) == 1


def test_a_long_function_is_walked_without_recursion():
    """Three thousand branches in a row: deeper than the interpreter's stack, if the walk called itself."""
    body = "\n".join(f"    if a == {n}: a += 1" for n in range(3_000))
    code = compile(f"def long(a):\n{body}\n    while a: a -= 1\n", "long", "exec").co_consts[0]
    (loop,) = loops_of(code)
    assert min(loop) > 30_000
