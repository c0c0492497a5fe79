"""A buffer is void unless it is sealed and whole; its reader never guesses."""

import random

import pytest
import xxhash

from everstep.checkpoint.core.segment import (
    HEADER_BYTES,
    Header,
    checksum_of,
    needed_bytes,
    parse,
    put_checksum,
    seal,
    unseal,
    wound,
    write,
)

META = b'{"v":1,"sections":[]}'


def header(**changes) -> Header:
    values = {"sequence": 7, "step": 41, "epoch": 0, "generation": 3, "parent": 40, "rank": 1, "world_size": 2}
    return Header(**(values | {"payload_bytes": 1000, "meta_bytes": len(META)} | changes))


def sealed(size: int = 8192) -> bytearray:
    buffer = bytearray(size)
    write(buffer, header(), META)
    seal(buffer, 7)
    return buffer


def test_a_sealed_buffer_says_what_was_written():
    found = parse(sealed())
    assert isinstance(found, Header)
    assert found == header(meta_offset=HEADER_BYTES + 1024)
    assert found.lineage == (0, 3, 40)
    assert bytes(sealed()[found.meta_offset :][: found.meta_bytes]) == META


def test_fresh_written_and_revoked_buffers_are_void():
    buffer = bytearray(8192)
    assert parse(buffer) == "void: not sealed"
    write(buffer, header(), META)
    assert parse(buffer) == "void: not sealed"
    seal(buffer, 7)
    assert isinstance(parse(buffer), Header)
    unseal(buffer)
    assert parse(buffer) == "void: not sealed"
    assert parse(b"short") == "only 5 bytes, less than a header"


def test_a_buffer_that_is_too_small_is_refused_before_a_byte_is_written():
    needed = needed_bytes(1000, len(META))
    small = bytearray(needed - 1)
    with pytest.raises(ValueError, match=f"{needed} bytes does not fit a buffer of {needed - 1}"):
        write(small, header(), META)
    assert not any(small)
    exact = bytearray(needed)
    write(exact, header(), META)
    seal(exact, 7)
    assert isinstance(parse(exact), Header)


def test_every_flipped_byte_of_header_and_meta_is_noticed():
    whole = sealed()
    end = HEADER_BYTES + 1024 + len(META)
    places = [*range(150), *range(HEADER_BYTES + 1024, end)]
    written = {n for n in range(150) if whole[n]} | set(range(116)) | set(range(HEADER_BYTES + 1024, end))
    for place in places:
        buffer = bytearray(whole)
        buffer[place] ^= 0x40
        found = parse(buffer)
        assert isinstance(found, str) == (place in written), place


def test_a_kill_at_any_store_of_a_new_snapshot_leaves_the_buffer_void():
    """Every prefix of the stores, and every prefix of each store's bytes (stronger than what a kill can do)."""
    old, new = sealed(), bytearray(8192)
    write(new, header(sequence=8, step=42), META)
    seal(new, 8)
    for seed in range(300):
        rng = random.Random(seed)
        buffer = bytearray(old)
        unseal(buffer)
        stage = rng.randrange(3)
        if stage > 0:
            write(buffer, header(sequence=8, step=42), META)
        if stage == 2:  # in the middle of sealing: the inverted word stands, of the plain one so many bytes
            buffer[16 : 16 + rng.randrange(9)] = new[16 : 16 + rng.randrange(9)]
            buffer = buffer[:8192]
        assert isinstance(parse(buffer), str)


def test_noise_never_raises():
    rng = random.Random(5)
    for _ in range(200):
        buffer = bytearray(rng.randbytes(4096 + rng.randrange(200)))
        assert isinstance(parse(buffer), str)
        buffer[:8] = b"EVERSNAP"
        assert isinstance(parse(buffer), str)


def hashed() -> bytearray:
    buffer = sealed()
    put_checksum(buffer, parse(buffer), xxhash.xxh3_64_intdigest(bytes(buffer[HEADER_BYTES : HEADER_BYTES + 1000])))
    return buffer


def test_a_copy_says_whether_it_is_sealed_or_hashed():
    assert checksum_of(sealed(), parse(sealed())) is None
    buffer = hashed()
    assert checksum_of(buffer, parse(buffer)) == xxhash.xxh3_64_intdigest(bytes(1000))
    assert wound(buffer, parse(buffer)) == wound(sealed(), parse(sealed())) == ""


@pytest.mark.parametrize("at", [0, 1, 500, 999])
def test_every_flipped_byte_of_a_hashed_payload_is_noticed(at):
    buffer = hashed()
    buffer[HEADER_BYTES + at] ^= 0x10
    assert "bytes were changed in memory" in wound(buffer, parse(buffer))


def test_a_checksum_is_of_its_own_snapshot_alone():
    """The next snapshot in the buffer, a torn checksum, a revoked one: only sealed, never wounded."""
    buffer = hashed()
    unseal(buffer)
    write(buffer, header(sequence=8), META)
    buffer[HEADER_BYTES] ^= 1
    seal(buffer, 8)
    assert checksum_of(buffer, parse(buffer)) is None
    for place in range(512, 536):
        torn = hashed()
        torn[place] ^= 1
        assert checksum_of(torn, parse(torn)) is None
        assert wound(torn, parse(torn)) == ""
