import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from sfumato.randomness import KEY_BYTES, Stream, Streams, derived, digest, key_from_seed, new_key


def test_keys_are_256_bits_and_never_equal():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100 and {len(key) for key in keys} == {KEY_BYTES}
    assert key_from_seed(1) == key_from_seed(1) != key_from_seed(2)


def test_a_stream_is_chacha20_read_from_its_start():
    key = new_key()
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    assert bytes(Stream(key).bytes(1000)) == cipher.update(bytes(1000))


def test_reading_in_parts_reads_the_same_bits():
    key = new_key()
    whole, parts = Stream(key), Stream(key)
    assert np.array_equal(whole.uint64(100), np.concatenate([parts.uint64(n) for n in (1, 7, 64, 28)]))


def test_words_of_either_width_are_the_stream_s_bytes_little_endian():
    key, count = new_key(), 100
    for width, words in ((4, Stream(key).uint32(count)), (8, Stream(key).uint64(count))):
        content = Stream(key).bytes(width * count)
        assert words.tolist() == [
            int.from_bytes(content[i : i + width], "little") for i in range(0, width * count, width)
        ]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("other", [("sampling", 0), ("noise", 1)])
def test_streams_of_two_purposes_or_steps_share_no_bits(other, seed):
    a, b = (Streams(seed).stream(purpose, step).uint64(2000) for purpose, step in (("noise", 0), other))
    assert abs(np.unpackbits((a ^ b).view(np.uint8)).mean() - 0.5) < 0.01


def test_without_a_seed_no_stream_is_ever_given_again():
    streams = Streams()
    assert len({bytes(streams.stream("noise", 1).bytes(32)) for _ in range(100)}) == 100
    assert Streams(1).stream("noise", 1).bytes(32) == Streams(1).stream("noise", 1).bytes(32)
    assert derived(key_from_seed(1), "noise", 1).bytes(32) == Streams(1).stream("noise", 1).bytes(32)
    assert derived(key_from_seed(1), "batch").bytes(32) == Streams(1).stream("batch", 0).bytes(32)
    assert Streams(1).stream("batch").bytes(32) == Streams(1).stream("batch", 0).bytes(32)


def test_digest_ignores_the_order_of_keys_and_sees_every_value():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


def test_what_is_not_a_json_value_has_no_digest():
    """Not a number is not equal to itself, so equal values would not be what gives equal bytes."""
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            digest({"a": [number]})


def test_words_are_found_at_any_place_as_reading_to_there_finds_them():
    key = new_key()
    whole, stream = Stream(key).uint64(4096), Stream(key)
    for first, count in ((0, 1), (8, 100), (4088, 8), (1024, 1024)):
        assert np.array_equal(stream.words_at(first, count), whole[first : first + count])
    assert np.array_equal(stream.uint64(10), whole[:10])  # which moves nothing
    with pytest.raises(AssertionError):  # where no block begins
        stream.words_at(4, 8)


def test_a_stream_ends_rather_than_repeat_itself():
    """ChaCha20 counts blocks of 64 bytes in 32 bits."""
    stream = Stream(new_key())
    assert len(stream.words_at((2**32 - 1) * 8, 8)) == 8
    with pytest.raises(ValueError, match="overflow"):
        stream.words_at((2**32 - 1) * 8, 9)
    with pytest.raises(OverflowError):
        stream.words_at(2**32 * 8, 8)
