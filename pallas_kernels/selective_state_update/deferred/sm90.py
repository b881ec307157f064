"""Deferred states of Mamba-2 on Hopper GPUs. A CTA has 64 channels of one head of one row, and loads them once.

The state is in registers, in bfloat16 terms, and is the left operand of the product with the C of the row's tokens. A
fold has the same layout, so no element moves to another thread between GMEM and the product. A launch before this one
computes the coefficients that need only B, C and step sizes, and stores all entries in the ring (coefficients.py).
Several CTAs share an SM and hide each other's latency.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._deferred_rows import DeferredRow
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.hopper.deferred_rows import clear_padding, deferred_inputs, fold, terms_of
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


class _Cta:
    """The work of a CTA: one row, one head, and 64 of its channels.

    A row has at most `max_query_tokens` tokens, and float32 values are multiplied in `count` bfloat16 terms.
    """

    def __init__(self, refs: Any, max_query_tokens: int, count: int) -> None:
        self.refs, self.max_query_tokens, self.count = refs, max_query_tokens, count
        index, self.head, channel_tile = (hp.axis_index(axis) for axis in ("row", "head", "channel_tile"))
        self.vectors, self.group_slots = refs.C_tile.shape[0], refs.fold_tile.shape[0]
        self.at = Factors.of(self.vectors, self.group_slots)
        self.tile = hp.SWIZZLE // refs.pool.dtype.itemsize  # states in a step of a product
        self.tiles = [hp.ds(first, self.tile) for first in range(0, refs.pool.shape[4], self.tile)]
        self.row = DeferredRow(DeferredRow.load(refs, index), index, refs.slot.shape[0], refs.ring_x.shape[3] // 2)
        self.dims = hp.ds(channel_tile * _CHANNELS, _CHANNELS)
        self.group = jax.lax.div(self.head, jnp.int32(refs.pool.shape[2] // refs.C.shape[1]))
        self.slot, self.vector = hp.columns((_CHANNELS, self.group_slots)), hp.columns((_CHANNELS, self.vectors))

    def run(self) -> None:
        """Run the row, and store zeros in outputs of padding tokens."""
        out, out_tile = self.refs.out, self.refs.out_tile
        hp.when(self.row.takes_part())(self.run_groups)
        clear_padding(self.row, out.shape[0], out_tile.at[0], lambda token: out.at[token, self.head, self.dims])

    def run_groups(self) -> None:
        """Run the tokens in the group of the row's base, fold it if necessary, and run the tokens in the next one."""
        refs, row = self.refs, self.row
        self.fetch()
        folds, fold_B = row.folds(), refs.fold_B.at[row.index, self.group]
        hp.when(folds)(lambda: hp.copy_gmem_to_smem(fold_B, refs.fold_tile, refs.fold_loaded))
        hp.barrier_wait(refs.loaded)
        x = self.inputs(0, row.first_group, row.base)
        hp.when(row.position < row.boundary)(lambda: self.run_tokens(row.first_group, x))

        @hp.when(folds)
        def _():
            hp.barrier_wait(refs.fold_loaded)
            states = [refs.state_tile.at[:, columns] for columns in self.tiles]
            fold(x, refs, self.at, states, self.tiles, self.count)
            target = refs.pool.at[row.layer, row.fold_to, self.head, self.dims]
            hp.when(row.keeps_fold())(lambda: hp.copy_smem_to_gmem(refs.state_tile, target))
            run_next = lambda: self.run_tokens(row.boundary, self.inputs(1, row.boundary, row.boundary))
            hp.when(row.position + row.tokens > row.boundary)(run_next)

        hp.wait_smem_to_gmem(0, wait_read_only=True)

    def fetch(self) -> None:
        """Start the copies to SMEM."""
        refs, row, state_tile = self.refs, self.row, self.refs.state_tile

        @hp.when(row.read != NULL_BLOCK)
        def _():
            hp.copy_gmem_to_smem(refs.pool.at[row.layer, row.read, self.head, self.dims], state_tile, refs.loaded)

        @hp.when(row.read == NULL_BLOCK)
        def _():
            state_tile[...] = hp.zeros(state_tile.shape, state_tile.dtype)
            hp.commit_smem()
            hp.barrier_arrive(refs.loaded)

        hp.copy_gmem_to_smem(refs.C.at[row.index, self.group], refs.C_tile, refs.loaded)
        hp.copy_gmem_to_smem(refs.attention.at[row.index, self.head], refs.attention_tile, refs.loaded)
        hp.copy_gmem_to_smem(refs.factors.at[row.index, self.head], refs.factor_tile, refs.loaded)
        for n, first in enumerate((row.first_group, row.boundary)):
            entries = hp.ds(row.ring_slot(first), row.length)
            source = refs.ring_x.at[row.layer, row.slot, self.head, entries, self.dims]
            hp.copy_gmem_to_smem(source, refs.x_tiles.at[n], refs.loaded)

    def state_at(self, columns: Any) -> jax.Array:
        """Load some columns of the state from SMEM."""
        return hp.load_tile(self.refs.state_tile.at[:, columns])

    def times_C(self) -> jax.Array:
        """Multiply the state with the C of the row's tokens. Return [channels, tokens]."""
        step = lambda columns: (terms_of(self.state_at(columns), self.count), self.refs.C_tile.at[:, columns].T)
        return hp.multiply((_CHANNELS, self.vectors), [functools.partial(step, columns) for columns in self.tiles])

    def inputs(self, n: int, first: Any, low: Any) -> jax.Array:
        """Return the inputs [channels, group_slots] of a group from position `low` on, and 0 for slots without an entry."""
        x, row = hp.load_transposed(self.refs.x_tiles.at[n]).astype(jnp.float32), self.row
        return jnp.where((first + self.slot >= low) & (first + self.slot < row.position + row.tokens), x, 0.0)

    def run_tokens(self, first: Any, x: jax.Array) -> None:
        """Run the tokens in the group that starts at `first` and has the inputs x."""
        refs, row, out_tile = self.refs, self.row, self.refs.out_tile
        of_state = refs.factor_tile.at[hp.ds(self.at.of_state, self.vectors)]
        of_state = hp.along_columns(hp.load_per_column(of_state), _CHANNELS)
        from_state = of_state * self.times_C()

        def lives(token):
            here = row.position + token - first
            return (token < row.tokens) & (here >= 0) & (here < row.length)

        for token in range(self.max_query_tokens):
            own = jnp.sum(jnp.where(self.vector == token, from_state, 0.0), axis=1)
            of_inputs = hp.along_columns(hp.load_per_column(refs.attention_tile.at[token]), _CHANNELS)
            answer = (own + jnp.sum(x * of_inputs, axis=1)).astype(out_tile.dtype)

            @hp.when(lives(token))
            def _(token=token, answer=answer):
                out_tile[token] = answer

        hp.commit_smem()
        for token in range(self.max_query_tokens):

            @hp.when(lives(token))
            def _(token=token):
                hp.copy_smem_to_gmem(out_tile.at[token], refs.out.at[row.start + token, self.head, self.dims])


def selective_state_deferred(
    inputs: Inputs, pool: jax.Array, ring: Mamba2Entries, rows: Rows, *, dt_softplus: bool
) -> tuple[jax.Array, jax.Array, Mamba2Entries]:
    """Launch both kernels. See api.py."""
    xBC, (heads, head_dim, state_dim) = inputs.xBC, pool.shape[2:]
    max_query_tokens = rows.max_query_tokens
    vectors, group_slots = sizes(max_query_tokens, ring.x.shape[3] // 2)
    given = coefficients(inputs, ring, rows, vectors=vectors, dt_softplus=dt_softplus)
    count = 3 if pool.dtype == jnp.float32 else 2
    results = hp.launch(
        lambda refs: _Cta(refs, max_query_tokens, count).run(),
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
