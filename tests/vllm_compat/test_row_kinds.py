"""Row kinds follow vLLM's rule apart from two differences, and make batches that `split_rows` takes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax import AlignConfig, GroupSpec, RecurrentState, StepBatch, begin_step, split_rows
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.tables import BlockTables
from mamba_align_jax.vllm_compat.row_kinds import RowKind, row_kinds, sort_rows

# (tokens, computed, drafts, is_prefilling)
EXAMPLES = {
    (1, 0, 0, True): RowKind.PREFILL,  # a prompt of one token: its first tokens are a prefill row
    (1, 0, -1, True): RowKind.PREFILL,
    (3, 0, 2, True): RowKind.PREFILL,  # a first chunk that was padded with placeholder drafts
    (1, 8, 0, True): RowKind.DECODE,  # the last token of a prompt, after a prefix hit
    (3, 8, 2, True): RowKind.VERIFY,  # the same, padded with placeholder drafts
    (3, 8, 0, True): RowKind.PREFILL,
    (3, 8, 1, True): RowKind.PREFILL,
    (7, 0, 0, True): RowKind.PREFILL,
    (1, 8, 0, False): RowKind.DECODE,
    (1, 8, -1, False): RowKind.DECODE,
    (1, 8, 2, False): RowKind.DECODE,  # its drafts were dropped
    (4, 8, 3, False): RowKind.VERIFY,
    (5, 8, 0, False): RowKind.PREFILL,  # the next turn of a conversation
    (0, 8, 0, False): RowKind.DECODE,
    (0, 0, 3, True): RowKind.DECODE,
}


def kind_of(tokens, computed, drafts, is_prefilling):
    """Our rule, written out case by case."""
    if tokens == 0:
        return RowKind.DECODE
    if is_prefilling and computed == 0:
        return RowKind.PREFILL
    if tokens == 1:
        return RowKind.DECODE
    return RowKind.VERIFY if drafts >= 0 and tokens == 1 + drafts else RowKind.PREFILL


def is_prefill_in_vllm(tokens, computed, drafts, is_prefilling, K):
    """vLLM's rule: `_compute_common_metadata` clears some flags, `split_decodes_and_prefills` looks at lengths."""
    has_prior_state = computed > 0
    looks_like_decode = tokens == 1 or (drafts >= 0 and tokens == drafts + 1)
    if has_prior_state and looks_like_decode:
        is_prefilling = False
    return is_prefilling or tokens > 1 + K


def columns(rows):
    tokens, computed, drafts, is_prefilling = zip(*rows, strict=True)
    return *(np.asarray(x, np.int32) for x in (tokens, computed, drafts)), np.asarray(is_prefilling)


ROW = st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 8]), st.integers(-1, 4), st.booleans())
on_device = jax.jit(row_kinds)


def test_examples():
    np.testing.assert_array_equal(row_kinds(*columns(EXAMPLES)), list(EXAMPLES.values()))


@pytest.mark.parametrize("K", range(5))
def test_only_rows_without_tokens_and_short_rows_that_are_no_verify_rows_differ_from_vllm(K):
    rows = list(itertools.product(range(K + 4), [0, 1, 8], range(-1, K + 1), [False, True]))
    kinds = row_kinds(*columns(rows))
    for (tokens, computed, drafts, is_prefilling), kind in zip(rows, kinds, strict=True):
        in_vllm = is_prefill_in_vllm(tokens, computed, drafts, is_prefilling, K)
        if tokens == 0 and is_prefilling:
            assert (in_vllm, kind) == (True, RowKind.DECODE)
        elif not is_prefilling and 1 < tokens <= 1 + K and tokens != 1 + drafts:
            assert (in_vllm, kind) == (False, RowKind.PREFILL)
        else:
            assert in_vllm == (kind == RowKind.PREFILL), (tokens, computed, drafts, is_prefilling)


@given(st.lists(ROW, min_size=7, max_size=7))
@settings(max_examples=200, deadline=None)
def test_host_and_device_find_the_kinds_of_the_written_out_rule(rows):
    wanted = [kind_of(*row) for row in rows]
    host, device = row_kinds(*columns(rows)), on_device(*columns(rows))
    assert host.dtype == device.dtype == np.int32
    np.testing.assert_array_equal(host, wanted)
    np.testing.assert_array_equal(device, wanted)


@given(st.lists(ROW, min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_sorted_rows_make_a_valid_batch(rows):
    rows = [row for row in rows if not (kind_of(*row) == RowKind.PREFILL and not row[3] and row[2] > 0)]
    if not rows:
        return
    found = sort_rows(*columns(rows))
    wanted = sorted(range(len(rows)), key=lambda r: kind_of(*rows[r]))  # sorted() is stable
    np.testing.assert_array_equal(found.order, wanted)
    kinds = [kind_of(*rows[r]) for r in wanted]
    assert found.num_decode_rows == sum(kind != RowKind.PREFILL for kind in kinds)
    for r, kind, drafts, chunk in zip(wanted, kinds, found.num_drafts, found.is_prefilling, strict=True):
        tokens = rows[r][0]
        assert chunk == (kind == RowKind.PREFILL)
        assert drafts == {RowKind.DECODE: tokens - 1, RowKind.VERIFY: rows[r][2], RowKind.PREFILL: -1}[kind]
    align = AlignConfig((GroupSpec("a", 1, (RecurrentState((1, 1)),)),), 8, 4, max_num_seqs=9)
    loc = np.cumsum([0, *(rows[r][0] for r in wanted)])
    StepBatch.from_host(align, len(rows), range(len(rows)), loc, found.num_drafts)


def test_a_row_with_drafts_and_another_number_of_tokens_is_refused():
    with pytest.raises(ValueError, match="row 1 with 3 drafts must have 4 tokens, got 3"):
        sort_rows(*columns([(4, 8, 3, False), (3, 8, 3, False)]))


def test_prefill_offsets_count_from_the_first_prefill_token():
    K, groups = 2, (GroupSpec("a", 1, (RecurrentState((1, 1)),)), GroupSpec("b", 1, (RecurrentState((1, 1)),)))
    align = AlignConfig(groups, 4, K, max_num_seqs=5, max_model_len=40)
    width = align.num_columns
    tables = BlockTables(blocks=1 + jnp.arange(2 * 5 * width, dtype=jnp.int32).reshape(2, 5, width))
    batch = StepBatch.from_host(align, 6, [3, 0, -1, 4, 1, 2], [0, 1, 4, 4, 9, 9, 16], [0, 2, -1, -1, -1, -1])
    state = AlignState(
        num_computed_tokens=jnp.array([6, 9, 0, 5, 3], jnp.int32),
        num_accepted_tokens=jnp.ones(5, jnp.int32),
        running_column=jnp.array([1, 2, -1, 1, 0], jnp.int32),
    )
    _, indices = begin_step(align, state, batch, tables)
    split = split_rows(batch, indices, 3)
    np.testing.assert_array_equal(split.decode.query_start_loc, [0, 1, 4, 4])
    np.testing.assert_array_equal(split.prefill.query_start_loc, [0, 5, 5, 12])
    assert int(split.first_prefill_token) == 4
    np.testing.assert_array_equal(split.decode.num_computed_tokens, [5, 6, 0])
    np.testing.assert_array_equal(split.prefill.num_computed_tokens, [3, 0, 0])  # slot 1 has no tokens
    for name, of_rows in (("recurrent_read", "read"), ("conv_read", "window_read"), ("write", "write")):
        halves = [getattr(rows, of_rows) for rows in (split.decode, split.prefill)]
        np.testing.assert_array_equal(jnp.concatenate(halves, axis=1), getattr(indices, name))
