"""Hashes of blocks are what their definition says, whether they are asked for one by one or many at once."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_align_jax.cache import hashing
from mamba_align_jax.cache.hashing import HashChain, HashMemo

TOKEN = st.integers(-(2**63), 2**63 - 1)


def expected(tokens, size, salt):
    """The hashes of all full blocks, from the definition."""
    hashes, last = [], hashlib.sha256(b"mamba-align:" + salt).digest()
    for begin in range(0, len(tokens) - size + 1, size):
        block = tokens[begin : begin + size]
        last = hashlib.sha256(last + struct.pack(f"={size}q", *block)).digest()
        hashes.append(last)
    return hashes


@given(st.lists(TOKEN, max_size=40), st.integers(1, 5), st.binary(max_size=3), st.data())
def test_hashes_are_those_of_the_definition_in_whatever_order_they_are_asked_for(tokens, size, salt, data):
    wanted, chain = expected(tokens, size, salt), HashChain(size, salt)
    for _ in range(data.draw(st.integers(1, 5))):
        begin = data.draw(st.integers(0, len(wanted)))
        end = data.draw(st.integers(begin, len(wanted)))
        assert chain.between(tokens, begin * size, end * size) == wanted[begin:end]
        if end:
            assert chain.at(tokens, end * size) == wanted[end - 1]
            # What was hashed once is known without its tokens.
            assert chain.between((), 0, end * size) == wanted[:end]


@given(
    st.lists(st.integers(0, 3), min_size=100, max_size=260),
    st.lists(st.tuples(st.integers(0, 260), st.integers(1, 3), st.binary(max_size=1), st.booleans()), max_size=12),
    st.integers(1, 4),
)
def test_chains_that_share_a_memo_have_the_hashes_of_the_definition(tokens, prompts, groups):
    """Prompts that begin alike, of other block sizes and salts, hashed at once or in two parts. The memo forgets."""
    memo = HashMemo(groups)
    for length, size, salt, in_parts in prompts:
        prompt = tokens[:length] + [9] * 100
        wanted, chain = expected(prompt, size, salt), HashChain(size, salt, memo)
        if in_parts:
            chain.between(prompt, 0, len(wanted) // 3 * size)
        assert chain.between(prompt, 0, len(wanted) * size) == wanted


def test_a_prompt_that_begins_like_another_one_is_hashed_by_groups(monkeypatch):
    made, sha256 = [], hashlib.sha256
    monkeypatch.setattr(hashing.hashlib, "sha256", lambda data: made.append(len(data)) or sha256(data))
    memo, prefix = HashMemo(), list(range(32 * 3 * 4))
    for prompt in (prefix + [1] * 8, prefix + [2] * 8):
        made.clear()
        assert HashChain(4, b"", memo).between(prompt, 0, len(prompt)) == expected(prompt, 4, b"")
    # The root, a hash for each of three groups, and the two blocks that are the prompt's own; then those of `expected`.
    assert len(made) == 1 + 3 + 2 + 1 + 98


@pytest.mark.parametrize(("begin", "end"), [(0, 3), (1, 4), (4, 2), (-2, 2), (0, 2.0), (True, 2), (None, 2)])
def test_ends_must_be_those_of_blocks(begin, end):
    chain = HashChain(2)
    with pytest.raises(ValueError, match="between: begin and end must be multiples of block_size = 2"):
        chain.between([1, 2, 3, 4], begin, end)
    assert chain.between([1, 2, 3, 4], 0, 4) == expected([1, 2, 3, 4], 2, b"")


@pytest.mark.parametrize("wrong", [0, -1, 1.5, None])
def test_a_memo_holds_something(wrong):
    with pytest.raises(ValueError, match="HashMemo: groups"):
        HashMemo(wrong)
    with pytest.raises(ValueError, match="HashChain: memo"):
        HashChain(2, b"", {})


def test_tokens_must_reach_to_the_end():
    chain = HashChain(2)
    with pytest.raises(ValueError, match="between: tokens must be at least end = 4, got 3"):
        chain.between([1, 2, 3], 0, 4)
    with pytest.raises(ValueError, match="at: tokens must be at least end = 4, got 3"):
        chain.at([1, 2, 3], 4)
    assert chain.between([1, 2, 3], 2, 2) == []


@pytest.mark.parametrize("wrong", [None, 1.5, "a", 2**63])
def test_tokens_that_are_no_numbers_leave_the_chain_as_it_was(wrong):
    chain = HashChain(2)
    with pytest.raises(ValueError, match="between: tokens must be whole numbers of 64 bits"):
        chain.between([1, 2, 3, wrong], 0, 4)
    assert chain.between([1, 2, 3, 4], 0, 4) == expected([1, 2, 3, 4], 2, b"")


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_are_no_tokens(kind):
    """An array would take eight of them for one number."""
    with pytest.raises(ValueError, match="at: tokens must be whole numbers of 64 bits"):
        HashChain(8).at(kind(range(64)), 64)
