"""JSON that is decoded in slices is what it would be in one piece, and broken JSON is refused wherever it is cut."""

import json
import time

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mamba_align_jax.serve.api import json_slices
from mamba_align_jax.serve.api.json_slices import TooManyValues, decode

# Texts have what could be taken for JSON's own characters.
TEXTS = st.text(st.sampled_from('"\\,:[]{}a \n\u00e9\U0001f600'), max_size=12)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda one: st.lists(one, max_size=8) | st.dictionaries(TEXTS, one, max_size=8),
    max_leaves=30,
)
BROKEN = st.sampled_from(["", ",", "[", "]", "{", "}", '"', "\\", ":", " ", "1", "NaN", "\x00", "\ud83d"])


def in_slices(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_slices, "SLICE_BYTES", size)
        return decode(text, 10**6)


@given(VALUES, st.sampled_from([None, 0, 3]), st.booleans(), st.integers(32, 80))
@example([" " * 50], None, True, 32)
@example({}, 3, True, 32)
@settings(max_examples=80, deadline=None)
def test_slices_are_the_whole(value, indent, is_ascii, size):
    text = f" {json.dumps(value, indent=indent, ensure_ascii=is_ascii)}\n".encode()
    assert in_slices(text, size) == value


@given(VALUES, st.integers(0, 200), st.integers(0, 3), BROKEN, st.integers(32, 80))
@example([10**9] * 9, 12, 0, ",", 32)
@example([10**15] * 4, 17, 0, ",", 32)
@example([[1] * 20], 62, 0, ",[2]", 32)
@example([[1] * 20], 61, 0, "],[", 32)
@settings(max_examples=150, deadline=None)
def test_what_is_broken_is_refused_wherever_it_is_cut(value, place, length, other, size):
    text = json.dumps(value)
    text = (text[:place] + other + text[place + length :]).encode(errors="surrogatepass")
    try:
        wanted = msgspec.json.Decoder(float_hook=float).decode(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            in_slices(text, size)
    else:
        assert in_slices(text, size) == wanted


@pytest.mark.parametrize("space", [b" ", b"\r\n\t "])
@pytest.mark.parametrize("inside", [b"[%s]", b"{%s}", b'{"a"%s:1}', b'[1,%s"a"]'])
def test_spaces_may_be_longer_than_a_slice(space, inside):
    text = inside % (space * 10)
    assert in_slices(text, 4) == json.loads(text)


def test_values_are_counted_before_any_is_made():
    text = b"[" + b",".join([b'{"a":"b"}'] * 5000) + b"]"
    assert len(decode(text, 15_001)) == 5000
    for count in (0, 15_000):
        with pytest.raises(TooManyValues, match=f"at most {count} texts, lists and objects"):
            decode(text, count)
    commas = json.dumps(['[{,\\"' * 10_000]).encode()
    assert decode(commas, 2) == json.loads(commas)


@pytest.mark.parametrize("text", [b"[" * 20_000 + b"]" * 20_000, b'{"a":[1,' * 9000])
def test_deep_nesting_is_refused(text):
    with pytest.raises(RecursionError):
        decode(text, 10**6)


def test_numbers_that_are_hard_to_round_are_read_quickly():
    """Numbers near the largest one take msgspec 20 times as long as Python."""
    text = b"[" + b",".join([b"1.7976931348623157e308"] * 5000) + b"]"
    begin = time.thread_time()
    assert msgspec.json.decode(text) == (found := decode(text, 1))
    middle = time.thread_time()
    assert decode(text, 1) == found
    assert 4 * (time.thread_time() - middle) < middle - begin
