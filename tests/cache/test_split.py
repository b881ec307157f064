import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_align_jax.cache.split import next_chunk_end


@pytest.mark.parametrize(
    ("start", "proposed", "prompt", "stops", "end"),
    [
        (0, 100, 7, (), 4),  # the last cacheable boundary is stopped at,
        (4, 100, 7, (), 7),  # the rest is the last chunk
        (0, 100, 8, (), 4),  # one token must be left to compute
        (0, 8, 18, (), 8),
        (8, 16, 18, (), 16),
        (0, 10, 18, (), 8),  # a budget inside a block is rounded down
        (0, 3, 18, (), 3),  # but one smaller than a block makes progress,
        (3, 18, 18, (), 4),  # and the next chunk ends with the block
        (0, 100, 30, (8, 9, 40), 8),
        (8, 100, 30, (8, 9), 28),
        (5, 5, 18, (), 0),
        (0, 100, 3, (), 3),
        (7, 8, 8, (), 8),
    ],
)
def test_worked_examples(start, proposed, prompt, stops, end):
    assert next_chunk_end(start, proposed, prompt, 4, stops) == end


@pytest.mark.parametrize(
    ("start", "proposed", "prompt", "stops", "end"),
    [
        (0, 100, 30, (9, 10, 20), 10),  # 9 is no multiple of the granularity
        (10, 100, 30, (20,), 12),  # a chunk that starts inside a block still ends with it,
        (12, 100, 30, (20, 22), 20),
        (20, 100, 30, (22,), 22),  # or at a stop before that
        (0, 9, 30, (10,), 8),
        (8, 9, 30, (10,), 9),
        (22, 100, 30, (30,), 24),
        (28, 100, 30, (30,), 30),
    ],
)
def test_chunks_end_at_stops_inside_blocks_if_states_may_be_kept_there(start, proposed, prompt, stops, end):
    assert next_chunk_end(start, proposed, prompt, 4, stops, 2) == end


@given(st.integers(1, 9), st.integers(1, 60), st.lists(st.integers(1, 20), min_size=60, max_size=60))
def test_every_chunk_ends_where_a_state_may_be_kept(block_size, prompt, budgets):
    start, ends = 0, []
    for budget in budgets:
        end = next_chunk_end(start, start + budget, prompt, block_size)
        if start == prompt:
            assert end == 0
            break
        assert start < end <= min(start + budget, prompt)
        if start % block_size:
            assert end <= (start // block_size + 1) * block_size
        if budget >= block_size and start % block_size == 0:
            assert end % block_size == 0 or end == prompt
        start = end
        ends.append(end)
    last = (prompt - 1) // block_size * block_size
    if start == prompt and last:
        assert last in ends
