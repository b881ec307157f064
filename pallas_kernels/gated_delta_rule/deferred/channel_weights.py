"""The first Triton kernel for a decay per key channel: everything that needs only keys, queries and gates.

It is to Kimi delta attention what `weights` is to gated delta nets. Decays per key channel cannot scale a product of keys
afterwards, so keys and queries are decayed first. A sum of log decays always runs from an earlier token to a later one. It
is computed on its own, and no exponent is positive.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot, pieces
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._tiles import iota, key_lanes
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.gated_delta_rule.deferred._factors import Factors, sizes
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON, gates

_WARPS = 4


def _kernel(
    refs: Refs, *, vectors: int, gate: dict[str, Any], scale: float, use_qk_l2norm: bool, interpret: bool
) -> None:
    """Handles one row and value head.

    Args:
        refs: Reads the arguments of `channel_weights`, updates `ring_k` and `ring_g`, and writes the other results of
            `channel_weights`.
        vectors: The number of vectors.
        gate: Options of `gates`.
        scale: Factor of the queries.
        use_qk_l2norm: Whether queries and keys are normalised.
        interpret: Whether the kernel runs as plain JAX.
    """
    value_heads, places = refs.A_log.shape[0], refs.fold_k.shape[2]
    key_heads, ring_places, key_dim = refs.ring_k.shape[2:]
    length, repeats, key_channels = ring_places // 2, value_heads // key_heads, key_heads * key_dim
    head, row = pt.program_id(0), pt.program_id(1)
    key_head = jax.lax.div(head, jnp.int32(repeats))
    # Everything that addresses depend on is loaded here, before any branch.
    start, end = refs.query_start_loc[row], refs.query_start_loc[row + 1]
    layer, slot, base, position = refs.layer[...], refs.slot[row], refs.base[row], refs.position[row]
    fold_to, count = refs.fold_block[row], end - start
    first_group = jax.lax.div(base, jnp.int32(length)) * length
    boundary = first_group + length
    crosses = jnp.maximum(position, position + count - 1) >= boundary
    index, vector = (iota((n,), 0) for n in (places, vectors))
    half, place_in = vectors // 2, Factors.of(vectors, places)
    is_key, offset = vector < half, vector & (half - 1)
    token, exists = start + offset, offset < count
    key, key_inside = pt.lanes(0, key_lanes(key_dim), key_dim)
    later = index[None, :] > index[:, None]
    A_log, dt_bias = refs.A_log[head], pt.load(refs.dt_bias.at[head, key], mask=key_inside, other=0.0)

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    def factor_of(x: jax.Array, factor: jax.Array) -> jax.Array:
        """Returns the factor that normalises each vector [.., keys], times `factor`."""
        return factor * jax.lax.rsqrt(jnp.sum(x * x, axis=-1) + L2_EPSILON) if use_qk_l2norm else factor

    def tokens_of(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first of the row's tokens in the group that starts at position `first`, and the one after the last."""
        return jnp.clip(first - position, 0, count), jnp.clip(first + length - position, 0, count)

    def load_group(first: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a group's raw keys and log decays from position `low` on, [places, keys], and stores the new ones."""
        of = first + index
        inside = (index < length) & (of >= low)
        old, new = inside & (of < position), inside & (of >= position) & (of < position + count)
        old, new = (mask[:, None] & key_inside[None, :] for mask in (old, new))
        at, own = jax.lax.rem(first, jnp.int32(ring_places)) + index, start + of - position
        ring_k = refs.ring_k.at[layer, slot, key_head, at[:, None], key[None, :]]
        ring_g = refs.ring_g.at[layer, slot, head, at[:, None], key[None, :]]
        call_k = refs.qkv.at[own[:, None], key_channels + key_head * key_dim + key[None, :]]
        k = jnp.where(new, pt.load(call_k, mask=new, other=0.0), pt.load(ring_k, mask=old, other=0.0))
        pt.store(ring_k, k, mask=new & (head == key_head * repeats))

        def add(t: jax.Array, g: jax.Array) -> jax.Array:
            """Adds the log decays of token t. As a tile of all places they would take many more instructions."""
            a, place = pt.load(refs.a.at[start + t, head, key], mask=key_inside, other=0.0), position + t - first
            own, _ = gates(a, a, A_log, dt_bias, **gate)
            own = jnp.where(key_inside, own, 0.0)
            at = jax.lax.rem(first, jnp.int32(ring_places)) + place
            pt.store(refs.ring_g.at[layer, slot, head, at, key], own, mask=key_inside)
            return jnp.where((index == place)[:, None], own[None, :], g)

        return k, jax.lax.fori_loop(*tokens_of(first), add, pt.load(ring_g, mask=old, other=0.0))

    def of_group(n: jax.Array, _: None) -> None:
        """Handles the first group (n = 0), whose fold may be needed, or the next one (n = 1)."""
        first = first_group + n * length
        low, is_first = jnp.where(n == 0, base, first), n == 0
        k, g = load_group(first, low)
        # A sum of log decays is a product with zeros and ones, which three pieces make exact but for the sum itself.
        parts = pieces(pt.LOG2_E * g, 3)

        def decays(summed: jax.Array) -> jax.Array:
            """Returns the decays over some places, which are true in `summed` [.., places]."""
            return pt.exp2(dot(summed.astype(jnp.bfloat16), parts, interpret=interpret), interpret)

        place = position + offset - first
        runs = exists & (position + offset >= low) & (place < length)
        mask = runs[:, None] & key_inside[None, :]
        channel = (jnp.where(is_key, key_channels, 0) + key_head * key_dim)[:, None]
        x = wide(pt.load(refs.qkv.at[token[:, None], channel + key[None, :]], mask=mask, other=0.0))
        decayed = x * decays(index[None, :] <= place[:, None])
        pt.store(refs.x.at[row, head, vector[:, None], key[None, :]], decayed, mask=mask)
        b = pt.load(refs.b.at[token, head], mask=runs, other=0.0)
        beta = gates(b, b, A_log, A_log, **gate)[1]
        factor = factor_of(x, jnp.where(is_key, 1.0, scale))
        pt.store(refs.factors.at[row, head, place_in.of_state + n * vectors + vector], factor)
        of_key = jnp.where(is_key, beta * factor, 0.0)
        pt.store(refs.factors.at[row, head, place_in.of_key + n * vectors + vector], of_key)

        def of_token(t: jax.Array, _: None) -> None:
            """Stores the weights of the group's corrections for token t's key and query."""
            here = position + t - first
            decayed = wide(k) * decays(later & (index[None, :] <= here))
            # A key sees the places before its own, and a query sees its token's place too.
            for number, channels, seen, factor in ((t, key_channels, here, 1.0), (half + t, 0, here + 1, scale)):
                at = refs.qkv.at[start + t, channels + key_head * key_dim + key]
                x = wide(pt.load(at, mask=key_inside, other=0.0))
                weight = jnp.where(index < seen, jnp.sum(decayed * x[None, :], axis=1), 0.0)
                weight = weight * factor_of(x, jnp.float32(factor))
                pt.store(refs.weight.at[row, head, n, number, index], weight)

        jax.lax.fori_loop(*tokens_of(first), of_token, None)

        @pt.when(is_first & crosses)
        def _():
            at = refs.fold_k.at[row, head, index[:, None], key[None, :]]
            pt.store(at, wide(k) * decays(later), mask=jnp.broadcast_to(key_inside[None, :], k.shape))
            pt.store(refs.decay.at[row, head, key], jnp.exp(jnp.sum(g, axis=0)), mask=key_inside)

    @pt.when((count > 0) | ((position >= boundary) & (fold_to != NULL_BLOCK)))
    def _():
        jax.lax.fori_loop(0, 1 + crosses.astype(jnp.int32), of_group, None)


def channel_weights(
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

    Vectors and groups are those of `weights`. What belongs to rows that take no part, to vectors that do not exist, to
    group 1 of rows that do not reach it, and to folds of rows that do not cross the end of group 0, is undefined.

    Returns:
        `x`, the vectors, each decayed from the start of its group [rows, value_heads, vectors, key_dim], float32;
        `weight`, the factors of the corrections [rows, value_heads, groups, vectors, places];
        `factors`, of which only those of the state and of corrections are written [rows, value_heads, Factors.size];
        `fold_k`, the keys of a fold of group 0, each decayed to the group's end [rows, value_heads, places, key_dim],
        float32, 0 for places without an entry;
        `decay`, that of the state in this fold [rows, value_heads, key_dim];
        and the updated `ring_k` and `ring_g`.
    """
    (ring_places, key_dim), (rows, value_heads) = ring_k.shape[3:], (slot.shape[0], A_log.shape[0])
    places = sizes(vectors // 2, ring_places // 2)[1]
    options = dict(vectors=vectors, gate=gate, scale=scale, use_qk_l2norm=use_qk_l2norm, interpret=interpret)
    row = dict(layer=layer, query_start_loc=query_start_loc, slot=slot, base=base, position=position)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, value_heads, *shape), jnp.float32)

    return pt.call(
        functools.partial(_kernel, **options),
        name="gated_delta_rule_deferred_channel_weights",
        grid=(value_heads, rows),
        inputs=dict(qkv=qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, fold_block=fold_block) | row,
        outputs=dict(
            x=array(vectors, key_dim),
            weight=array(2, vectors, places),
            factors=array(Factors.of(vectors, places).size),
            fold_k=array(places, key_dim),
            decay=array(key_dim),
        ),
        updates=dict(ring_k=ring_k, ring_g=ring_g),
        num_warps=_WARPS,
        interpret=interpret,
    )
