"""The Triton kernel that runs before the Mosaic GPU kernel: everything that needs only keys, queries and gates.

It has one program per row and key head. It also stores the keys and log decays of the call's tokens in the ring.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot, pieces
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._tiles import BLOCK, iota, key_lanes
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON, gates

_WARPS = 2


def sizes(max_query_tokens: int, length: int) -> tuple[int, int]:
    """Returns the number of vectors and of places in tiles, for groups of `length` tokens.

    Half of the vectors are keys, the others are queries. Their number does not follow the number of tokens up to eight, so
    that decode and verify rows run the same instructions.
    """
    return max(2 * pt.power_of_two(max_query_tokens), BLOCK), max(pt.power_of_two(length), BLOCK)


class Factors(NamedTuple):
    """The index at which each kind of factor begins along the last axis of the array `factors`.

    Attributes:
        of_state: The factors of the state, [groups, vectors].
        of_key: For keys those of the token's own correction, [groups, vectors].
        fold: Those of the corrections in a fold of group 0, [places].
        decay: That of the state in this fold.
        size: The length of the axis, a multiple of 16 bytes.
    """

    of_state: int
    of_key: int
    fold: int
    decay: int
    size: int

    @staticmethod
    def of(vectors: int, places: int) -> "Factors":
        """The factors of so many vectors and places."""
        return Factors(0, 2 * vectors, 4 * vectors, 4 * vectors + places, 4 * vectors + places + 4)


def _kernel(
    refs: Refs, *, vectors: int, gate: dict[str, Any], scale: float, use_qk_l2norm: bool, interpret: bool
) -> None:
    """Handles one row and key head, and the value heads that share the key head.

    Args:
        refs: Reads the arguments of `weights`, updates `ring_k` and `ring_g`, and writes the other results of `weights`.
        vectors: The number of vectors.
        gate: Options of `gates`.
        scale: Factor of the queries.
        use_qk_l2norm: Whether queries and keys are normalised.
        interpret: Whether the kernel runs as plain JAX.
    """
    value_heads, places = refs.A_log.shape[0], refs.fold_k.shape[2]
    key_heads, ring_places, key_dim = refs.ring_k.shape[2:]
    length, repeats, key_channels = ring_places // 2, value_heads // key_heads, key_heads * key_dim
    key_head, row = pt.program_id(0), pt.program_id(1)
    # Everything that addresses depend on is loaded here, before any branch.
    start, end = refs.query_start_loc[row], refs.query_start_loc[row + 1]
    layer, slot, base, position = refs.layer[...], refs.slot[row], refs.base[row], refs.position[row]
    fold_to, count = refs.fold_block[row], end - start
    first_group = jax.lax.div(base, jnp.int32(length)) * length
    boundary = first_group + length
    index, vector = (iota((n,), 0) for n in (places, vectors))
    half, place_in = vectors // 2, Factors.of(vectors, places)
    is_key, offset = vector < half, vector & (half - 1)
    token, exists = start + offset, offset < count
    key, key_inside = pt.lanes(0, key_lanes(key_dim), key_dim)
    later = index[None, :] > index[:, None]
    product = functools.partial(dot, contract=(1, 1), interpret=interpret)

    def vectors_of_row() -> tuple[jax.Array, jax.Array]:
        """Stores the row's vectors, and 0 for those that do not exist. Returns them and their factors."""
        channel = (jnp.where(is_key, key_channels, 0) + key_head * key_dim)[:, None]
        mask = exists[:, None] & key_inside[None, :]
        x = pt.load(refs.qkv.at[token[:, None], channel + key[None, :]], mask=mask, other=0.0)
        inside = jnp.broadcast_to(key_inside[None, :], x.shape)
        pt.store(refs.x.at[row, key_head, vector[:, None], key[None, :]], x, mask=inside)
        factor = jnp.where(is_key, 1.0, scale)
        if use_qk_l2norm:
            wide = x.astype(jnp.float32)
            factor = factor * jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + L2_EPSILON)
        return x, factor

    def of_group(n: jax.Array, x: jax.Array, factor: jax.Array) -> None:
        """Handles the first group (n = 0), whose fold may be needed, or the next one (n = 1)."""
        first = first_group + n * length
        low, is_first = jnp.where(n == 0, base, first), n == 0
        of = first + index
        inside = (index < length) & (of >= low)
        old, new = inside & (of < position), inside & (of >= position) & (of < position + count)
        at, own = jax.lax.rem(first, jnp.int32(ring_places)) + index, start + of - position

        ring_at = refs.ring_k.at[layer, slot, key_head, at[:, None], key[None, :]]
        call_at = refs.qkv.at[own[:, None], key_channels + key_head * key_dim + key[None, :]]
        ring = pt.load(ring_at, mask=old[:, None] & key_inside[None, :], other=0.0)
        call = pt.load(call_at, mask=new[:, None] & key_inside[None, :], other=0.0)
        k = jnp.where(new[:, None], call, ring)
        pt.store(ring_at, k, mask=new[:, None] & key_inside[None, :])
        fold_at = refs.fold_k.at[row, key_head, index[:, None], key[None, :]]
        pt.store(fold_at, k, mask=jnp.broadcast_to(key_inside[None, :] & is_first, k.shape))

        place = position + offset - first
        runs = exists & (position + offset >= low) & (place < length)
        until = index[None, :] <= place[:, None]
        # A key sees the places before its own, and a query sees its token's place too.
        seen = index[None, :] < jnp.where(is_key, place, place + 1)[:, None]
        products = product(x, k)
        for head in (key_head * repeats + repeat for repeat in range(repeats)):
            A_log, dt_bias = refs.A_log[head], refs.dt_bias[head]
            a = pt.load(refs.a.at[own, head], mask=new, other=0.0)
            b = pt.load(refs.b.at[token, head], mask=runs, other=0.0)
            ring_g = refs.ring_g.at[layer, slot, head, at]
            g, _ = gates(a, a, A_log, dt_bias, **gate)
            g = jnp.where(new, g, pt.load(ring_g, mask=old, other=0.0))
            pt.store(ring_g, g, mask=new)
            _, beta = gates(b, b, A_log, dt_bias, **gate)
            # A sum of log decays is a product with zeros and ones, which three pieces make exact but for the sum itself.
            after = jnp.where(later, g[None, :], 0.0)
            between = product(until.astype(jnp.bfloat16), pieces(after, 3))
            weight = jnp.where(seen, products * jnp.exp(between), 0.0) * factor[:, None]
            pt.store(refs.weight.at[row, head, n, vector[:, None], index[None, :]], weight)
            of_state = jnp.exp(jnp.sum(jnp.where(until, g[None, :], 0.0), axis=1)) * factor
            pt.store(refs.factors.at[row, head, place_in.of_state + n * vectors + vector], of_state)
            of_key = jnp.where(is_key, beta * factor, 0.0)
            pt.store(refs.factors.at[row, head, place_in.of_key + n * vectors + vector], of_key)
            to_end = jnp.exp(jnp.sum(after, axis=1))
            mask = jnp.broadcast_to(is_first, to_end.shape)
            pt.store(refs.factors.at[row, head, place_in.fold + index], to_end, mask=mask)
            decay = jnp.exp(jnp.sum(g))

            @pt.when(is_first)
            def _(head=head, decay=decay):
                refs.factors[row, head, place_in.decay] = decay

    @pt.when((count > 0) | ((position >= boundary) & (fold_to != NULL_BLOCK)))
    def _():
        x, factor = vectors_of_row()
        crosses = jnp.maximum(position, position + count - 1) >= boundary
        jax.lax.fori_loop(0, 1 + crosses.astype(jnp.int32), lambda n, _: of_group(n, x, factor), None)


def weights(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    ring_k: jax.Array,
    ring_g: jax.Array,
    layer: jax.Array,
    query_start_loc: jax.Array,
    slot: jax.Array,
    base: jax.Array,
    position: jax.Array,
    fold_block: jax.Array,
    *,
    vectors: int,
    gate: dict[str, Any],
    scale: float,
    use_qk_l2norm: bool,
    interpret: bool = False,
) -> dict[str, jax.Array]:
    """Computes what values are multiplied by. The arguments are those of `gated_delta_rule_deferred`.

    A row's vectors are its tokens' keys and then their queries, each as many as half of `vectors`. Groups are the one of
    the row's base (0) and the one after it (1). What belongs to rows that take no part, and group 1 of rows that do not
    reach it, is undefined.

    Returns:
        `x`, the vectors [rows, key_heads, vectors, key_dim], 0 for those that do not exist;
        `weight`, the factors of the corrections [rows, value_heads, groups, vectors, places];
        `factors`, all other factors [rows, value_heads, Factors.size];
        `fold_k`, the keys of a fold of group 0 [rows, key_heads, places, key_dim], 0 for places without an entry;
        and the updated `ring_k` and `ring_g`.
    """
    (key_heads, ring_places, key_dim), (rows, value_heads) = ring_k.shape[2:], (slot.shape[0], A_log.shape[0])
    places = sizes(vectors // 2, ring_places // 2)[1]
    array, f32 = jax.ShapeDtypeStruct, jnp.float32
    options = dict(vectors=vectors, gate=gate, scale=scale, use_qk_l2norm=use_qk_l2norm, interpret=interpret)
    row = dict(layer=layer, query_start_loc=query_start_loc, slot=slot, base=base, position=position)
    return pt.call(
        functools.partial(_kernel, **options),
        name="gated_delta_rule_deferred_weights",
        grid=(key_heads, rows),
        inputs=dict(qkv=qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, fold_block=fold_block) | row,
        outputs=dict(
            x=array((rows, key_heads, vectors, key_dim), qkv.dtype),
            weight=array((rows, value_heads, 2, vectors, places), f32),
            factors=array((rows, value_heads, Factors.of(vectors, places).size), f32),
            fold_k=array((rows, key_heads, places, key_dim), qkv.dtype),
        ),
        updates=dict(ring_k=ring_k, ring_g=ring_g),
        num_warps=_WARPS,
        interpret=interpret,
    )
