"""Deferred states on Hopper GPUs. A CTA has 64 value dims of one head of one row, and all keys of them.

The state is in registers, in bfloat16 terms, and is the left operand of the product with the row's vectors. A fold has the
same layout, so no element moves to another thread between GMEM and the product. While the state is copied, single threads
compute the coefficients that need no values (gram_sm90.py). Several CTAs share an SM and hide each other's latency.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._deferred_rows import DeferredRow
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.gated_delta_rule._arguments import Options, Projections
from pallas_kernels.gated_delta_rule.deferred._factors import Factors, sizes
from pallas_kernels.gated_delta_rule.deferred.entries import DeltaRuleEntries
from pallas_kernels.gated_delta_rule.deferred.gram_sm90 import Group, Inputs, Results, store_gram
from pallas_kernels.hopper.deferred_rows import clear_padding, deferred_inputs, fold, terms_of
from pallas_kernels.rows import Rows

_VALUES = 64  # value dims of a CTA: the rows of a product on tensor cores
_LENGTHS = (16, 32)  # lengths of groups: the widths of tiles of corrections
_TOGETHER = 8  # corrections that are copied together, if any of them is needed


def unsupported(
    inputs: Projections, pool: jax.Array, ring: DeltaRuleEntries, rows: Rows, *, options: Options
) -> str | None:
    """Return the reason why the kernel cannot run these arguments, or None if it can."""
    value_dim, key_dim = pool.shape[3:]
    length = ring.u.shape[3] // 2
    if inputs.qkv.dtype != jnp.bfloat16:
        return f"qkv must be bfloat16, got {inputs.qkv.dtype}"
    if value_dim % _VALUES or key_dim % 64 or key_dim > 256:
        return f"value_dim and key_dim must be multiples of 64, key_dim at most 256, got {value_dim} and {key_dim}"
    return None if length in _LENGTHS else f"groups must have {_LENGTHS} tokens, got {length}"


class _Cta:
    """The work of a CTA: one row, one value head, and 64 of its value dims.

    A row has at most `max_query_tokens` tokens, and float32 values are multiplied in `count` bfloat16 terms.
    """

    def __init__(self, refs: Any, max_query_tokens: int, count: int, options: Options) -> None:
        self.refs, self.max_query_tokens, self.count, self.options = refs, max_query_tokens, count, options
        index, self.head, self.value_tile = (hp.axis_index(axis) for axis in ("row", "head", "value_tile"))
        self.key_dim, self.length = refs.pool.shape[4], refs.ring_u.shape[3] // 2
        self.vectors, self.group_slots = refs.x_tile.shape[0], refs.fold_tile.shape[0]
        self.at = Factors.of(self.vectors, self.group_slots)
        self.tile = hp.SWIZZLE // refs.pool.dtype.itemsize  # keys in a step of a product
        self.tiles = [hp.ds(first, self.tile) for first in range(0, self.key_dim, self.tile)]
        # All indices are loaded before any is used. The compiler would load some of them only when it knows others.
        loaded = hp.optimization_barrier(DeferredRow.load(refs, index))
        self.row = DeferredRow(loaded, index, refs.slot.shape[0], self.length)
        self.dims = hp.ds(self.value_tile * _VALUES, _VALUES)
        self.repeats = refs.pool.shape[2] // refs.ring_k.shape[2]  # value heads of a key head
        self.key_head = jax.lax.div(self.head, jnp.int32(self.repeats))
        self.key_channels = refs.ring_k.shape[2] * self.key_dim
        self.folds = self.row.folds()
        self.slot, self.vector = hp.columns((_VALUES, self.group_slots)), hp.columns((_VALUES, self.vectors))

    def run(self) -> None:
        """Run the row, and store zeros in outputs of padding tokens."""
        hp.when(self.row.takes_part())(self.run_groups)
        out_of = lambda token: self.refs.out.at[token, self.head, self.dims]
        clear_padding(self.row, self.refs.out.shape[0], self.refs.v_tile.at[0], out_of)

    def run_groups(self) -> None:
        """Run the tokens in the group of the row's base, fold it if necessary, and run the tokens in the next one."""
        refs, row = self.refs, self.row
        self.fetch()
        self.compute_coefficients(0, row.first_group, row.base)
        # The next group's coefficients are computed now, too, because nothing else runs while the state is on its way.
        reaches_next = row.position + row.tokens > row.boundary
        hp.when(reaches_next)(lambda: self.compute_coefficients(1, row.boundary, row.boundary))
        hp.barrier_wait(refs.loaded)
        old = self.corrections(0, row.first_group, row.base)

        def wait_for_state():
            for n in range(len(self.tiles)):
                hp.barrier_wait(refs.state_loaded.at[n])
            return old

        run_first = lambda: self.run_tokens(0, row.first_group, old)
        u = jax.lax.cond(row.position < row.boundary, run_first, wait_for_state)

        @hp.when(self.folds)
        def _():
            states = [refs.state_tiles.at[n] for n in range(len(self.tiles))]
            fold(u, refs, self.at, states, self.tiles, self.count)

            @hp.when(row.keeps_fold())
            def _():
                for n, keys in enumerate(self.tiles):
                    target = refs.pool.at[row.layer, row.fold_to, self.head, self.dims, keys]
                    hp.copy_smem_to_gmem(refs.state_tiles.at[n], target)

            @hp.when(reaches_next)
            def _():
                self.run_tokens(1, row.boundary, self.corrections(1, row.boundary, row.boundary))

        hp.wait_smem_to_gmem(0, wait_read_only=True)

    def fetch(self) -> None:
        """Start the copies to SMEM."""
        refs, row = self.refs, self.row

        @hp.when(row.read != NULL_BLOCK)
        def _():
            for n, keys in enumerate(self.tiles):
                source = refs.pool.at[row.layer, row.read, self.head, self.dims, keys]
                hp.copy_gmem_to_smem(source, refs.state_tiles.at[n], refs.state_loaded.at[n])

        @hp.when(row.read == NULL_BLOCK)
        def _():
            for n in range(len(self.tiles)):
                refs.state_tiles[n] = hp.zeros((_VALUES, self.tile), refs.pool.dtype)
            hp.commit_smem()
            for n in range(len(self.tiles)):
                hp.barrier_arrive(refs.state_loaded.at[n])

        channel = 2 * self.key_channels + self.head * refs.pool.shape[3] + self.value_tile * _VALUES
        # The copy has a fixed size. Tokens after the row's end that it brings are not used.
        source = refs.qkv.at[hp.ds(row.start, self.vectors // 2), hp.ds(channel, _VALUES)]
        hp.copy_gmem_to_smem(source, refs.v_tile, refs.loaded)
        for n, first in enumerate((row.first_group, row.boundary)):
            for first_slot in range(0, self.length, _TOGETHER):
                self.fetch_corrections(n, first, first_slot)

    def fetch_corrections(self, n: int, first: Any, first_slot: int) -> None:
        """Start the copy of some of a group's corrections, if any of their slots has an entry."""
        refs, row, some = self.refs, self.row, hp.ds(first_slot, _TOGETHER)
        entries = hp.ds(row.ring_slot(first) + first_slot, _TOGETHER)
        is_needed = first + first_slot < row.position

        @hp.when(is_needed)
        def _():
            source = refs.ring_u.at[row.layer, row.slot, self.head, entries, self.dims]
            hp.copy_gmem_to_smem(source, refs.u_tiles.at[n, some], refs.loaded)

        hp.when(jnp.logical_not(is_needed))(lambda: hp.barrier_arrive(refs.loaded))

    def compute_coefficients(self, n: int, first: Any, low: Any) -> None:
        """Compute the coefficients of a group."""
        refs, row, head = self.refs, self.row, self.head
        here = hp.ds(head, 1)
        vectors_from = lambda channel: refs.qkv.at[:, hp.ds(channel + self.key_head * self.key_dim, self.key_dim)]
        queries, keys = vectors_from(0), vectors_from(self.key_channels)
        gates = refs.a.at[:, head], refs.b.at[:, head], refs.A_log.at[here], refs.dt_bias.at[here]
        entries = refs.ring_k.at[row.layer, row.slot, self.key_head], refs.ring_g.at[row.layer, row.slot, head]
        inputs = Inputs(queries, keys, *gates, *entries)
        group = Group(first, low, row.ring_slot(first), row.start, row.tokens, row.position)
        is_first = self.value_tile == 0
        keeps_keys = is_first & (jax.lax.rem(head, jnp.int32(self.repeats)) == 0)
        row_bytes = 2 * hp.SWIZZLE // refs.pool.dtype.itemsize
        results = Results(refs.x_tile, refs.coefficient_tile, refs.factor_tile, refs.fold_tile, row_bytes)
        store_gram(n, inputs, group, self.options, results, self.folds, keeps_keys, is_first)

    def times_vectors(self, is_on_its_way: bool) -> jax.Array:
        """Multiply the state, which may be on its way still, with the row's vectors. Return [values, vectors]."""
        refs = self.refs

        def step(n, keys):
            if is_on_its_way:
                hp.barrier_wait(refs.state_loaded.at[n])
            return terms_of(hp.load_tile(refs.state_tiles.at[n]), self.count), refs.x_tile.at[:, keys].T

        steps = [functools.partial(step, n, keys) for n, keys in enumerate(self.tiles)]
        return hp.multiply((_VALUES, self.vectors), steps)

    def corrections(self, n: int, first: Any, low: Any) -> jax.Array:
        """Return a group's corrections [values, group_slots] of earlier calls, from position `low` on, and 0 elsewhere."""
        u = hp.load_transposed(self.refs.u_tiles.at[n]).astype(jnp.float32)
        return jnp.where((first + self.slot >= low) & (first + self.slot < self.row.position), u, 0.0)

    def run_tokens(self, n: int, first: Any, u: jax.Array) -> jax.Array:
        """Run the tokens in the group that starts at `first`. Return the group's corrections."""
        refs, row = self.refs, self.row
        of_state = refs.factor_tile.at[hp.ds(self.at.of_state + n * self.vectors, self.vectors)]
        of_state = hp.along_columns(hp.load_per_column(of_state), _VALUES)
        from_state = of_state * self.times_vectors(is_on_its_way=n == 0)

        def of_vector(vector_index):
            """Return the product of the state with a vector, plus the corrections times their coefficients, [values]."""
            own = jnp.sum(jnp.where(self.vector == vector_index, from_state, 0.0), axis=1)
            of_u = hp.along_columns(hp.load_per_column(refs.coefficient_tile.at[n, vector_index]), _VALUES)
            return own + jnp.sum(u * of_u, axis=1)

        for token in range(self.max_query_tokens):
            here = row.position + token - first
            lives = (token < row.tokens) & (here >= 0) & (here < self.length)
            v = hp.load_per_row(refs.v_tile.at[token]).astype(jnp.float32)
            of_key = refs.factor_tile[self.at.of_key + n * self.vectors + token]
            new = (of_key * (v - of_vector(token))).astype(refs.ring_u.dtype)
            is_own = self.slot == jnp.where(lives, here, -1)
            u = jnp.where(is_own, hp.along_rows(new.astype(jnp.float32), self.group_slots), u)
            answer = of_vector(self.vectors // 2 + token).astype(refs.out.dtype)

            @hp.when(lives)
            def _(here=here, token=token, new=new, answer=answer):
                ring_slot = row.ring_slot(first) + here
                hp.store_gmem(refs.ring_u.at[row.layer, row.slot, self.head, ring_slot, self.dims], new)
                hp.store_gmem(refs.out.at[row.start + token, self.head, self.dims], answer)

        return u


def gated_delta_rule_deferred(
    inputs: Projections, pool: jax.Array, ring: DeltaRuleEntries, rows: Rows, *, options: Options
) -> tuple[jax.Array, jax.Array, DeltaRuleEntries]:
    """Launch the kernel. See api.py."""
    qkv, (value_heads, value_dim, key_dim) = inputs.qkv, pool.shape[2:]
    vectors, group_slots = sizes(rows.max_query_tokens, ring.k.shape[3] // 2)
    count, tile = 3 if pool.dtype == jnp.float32 else 2, hp.SWIZZLE // pool.dtype.itemsize
    results = hp.launch(
        lambda refs: _Cta(refs, rows.max_query_tokens, count, options).run(),
        name="gated_delta_rule_deferred",
        grid=dict(row=rows.num_rows, head=value_heads, value_tile=value_dim // _VALUES),
        inputs=deferred_inputs(rows) | inputs._asdict(),
        outputs=dict(out=jax.ShapeDtypeStruct((qkv.shape[0], value_heads, value_dim), qkv.dtype)),
        updates=dict(pool=pool) | ring.by_name,
        scratch=dict(
            # The state [values, keys], in tiles of keys.
            state_tiles=hp.tiled(key_dim // tile, _VALUES, tile, dtype=pool.dtype),
            # The vectors. A step of a product has as many keys as a row of a state's tile.
            x_tile=hp.tiled(vectors, key_dim, dtype=qkv.dtype, swizzle=2 * hp.SWIZZLE // pool.dtype.itemsize),
            # The corrections of both groups, and the keys of the fold.
            u_tiles=hp.SMEM((2, group_slots, _VALUES), ring.u.dtype),
            fold_tile=hp.tiled(group_slots, key_dim, dtype=qkv.dtype, swizzle=2 * group_slots),
            # The tokens' values, and then the coefficients and factors of `Results`.
            v_tile=hp.SMEM((vectors // 2, _VALUES), qkv.dtype),
            coefficient_tile=hp.SMEM((2, vectors, group_slots), jnp.float32),
            factor_tile=hp.SMEM((Factors.of(vectors, group_slots).size,), jnp.float32),
            # Values, and the corrections of two groups.
            loaded=hp.Barrier(num_arrivals=1 + 2 * group_slots // _TOGETHER),
            # Each step of a product waits for its own tile of the state.
            state_loaded=hp.Barrier(num_barriers=key_dim // tile),
        ),
    )
    return results["out"], results["pool"], DeltaRuleEntries.of(results)
