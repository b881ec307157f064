"""A row of a kernel of deferred states on Hopper GPUs: its inputs, zeros for padding tokens, and terms of its state."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._deferred_rows import DeferredRow
from pallas_kernels._dot import as_terms
from pallas_kernels.rows import Rows


def deferred_inputs(rows: Rows) -> dict[str, jax.Array]:
    """Return the inputs of a kernel of `DeferredRow`s, by name."""
    inputs = rows.fold_inputs | dict(layer=jnp.reshape(rows.layer, 1))
    return inputs | dict(read_block=rows.read, fold_block=rows.fold.block)


def clear_padding(row: DeferredRow, tokens: int, zeros: Any, output_of: Callable[[Any], Any]) -> None:
    """Store zeros in the outputs of the padding tokens that a row clears. `tokens` is the number of all tokens.

    `zeros` is SMEM for the outputs of a token, which are in GMEM where `output_of(token)` says.
    """
    padding = row.num_padding(tokens)

    @hp.when(padding > 0)
    def _():
        zeros[...] = hp.zeros_per_row(zeros.shape[0], zeros.dtype)
        hp.commit_smem()
        clear = lambda n, _: hp.copy_smem_to_gmem(zeros, output_of(row.padding_token(n)))
        jax.lax.fori_loop(0, padding, clear, None)
        hp.wait_smem_to_gmem(0, wait_read_only=True)


def fold(entries: jax.Array, refs: Any, at: Any, states: Sequence[Any], columns: Sequence[Any], count: int) -> None:
    """Replace the state in SMEM by the one at the end of a group, whose entries are [rows, group_slots].

    Args:
        entries: The group's corrections or inputs, which `fold_tile` [group_slots, columns] is multiplied with.
        refs: `fold_tile`, and the factors in `factor_tile`.
        at: Where the factors of the entries, `at.fold`, and of the state, `at.decay`, are.
        states: The tiles of the state [rows, columns].
        columns: The columns of each of them.
        count: The number of bfloat16 terms of a float32 value.
    """
    factors = refs.factor_tile.at[hp.ds(at.fold, entries.shape[1])]
    decayed = entries * hp.along_columns(hp.load_per_column(factors), entries.shape[0])
    left, decay = as_terms(decayed, count)[::-1], refs.factor_tile[at.decay]
    for state, here in zip(states, columns, strict=True):
        added = hp.multiply(state.shape, [lambda here=here: (left, refs.fold_tile.at[:, here])])
        state[...] = (decay * hp.load_tile(state).astype(jnp.float32) + added).astype(state.dtype)
    hp.commit_smem()


def terms_of(state: jax.Array, count: int) -> list[jax.Array]:
    """Return a state's `count` bfloat16 terms, lo first, so that larger products do not round them away."""
    return [state] if state.dtype == jnp.bfloat16 else [*as_terms(state.astype(jnp.float32), count)[::-1]]
