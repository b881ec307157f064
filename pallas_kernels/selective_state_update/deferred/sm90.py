"""Deferred states of Mamba-2 on Hopper GPUs. A CTA has 64 channels of one head of one row, and loads them once.

The state is in registers, in bfloat16 terms, and is the left operand of the product with the C of the row's tokens. A
fold has the same layout, so no element moves to another thread between GMEM and the product. A launch before this one
computes the coefficients that need only B, C and step sizes, and stores all entries in the ring (coefficients.py).
Several CTAs share an SM and hide each other's latency.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._deferred_rows import DeferredRow
from pallas_kernels._dot import as_terms
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.hopper.deferred_rows import clear_padding, deferred_inputs, terms_of
from pallas_kernels.rows import Rows
from pallas_kernels.selective_state_update.deferred.coefficients import Factors, coefficients, sizes
from pallas_kernels.selective_state_update.deferred.entries import Inputs, Mamba2Entries

_CHANNELS = 64  # channels of a CTA: the rows of a product on tensor cores
_LENGTHS = (16, 32)  # lengths of groups: the widths of tiles of entries


def unsupported(inputs: Inputs, pool: jax.Array, ring: Mamba2Entries, rows: Rows, *, dt_softplus: bool) -> str | None:
    """Return the reason why the kernel cannot run these arguments, or None if it can."""
    head_dim, state_dim = pool.shape[3:]
    length = ring.x.shape[3] // 2
    if inputs.xBC.dtype != jnp.bfloat16:
        return f"xBC must be bfloat16, got {inputs.xBC.dtype}"
    if head_dim % _CHANNELS or state_dim % 64 or state_dim > 256:
        return f"head_dim and state_dim must be multiples of 64, state_dim at most 256, got {head_dim} and {state_dim}"
    return None if length in _LENGTHS else f"groups must have {_LENGTHS} tokens, got {length}"


def _kernel(refs, *, max_query_tokens: int, count: int):
    """Handle one row, one head, and 64 of its channels.

    A row has at most `max_query_tokens` tokens, and float32 values are multiplied in `count` bfloat16 terms.
    """
    pool, out, state_tile, fold_tile = refs.pool, refs.out, refs.state_tile, refs.fold_tile
    C_tile, x_tiles, factor_tile, out_tile = refs.C_tile, refs.x_tiles, refs.factor_tile, refs.out_tile
    index_of_row, head, channel_tile = (hp.axis_index(axis) for axis in ("row", "head", "channel_tile"))
    state_dim, length = pool.shape[4], refs.ring_x.shape[3] // 2
    vectors, group_slots = C_tile.shape[0], fold_tile.shape[0]
    at = Factors.of(vectors, group_slots)
    tile = hp.SWIZZLE // pool.dtype.itemsize  # states in a step of a product
    tiles = [hp.ds(first, tile) for first in range(0, state_dim, tile)]
    row = DeferredRow(DeferredRow.load(refs, index_of_row), index_of_row, refs.slot.shape[0], length)
    tokens, layer, position = row.tokens, row.layer, row.position
    first_group, boundary = row.first_group, row.boundary
    dims = hp.ds(channel_tile * _CHANNELS, _CHANNELS)
    group = jax.lax.div(head, jnp.int32(pool.shape[2] // refs.C.shape[1]))
    index, vector = hp.columns((_CHANNELS, group_slots)), hp.columns((_CHANNELS, vectors))

    def fetch():
        """Start the copies to SMEM."""

        @hp.when(row.read != NULL_BLOCK)
        def _():
            hp.copy_gmem_to_smem(pool.at[layer, row.read, head, dims], state_tile, refs.loaded)

        @hp.when(row.read == NULL_BLOCK)
        def _():
            state_tile[...] = hp.zeros((_CHANNELS, state_dim), pool.dtype)
            hp.commit_smem()
            hp.barrier_arrive(refs.loaded)

        hp.copy_gmem_to_smem(refs.C.at[row.index, group], C_tile, refs.loaded)
        hp.copy_gmem_to_smem(refs.attention.at[row.index, head], refs.attention_tile, refs.loaded)
        hp.copy_gmem_to_smem(refs.factors.at[row.index, head], factor_tile, refs.loaded)
        for n, first in enumerate((first_group, boundary)):
            entries = hp.ds(row.ring_slot(first), length)
            hp.copy_gmem_to_smem(refs.ring_x.at[layer, row.slot, head, entries, dims], x_tiles.at[n], refs.loaded)

    def state_at(columns):
        return hp.load_tile(state_tile.at[:, columns])

    def times_C():
        """Multiply the state with the C of the row's tokens. Return [channels, tokens]."""
        steps = [
            lambda columns=columns: (terms_of(state_at(columns), count), C_tile.at[:, columns].T) for columns in tiles
        ]
        return hp.multiply((_CHANNELS, vectors), steps)

    def inputs(n, first, low):
        """Return the inputs [channels, group_slots] of a group from position `low` on, and 0 for slots without an entry."""
        x = hp.load_transposed(x_tiles.at[n]).astype(jnp.float32)
        return jnp.where((first + index >= low) & (first + index < position + tokens), x, 0.0)

    def run_tokens(first, x):
        """Run the tokens in the group that starts at `first` and has the inputs x."""
        of_state = factor_tile.at[hp.ds(at.of_state, vectors)]
        of_state = hp.along_columns(hp.load_per_column(of_state), _CHANNELS)
        from_state = of_state * times_C()

        def lives(token):
            here = position + token - first
            return (token < tokens) & (here >= 0) & (here < length)

        for token in range(max_query_tokens):
            own = jnp.sum(jnp.where(vector == token, from_state, 0.0), axis=1)
            of_inputs = hp.along_columns(hp.load_per_column(refs.attention_tile.at[token]), _CHANNELS)
            answer = (own + jnp.sum(x * of_inputs, axis=1)).astype(out.dtype)

            @hp.when(lives(token))
            def _(token=token, answer=answer):
                out_tile[token] = answer

        hp.commit_smem()
        for token in range(max_query_tokens):

            @hp.when(lives(token))
            def _(token=token):
                hp.copy_smem_to_gmem(out_tile.at[token], out.at[row.start + token, head, dims])

    def fold(x):
        """Replace the state in SMEM by the one at the end of the first group, which has the inputs x."""
        of_inputs = factor_tile.at[hp.ds(at.fold, group_slots)]
        decayed = x * hp.along_columns(hp.load_per_column(of_inputs), _CHANNELS)
        left, decay = as_terms(decayed, count)[::-1], factor_tile[at.decay]
        for columns in tiles:
            added = hp.multiply((_CHANNELS, tile), [lambda columns=columns: (left, fold_tile.at[:, columns])])
            state_tile[:, columns] = (decay * state_at(columns).astype(jnp.float32) + added).astype(pool.dtype)
        hp.commit_smem()

    @hp.when(row.takes_part())
    def _():
        fetch()
        folds = row.folds()

        hp.when(folds)(lambda: hp.copy_gmem_to_smem(refs.fold_B.at[row.index, group], fold_tile, refs.fold_loaded))
        hp.barrier_wait(refs.loaded)
        x = inputs(0, first_group, row.base)

        hp.when(position < boundary)(lambda: run_tokens(first_group, x))

        @hp.when(folds)
        def _():
            hp.barrier_wait(refs.fold_loaded)
            fold(x)

            @hp.when(row.keeps_fold())
            def _():
                hp.copy_smem_to_gmem(state_tile, pool.at[layer, row.fold_to, head, dims])

            hp.when(position + tokens > boundary)(lambda: run_tokens(boundary, inputs(1, boundary, boundary)))

        hp.wait_smem_to_gmem(0, wait_read_only=True)

    clear_padding(row, out.shape[0], out_tile.at[0], lambda token: out.at[token, head, dims])


def selective_state_deferred(
    inputs: Inputs, pool: jax.Array, ring: Mamba2Entries, rows: Rows, *, dt_softplus: bool
) -> tuple[jax.Array, jax.Array, Mamba2Entries]:
    """Launch both kernels. See api.py."""
    xBC, (heads, head_dim, state_dim) = inputs.xBC, pool.shape[2:]
    max_query_tokens = rows.max_query_tokens
    vectors, group_slots = sizes(max_query_tokens, ring.x.shape[3] // 2)
    given = coefficients(inputs, ring, rows, vectors=vectors, dt_softplus=dt_softplus)
    results = hp.launch(
        functools.partial(_kernel, max_query_tokens=max_query_tokens, count=3 if pool.dtype == jnp.float32 else 2),
        name="selective_state_deferred",
        grid=dict(row=rows.num_rows, head=heads, channel_tile=head_dim // _CHANNELS),
        inputs=deferred_inputs(rows)
        | {name: given[name] for name in ("ring_x", "C", "attention", "factors", "fold_B")},
        outputs=dict(out=jax.ShapeDtypeStruct((xBC.shape[0], heads, head_dim), xBC.dtype)),
        updates=dict(pool=pool),
        scratch=dict(
            state_tile=hp.tiled(_CHANNELS, state_dim, dtype=pool.dtype),
            # The C of tokens. A step of a product has as many states as a row of a state's tile.
            C_tile=hp.tiled(vectors, state_dim, dtype=xBC.dtype, swizzle=2 * hp.SWIZZLE // pool.dtype.itemsize),
            # The inputs of both groups, and the B of the fold.
            x_tiles=hp.SMEM((2, group_slots, _CHANNELS), xBC.dtype),
            fold_tile=hp.tiled(group_slots, state_dim, dtype=xBC.dtype, swizzle=2 * group_slots),
            attention_tile=hp.SMEM((vectors, group_slots), jnp.float32),
            factor_tile=hp.SMEM((given["factors"].shape[2],), jnp.float32),
            out_tile=hp.SMEM((max_query_tokens, _CHANNELS), xBC.dtype),
            loaded=hp.Barrier(num_arrivals=6),
            fold_loaded=hp.Barrier(),
        ),
    )
    return results["out"], results["pool"], Mamba2Entries.of(given)
