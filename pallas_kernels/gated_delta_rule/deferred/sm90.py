"""Deferred states on Hopper GPUs. A CTA has 64 value dims of one head of one row, and all keys of them.

The state is in registers, in bfloat16 terms, and is the left operand of the product with the row's vectors. A fold has the
same layout, so no element moves to another thread between GMEM and the product. While the state is copied, single threads
compute the coefficients that need no values (gram_sm90.py). Several CTAs share an SM and hide each other's latency.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._dot import as_terms
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.gated_delta_rule._arguments import Options, Projections
from pallas_kernels.gated_delta_rule.deferred._factors import Factors, sizes
from pallas_kernels.gated_delta_rule.deferred.entries import DeltaRuleEntries
from pallas_kernels.gated_delta_rule.deferred.gram_sm90 import Group, Inputs, Results, store_gram
from pallas_kernels.hopper.deferred_rows import DeferredRow, deferred_inputs, terms_of
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


def _kernel(refs, *, max_query_tokens: int, count: int, options: Options):
    """Handle one row, one value head, and 64 of its value dims.

    A row has at most `max_query_tokens` tokens, and float32 values are multiplied in `count` bfloat16 terms.
    """
    pool, ring_u, qkv, out = refs.pool, refs.ring_u, refs.qkv, refs.out
    state_tiles, x_tile, u_tiles, fold_tile = refs.state_tiles, refs.x_tile, refs.u_tiles, refs.fold_tile
    v_tile, factor_tile = refs.v_tile, refs.factor_tile
    index_of_row, head, value_tile = (hp.axis_index(axis) for axis in ("row", "head", "value_tile"))
    (value_dim, key_dim), length = pool.shape[3:], ring_u.shape[3] // 2
    value_heads, key_heads = pool.shape[2], refs.ring_k.shape[2]
    vectors, group_slots = x_tile.shape[0], fold_tile.shape[0]
    at = Factors.of(vectors, group_slots)
    tile = hp.SWIZZLE // pool.dtype.itemsize  # keys in a step of a product
    tiles = [hp.ds(first, tile) for first in range(0, key_dim, tile)]
    row = DeferredRow(refs, index_of_row, length, at_once=True)
    start, tokens, layer, slot, base, position = row.start, row.tokens, row.layer, row.slot, row.base, row.position
    first_group, boundary = row.first_group, row.boundary
    dims = hp.ds(value_tile * _VALUES, _VALUES)
    key_head, key_channels = jax.lax.div(head, jnp.int32(value_heads // key_heads)), key_heads * key_dim
    folds = row.folds()
    index, vector = hp.columns((_VALUES, group_slots)), hp.columns((_VALUES, vectors))

    def fetch():
        """Start the copies to SMEM."""

        @hp.when(row.read != NULL_BLOCK)
        def _():
            for n, keys in enumerate(tiles):
                hp.copy_gmem_to_smem(
                    pool.at[layer, row.read, head, dims, keys], state_tiles.at[n], refs.state_loaded.at[n]
                )

        @hp.when(row.read == NULL_BLOCK)
        def _():
            for n in range(len(tiles)):
                state_tiles[n] = hp.zeros((_VALUES, tile), pool.dtype)
            hp.commit_smem()
            for n in range(len(tiles)):
                hp.barrier_arrive(refs.state_loaded.at[n])

        channel = 2 * key_channels + head * value_dim + value_tile * _VALUES
        # The copy has a fixed size. Tokens after the row's end that it brings are not used.
        hp.copy_gmem_to_smem(qkv.at[hp.ds(start, vectors // 2), hp.ds(channel, _VALUES)], v_tile, refs.loaded)
        for n, first in enumerate((first_group, boundary)):
            for first_slot in range(0, length, _TOGETHER):
                fetch_corrections(n, first, first_slot)

    def fetch_corrections(n, first, first_slot):
        """Start the copy of some of a group's corrections, if any of their slots has an entry."""
        some = hp.ds(first_slot, _TOGETHER)
        entries = hp.ds(row.ring_slot(first) + first_slot, _TOGETHER)
        is_needed = first + first_slot < position
        hp.when(is_needed)(
            lambda: hp.copy_gmem_to_smem(ring_u.at[layer, slot, head, entries, dims], u_tiles.at[n, some], refs.loaded)
        )
        hp.when(jnp.logical_not(is_needed))(lambda: hp.barrier_arrive(refs.loaded))

    def compute_coefficients(n, first, low):
        """Compute the coefficients of a group."""
        here = hp.ds(head, 1)
        queries, keys = (qkv.at[:, hp.ds(channel + key_head * key_dim, key_dim)] for channel in (0, key_channels))
        gates = refs.a.at[:, head], refs.b.at[:, head], refs.A_log.at[here], refs.dt_bias.at[here]
        entries = refs.ring_k.at[layer, slot, key_head], refs.ring_g.at[layer, slot, head]
        inputs = Inputs(queries, keys, *gates, *entries)
        group = Group(first, low, row.ring_slot(first), start, tokens, position)
        is_first = value_tile == 0
        keeps_keys = is_first & (jax.lax.rem(head, jnp.int32(value_heads // key_heads)) == 0)
        row_bytes = 2 * hp.SWIZZLE // pool.dtype.itemsize
        results = Results(x_tile, refs.coefficient_tile, factor_tile, fold_tile, row_bytes)
        store_gram(n, inputs, group, options, results, folds, keeps_keys, is_first)

    def times_vectors(is_on_its_way):
        """Multiply the state, which may be on its way still, with the row's vectors. Return [values, vectors]."""

        def step(n, keys):
            if is_on_its_way:
                hp.barrier_wait(refs.state_loaded.at[n])
            return terms_of(hp.load_tile(state_tiles.at[n]), count), x_tile.at[:, keys].T

        steps = [functools.partial(step, n, keys) for n, keys in enumerate(tiles)]
        return hp.multiply((_VALUES, vectors), steps)

    def corrections(n, first, low, high):
        """Return the corrections [values, group_slots] at positions low .. high - 1 of a group, and 0 elsewhere."""
        u = hp.load_transposed(u_tiles.at[n]).astype(jnp.float32)
        return jnp.where((first + index >= low) & (first + index < high), u, 0.0)

    def run_tokens(n, first, u):
        """Run the tokens in the group that starts at `first`. Return the group's corrections."""
        of_state = factor_tile.at[hp.ds(at.of_state + n * vectors, vectors)]
        of_state = hp.along_columns(hp.load_per_column(of_state), _VALUES)
        from_state = of_state * times_vectors(is_on_its_way=n == 0)

        def of_vector(vector_index):
            """Return the product of the state with a vector, plus the corrections times their coefficients, [values]."""
            own = jnp.sum(jnp.where(vector == vector_index, from_state, 0.0), axis=1)
            of_u = hp.along_columns(hp.load_per_column(refs.coefficient_tile.at[n, vector_index]), _VALUES)
            return own + jnp.sum(u * of_u, axis=1)

        def index_and_lives(token):
            here = position + token - first
            return here, (token < tokens) & (here >= 0) & (here < length)

        for token in range(max_query_tokens):
            here, lives = index_and_lives(token)
            v = hp.load_per_row(v_tile.at[token]).astype(jnp.float32)
            new = (factor_tile[at.of_key + n * vectors + token] * (v - of_vector(token))).astype(ring_u.dtype)
            u = jnp.where(index == jnp.where(lives, here, -1), hp.along_rows(new.astype(jnp.float32), group_slots), u)
            answer = of_vector(vectors // 2 + token).astype(out.dtype)

            @hp.when(lives)
            def _(here=here, token=token, new=new, answer=answer):
                hp.store_gmem(ring_u.at[layer, slot, head, row.ring_slot(first) + here, dims], new)
                hp.store_gmem(out.at[start + token, head, dims], answer)

        return u

    def fold(u):
        """Replace the state in SMEM by the one at the end of the first group."""
        decays = factor_tile.at[hp.ds(at.fold, group_slots)]
        decayed = u * hp.along_columns(hp.load_per_column(decays), _VALUES)
        left, decay = as_terms(decayed, count)[::-1], factor_tile[at.decay]
        for n, keys in enumerate(tiles):
            added = hp.multiply((_VALUES, tile), [lambda keys=keys: (left, fold_tile.at[:, keys])])
            state_tiles[n] = (decay * hp.load_tile(state_tiles.at[n]).astype(jnp.float32) + added).astype(pool.dtype)
        hp.commit_smem()

    @hp.when(row.takes_part())
    def _():
        fetch()
        compute_coefficients(0, first_group, base)
        # The next group's coefficients are computed now, too, because nothing else runs while the state is on its way.
        reaches_next = position + tokens > boundary
        hp.when(reaches_next)(lambda: compute_coefficients(1, boundary, boundary))
        hp.barrier_wait(refs.loaded)
        old = corrections(0, first_group, base, position)

        def wait_for_state():
            for n in range(len(tiles)):
                hp.barrier_wait(refs.state_loaded.at[n])
            return old

        u = jax.lax.cond(position < boundary, lambda: run_tokens(0, first_group, old), wait_for_state)

        @hp.when(folds)
        def _():
            fold(u)

            @hp.when(row.keeps_fold())
            def _():
                for n, keys in enumerate(tiles):
                    hp.copy_smem_to_gmem(state_tiles.at[n], pool.at[layer, row.fold_to, head, dims, keys])

            @hp.when(reaches_next)
            def _():
                run_tokens(1, boundary, corrections(1, boundary, boundary, position))

        hp.wait_smem_to_gmem(0, wait_read_only=True)

    row.clear(out.shape[0], v_tile.at[0], lambda token: out.at[token, head, dims])


def gated_delta_rule_deferred(
    inputs: Projections, pool: jax.Array, ring: DeltaRuleEntries, rows: Rows, *, options: Options
) -> tuple[jax.Array, jax.Array, DeltaRuleEntries]:
    """Launch the kernel. See api.py."""
    qkv, (value_heads, value_dim, key_dim) = inputs.qkv, pool.shape[2:]
    vectors, group_slots = sizes(rows.max_query_tokens, ring.k.shape[3] // 2)
    count, tile = 3 if pool.dtype == jnp.float32 else 2, hp.SWIZZLE // pool.dtype.itemsize
    results = hp.launch(
        functools.partial(_kernel, max_query_tokens=rows.max_query_tokens, count=count, options=options),
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
