"""Deferred states as a Pallas kernel.

A program has some value dims of one head of one row, in tiles, and all keys of them. The vectors of a row's tokens, keys
first and then queries, are the rows of one tile. One product multiplies them all by a tile of the state, and one by the keys
of the group. Each token then needs one sum over the group's corrections. Coefficients that do not depend on values are
computed once for all tiles of a program.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._deferred_rows import DeferredRow
from pallas_kernels._dot import Operand, dot, operand
from pallas_kernels._pallas_triton import Lanes, Refs
from pallas_kernels._tiles import iota, key_lanes
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.dispatch import Run
from pallas_kernels.gated_delta_rule._arguments import Options, Projections
from pallas_kernels.gated_delta_rule.deferred._factors import sizes
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig, default_config
from pallas_kernels.gated_delta_rule.deferred.entries import DeltaRuleEntries
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON
from pallas_kernels.rows import Rows


class _Group(NamedTuple):
    """A group's entries of accepted tokens and of this call's, without corrections. Everything else is 0.

    Attributes:
        k: Raw keys, a tile [group_slots, keys] for each tile of keys.
        g: Log decays, [group_slots].
        new: Which slots belong to tokens of this call, [group_slots].
        at: The slots' indices in the ring, [group_slots].
    """

    k: list[jax.Array]
    g: jax.Array
    new: jax.Array
    at: jax.Array


def _row(tile: jax.Array, index: jax.Array) -> jax.Array:
    """Return row `index` of a tile."""
    return jnp.sum(jnp.where(iota(tile.shape, 0) == index, tile, 0.0), axis=0)


class _Program:
    """The work of a program: one row, value head and block of value dims. The row has at most `max_query_tokens` tokens.

    It reads the arguments of `gated_delta_rule_deferred`, updates `pool` and the ring, and writes `out`.
    """

    def __init__(
        self, refs: Refs, max_query_tokens: int, config: DeferredConfig, options: Options, interpret: bool
    ) -> None:
        self.refs, self.config, self.options, self.interpret = refs, config, options, interpret
        key_heads, ring_slots, self.key_dim = refs.ring_k.shape[2:]
        value_heads, self.value_dim = refs.pool.shape[2:4]
        self.repeats, self.key_channels = value_heads // key_heads, key_heads * self.key_dim
        self.value_block, self.head, row = (pt.program_id(axis) for axis in range(3))
        self.key_head = jax.lax.div(self.head, jnp.int32(self.repeats))
        loaded = DeferredRow.load(refs, row)
        self.A_log, self.dt_bias = refs.A_log[self.head], refs.dt_bias[self.head]
        self.row = DeferredRow(loaded, row, refs.slot.shape[0], ring_slots // 2)
        vectors, group_slots = sizes(max_query_tokens, ring_slots // 2)
        self.index, vector, half = iota((group_slots,), 0), iota((vectors,), 0), vectors // 2
        self.is_key, self.offset = vector < half, vector & (half - 1)
        size = min(config.tile_key, key_lanes(self.key_dim))
        self.keys = [pt.lanes(n, size, self.key_dim) for n in range(-(-self.key_dim // size))]
        self.tiles = config.block_value // config.tile_value
        self.product = functools.partial(dot, interpret=interpret)
        # The number of bfloat16 terms of operands that only outputs depend on.
        self.narrow = 2 if refs.qkv.dtype.itemsize == 2 else 3

    def run(self) -> None:
        """Run the row, and store zeros in outputs of padding tokens."""
        self.row.run_stages(lambda n: _Stage(self, n).run())
        jax.lax.fori_loop(0, self.row.num_padding(self.refs.qkv.shape[0]), self.clear, None)

    def clear(self, n: jax.Array, _: None) -> None:
        """Write zeros to the n-th padding token that this row clears."""
        value, inside = pt.lanes(self.value_block, self.config.block_value, self.value_dim)
        zeros = jnp.zeros(value.shape, self.refs.out.dtype)
        pt.store(self.refs.out.at[self.row.padding_token(n), self.head, value], zeros, mask=inside)

    def values(self, tile: jax.Array) -> Lanes:
        """Return the value dims of a tile."""
        return pt.lanes(self.value_block * self.tiles + tile, self.config.tile_value, self.value_dim)

    def states_at(self, block: jax.Array, value: Lanes) -> Iterator[tuple[Any, jax.Array]]:
        """Yield a block's state for some values, by tiles of keys, and which of its elements exist."""
        for key, inside in self.keys:
            mask = value[1][:, None] & inside[None, :] & (block != NULL_BLOCK)
            yield self.refs.pool.at[self.row.layer, block, self.head, value[0][:, None], key[None, :]], mask

    def load_group(self, first: jax.Array, low: jax.Array) -> _Group:
        """Load the entries from position `low` on of the group that starts at position `first`."""
        refs, row = self.refs, self.row
        old, new, at, token = row.entries(self.index, first, low)
        k = []
        for key, exists in self.keys:
            ring_at = refs.ring_k.at[row.layer, row.slot, self.key_head, at[:, None], key[None, :]]
            call_at = refs.qkv.at[token[:, None], self.key_channels + self.key_head * self.key_dim + key[None, :]]
            ring = pt.load(ring_at, mask=old[:, None] & exists[None, :], other=0.0)
            call = pt.load(call_at, mask=new[:, None] & exists[None, :], other=0.0)
            k.append(jnp.where(new[:, None], call, ring))
        a = pt.load(refs.a.at[token, self.head], mask=new, other=0.0)
        g, _ = self.options.gates.compute(a, a, self.A_log, self.dt_bias)
        g = jnp.where(new, g, pt.load(refs.ring_g.at[row.layer, row.slot, self.head, at], mask=old, other=0.0))
        return _Group(k, g, new, at)

    def corrections_at(self, first: jax.Array, low: jax.Array, high: jax.Array, value: Lanes) -> tuple[Any, jax.Array]:
        """Return the corrections [group_slots, values] at positions low .. high - 1 of the group that starts at `first`."""
        of, row = first + self.index, self.row
        inside = ((self.index < row.length) & (of >= low) & (of < high))[:, None] & value[1][None, :]
        at = (row.ring_slot(first) + self.index)[:, None], value[0][None, :]
        return self.refs.ring_u.at[(row.layer, row.slot, self.head, *at)], inside

    def fold(self, states: list[jax.Array], value: Lanes) -> list[jax.Array]:
        """Return the state at the end of the first group, and keep it if all of the group is accepted."""
        row = self.row
        group = self.load_group(row.first_group, row.base)
        at, mask = self.corrections_at(row.first_group, row.base, row.position + row.tokens, value)
        later = self.index[None, :] > self.index[:, None]
        decays = jnp.exp(jnp.sum(jnp.where(later, group.g[None, :], 0.0), axis=1))
        decayed = decays[:, None] * pt.load(at, mask=mask, other=0.0).astype(jnp.float32)
        decayed, decay = operand(decayed, self.config.pieces), jnp.exp(jnp.sum(group.g))
        folded = []
        for state, k, (at, mask) in zip(states, group.k, self.states_at(row.fold_to, value), strict=True):
            added = self.product(decayed, operand(k), contract=(0, 0))
            folded.append((decay * state.astype(jnp.float32) + added).astype(state.dtype))
            pt.store(at, folded[-1], mask=mask & (row.position >= row.boundary))
        return folded

    def multiply(self, x: list[jax.Array], states: list[jax.Array]) -> jax.Array:
        """Multiply the vectors x with the state. Return [vectors, values]."""
        total = None
        for vectors, state in zip(x, states, strict=True):
            vectors, state = operand(vectors), operand(state, self.config.pieces)
            left, right = (state, vectors) if self.config.values_first else (vectors, state)
            partial = self.product(left, right, contract=(1, 1))
            total = partial if total is None else total + partial
        assert total is not None
        return total.T if self.config.values_first else total

    def store_entries(self, group: _Group) -> None:
        """Store the keys and log decays of this call's tokens, each by one program."""
        refs, row, first_program = self.refs, self.row, self.value_block == 0
        at = refs.ring_g.at[row.layer, row.slot, self.head, group.at]
        pt.store(at, group.g, mask=group.new & first_program)
        stores = group.new & first_program & (self.head == self.key_head * self.repeats)
        for (key, inside), k in zip(self.keys, group.k, strict=True):
            at = refs.ring_k.at[row.layer, row.slot, self.key_head, group.at[:, None], key[None, :]]
            pt.store(at, k, mask=stores[:, None] & inside[None, :])


class _Stage:
    """The work for the row's tokens in one group: see `DeferredRow.run_stages`."""

    def __init__(self, program: _Program, n: jax.Array) -> None:
        self.program, self.refs, row = program, program.refs, program.row
        if not program.interpret:
            pt.barrier()  # A fold reads the corrections that the stage before it has written.
        self.folds, self.first, self.low = row.group(n)
        self.inside, self.token, self.slot = row.tokens_in(program.offset, self.first, self.low)

    def run(self) -> None:
        """Fold if the stage does, and run the tokens, for one tile of values after the other."""
        program, ahead = self.program, self.load_values(jnp.int32(0))
        channel = (jnp.where(program.is_key, program.key_channels, 0) + program.key_head * program.key_dim)[:, None]
        at = lambda key: self.refs.qkv.at[self.token[:, None], channel + key[None, :]]
        mask = lambda exists: self.inside[:, None] & exists[None, :]
        x = [pt.load(at(key), mask=mask(exists), other=0.0) for key, exists in program.keys]
        coefficients = self.coefficients(x, program.load_group(self.first, self.low))
        run_tile = functools.partial(self.run_tile, x, coefficients)
        jax.lax.fori_loop(0, program.tiles, run_tile, ahead)

    def load_values(self, tile: jax.Array) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """Load a tile of the state, its values [vectors, values], and its corrections of earlier calls."""
        program, row = self.program, self.program.row
        value, exists = program.values(jnp.minimum(tile, program.tiles - 1))
        exists = exists & (tile < program.tiles)
        states = [pt.load(at, mask=mask, other=0.0) for at, mask in program.states_at(row.read, (value, exists))]
        channel = 2 * program.key_channels + program.head * program.value_dim + value[None, :]
        at = self.refs.qkv.at[self.token[:, None], channel]
        v = pt.load(at, mask=(self.inside & program.is_key)[:, None] & exists[None, :], other=0.0)
        at, mask = program.corrections_at(self.first, self.low, row.position, (value, exists))
        return states, v, pt.load(at, mask=mask, other=0.0)

    def coefficients(self, x: list[jax.Array], group: _Group) -> tuple[jax.Array, jax.Array, jax.Array, Operand]:
        """Compute the coefficients of vectors x, by tiles of keys, and store the new entries.

        Returns the factors of the state [vectors, 1] and, for keys, of their own correction [vectors, 1], and the factors of
        the group's corrections in a new correction and in an output [vectors, group_slots].
        """
        program, options, index = self.program, self.program.options, self.program.index
        program.store_entries(group)
        factor = jnp.where(program.is_key, 1.0, options.scale)
        if options.use_qk_l2norm:
            squares = [jnp.sum(each * each, axis=1) for each in (each.astype(jnp.float32) for each in x)]
            factor = factor * jax.lax.rsqrt(sum(squares[1:], squares[0]) + L2_EPSILON)
        b = pt.load(self.refs.b.at[self.token, program.head], mask=self.inside, other=0.0)
        beta = options.gates.compute(b, b, program.A_log, program.dt_bias)[1]
        # A sum of log decays is a product with zeros and ones, which three bfloat16 terms make exact but for the sum itself.
        until = index[None, :] <= self.slot[:, None]
        later = jnp.where(index[None, :] > index[:, None], group.g[None, :], 0.0)
        between = program.product(until.astype(jnp.bfloat16), operand(later), contract=(1, 1))
        of_state = jnp.exp(jnp.sum(jnp.where(until, group.g[None, :], 0.0), axis=1)) * factor
        # A key sees the slots before its own, and a query sees its token's slot too.
        seen = index[None, :] < jnp.where(program.is_key, self.slot, self.slot + 1)[:, None]
        products = [program.product(operand(a), operand(b), contract=(1, 1)) for a, b in zip(x, group.k, strict=True)]
        of_corrections = jnp.where(seen, sum(products[1:], products[0]) * jnp.exp(between), 0.0) * factor[:, None]
        of_key = jnp.where(program.is_key, beta * factor, 0.0)
        of_state, of_key = of_state[:, None], of_key[:, None]
        return of_state, of_key, -of_key * of_corrections, operand(of_corrections, program.narrow)

    def run_tile(self, x: list[jax.Array], coefficients: Any, tile: jax.Array, ahead: Any) -> Any:
        """Run the tokens for a tile of values, which `ahead` has. Return what `load_values` has loaded for the next one."""
        program, row, first = self.program, self.program.row, self.first
        (of_state, of_key, of_u, of_out), (states, v, u) = coefficients, ahead
        value = program.values(tile)
        following = self.load_values(tile + 1) if program.tiles > 1 else ahead
        # Both branches multiply. If one returned a folded state, the compiler would hold it in several layouts.
        fold_first = lambda: program.multiply(x, program.fold(states, value))
        from_state = jax.lax.cond(self.folds, fold_first, lambda: program.multiply(x, states))
        from_state, u = of_state * from_state, u.astype(jnp.float32)
        own = of_key * (v.astype(jnp.float32) - from_state)

        def correct(n, u):
            """Add the correction of token n."""
            new = _row(own, n) + jnp.sum(_row(of_u, n)[:, None] * u, axis=0)
            new = new.astype(self.refs.ring_u.dtype).astype(jnp.float32)
            return jnp.where((program.index == row.position + n - first)[:, None], new[None, :], u)

        # From the first token in this group to the first one after it.
        begin = jnp.clip(first - row.position, 0, row.tokens)
        stop = jnp.clip(first + row.length - row.position, 0, row.tokens)
        u = jax.lax.fori_loop(begin, stop, correct, u)
        low = jnp.maximum(self.low, row.position)
        at, mask = program.corrections_at(first, low, row.position + row.tokens, value)
        pt.store(at, u.astype(self.refs.ring_u.dtype), mask=mask)
        out = from_state + program.product(of_out, operand(u, program.narrow))
        mask = (self.inside & ~program.is_key)[:, None] & value[1][None, :]
        at = self.refs.out.at[self.token[:, None], program.head, value[0][None, :]]
        pt.store(at, out.astype(self.refs.out.dtype), mask=mask)
        return following


def gated_delta_rule_deferred(
    inputs: Projections, pool: jax.Array, ring: DeltaRuleEntries, rows: Rows, *, options: Options, run: Run
) -> tuple[jax.Array, jax.Array, DeltaRuleEntries]:
    """Launch the kernel. See api.py."""
    value_heads, value_dim = pool.shape[2:4]
    config = run.config or default_config(rows.num_rows, pool.dtype.itemsize)
    of_rows = dict(read_block=rows.read, fold_block=rows.fold.block) | rows.fold_inputs
    shape = inputs.qkv.shape[0], value_heads, value_dim
    results = pt.call(
        lambda refs: _Program(refs, rows.max_query_tokens, config, options, run.interpret).run(),
        name="gated_delta_rule_deferred",
        grid=(-(-value_dim // config.block_value), value_heads, rows.num_rows),
        inputs=inputs._asdict() | of_rows,
        outputs=dict(out=jax.ShapeDtypeStruct(shape, inputs.qkv.dtype)),
        updates=dict(pool=pool) | ring.by_name,
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["out"], results["pool"], DeltaRuleEntries.of(results)
