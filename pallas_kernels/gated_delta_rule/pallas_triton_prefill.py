"""gated_delta_rule's prefill as three Pallas kernels: two for all chunks at once, one that carries the states.

L holds the decayed products of a chunk's keys with the earlier ones, times beta; S is the state before the chunk. What
the tokens add to the state is then T beta (v - decay k S) with T = (I + L)^-1 (the UT transform).

    products   a chunk and head to a program: L, the decayed products of queries with keys, and decays
    inverse    likewise: T beta
    states     some value dims of a head of a row to a program: its chunks in order, S in registers

Only the last one touches the pool. What is multiplied is bfloat16: inputs as they are, and float32 values in pieces of
bfloat16 (see `PrefillConfig`). Other inputs are multiplied as float32, in three products of tf32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot, pieces
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.gated_delta_rule.config import PrefillConfig, default_prefill_config
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON

CHUNK_SIZES = (16, 32, 64)
_BLOCK = 16  # the smallest product
_KEYS = 64  # of a tile, where a whole head's would not fit a program's registers
_LARGEST = 112.0  # exponent of a decay that is taken backwards: to base 2, with room for what it scales


def _iota(shape, axis):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _as_operand(x):
    return x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)


def _store_pieces(ref, values, *at, mask=None):
    """In as many pieces as the array has."""
    parts = pieces(values, ref.shape[0]) if ref.dtype == jnp.bfloat16 else (values,)
    for n, part in enumerate(parts):
        pt.store(ref.at[(jnp.int32(n), *at)], part, mask=mask)


def _load_pieces(ref, *at, mask=None):
    other = None if mask is None else 0.0
    parts = tuple(pt.load(ref.at[(jnp.int32(n), *at)], mask=mask, other=other) for n in range(ref.shape[0]))
    return parts if len(parts) > 1 else parts[0]


def _running_sums(x):
    """Sums along axis 0 of non-positive numbers up to each, and in all, in two parts, so that differences lose nothing.

    The first part is a multiple of a unit that no sum exceeds 2^24 times: its sums are exact, however small a difference.
    `x` must come from memory: a product could be fused into one of its uses, and be another number there.
    """
    magic = -4.0 * jnp.sum(x, axis=0)
    coarse = (x + magic) - magic
    return [(jnp.cumsum(part, axis=0), jnp.sum(part, axis=0)) for part in (coarse, x - coarse)]


def _decay(*differences):
    """Of the sum of differences of log decays, which rounding may leave above zero."""
    return jnp.exp2(pt.LOG2_E * jnp.minimum(sum(differences[1:], differences[0]), 0.0))


def _products_of_rows(x, y):
    return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=1)


def _key_lanes(key_dim):
    """Of tiles that hold a head's keys, which are multiplied."""
    return max(pt.power_of_two(key_dim), _BLOCK)


def _norm(squares, use_qk_l2norm):
    """What brings rows of keys, given their squares' sums, to unit length."""
    return jax.lax.rsqrt(squares + L2_EPSILON) if use_qk_l2norm else jnp.ones(squares.shape, jnp.float32)


def _products(refs, key_head, chunk, start, end, *, size, scale, use_qk_l2norm, interpret):
    """With one decay per head: all value heads of a key head."""
    _, key_heads, key_dim = refs.k.shape
    repeats = refs.beta.shape[1] // key_heads
    lane, later, earlier = _iota((size,), 0), _iota((size, size), 0), _iota((size, size), 1)
    key, key_inside = pt.lanes(0, _key_lanes(key_dim), key_dim)
    token = start + lane
    inside = token < end

    def tile(ref):
        mask = inside[:, None] & key_inside[None, :]
        return _as_operand(pt.load(ref.at[token[:, None], key_head, key[None, :]], mask=mask, other=0.0))

    # Inputs enter products as they are; what scales them follows.
    product = functools.partial(dot, contract=(1, 1), interpret=interpret)
    q, k = tile(refs.q), tile(refs.k)
    norm = lambda x: _norm(_products_of_rows(x, x), use_qk_l2norm)
    q_norm, k_norm = scale * norm(q), norm(k)
    keys = jnp.where(earlier < later, product(k, k) * (k_norm[:, None] * k_norm[None, :]), 0.0)
    queries = jnp.where(earlier <= later, product(q, k) * (q_norm[:, None] * k_norm[None, :]), 0.0)

    def of_value_head(n, _):
        head = key_head * repeats + n
        take = lambda ref: pt.load(ref.at[token, head], mask=inside, other=0.0)
        (coarse, coarse_total), (fine, fine_total) = _running_sums(take(refs.g))
        between = _decay(coarse[:, None] - coarse[None, :], fine[:, None] - fine[None, :])
        at = head, chunk, lane[:, None], lane[None, :]
        pt.store(refs.system.at[at], between * keys * take(refs.beta)[:, None])
        _store_pieces(refs.attention, between * queries, *at)
        before, after = _decay(coarse, fine), _decay(coarse_total - coarse, fine_total - fine)
        for kind, values in enumerate((before * k_norm, before * q_norm, after * k_norm)):
            pt.store(refs.scales.at[jnp.int32(kind), head, chunk, lane], values)
        refs.decay[head, chunk] = _decay(coarse_total, fine_total)

    jax.lax.fori_loop(0, repeats, of_value_head, None)


def _halves(size, last):
    """Of a chunk, of its halves, and so on, down to blocks of `last` tokens."""
    return [1 << n for n in reversed(range(last.bit_length() - 1, size.bit_length() - 1))]


def _spans(size, last):
    """Which tokens (columns) decay each (row): for each of `_halves`; in blocks of `last`; up to it; behind it."""
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    halves = [(row // h == column // h) & ((row // h % 2 == 1) == (column <= row)) for h in _halves(size, last)]
    middle = row // last * last + last // 2
    in_block = 1 * ((middle <= column) & (column <= row)) - 1 * ((row < column) & (column < middle))
    return jnp.asarray(np.stack([*halves, in_block, column <= row, column > row]), jnp.bfloat16)


def _last_block(decayed_keys):
    """Tokens of a block that is decayed from its middle.

    What one token decays counts within its block as no less than 2^-14, or 2^-28 where keys keep more than one bfloat16.
    """
    return 16 if decayed_keys.dtype == jnp.bfloat16 and decayed_keys.shape[0] == 1 else 8


def _products_per_channel(refs, head, chunk, start, end, *, size, scale, use_qk_l2norm, interpret):
    """With a decay per key channel, which a product of keys can't be scaled by afterwards.

    The halves of the chunk, the halves of each half, and so on: tokens of an upper half are decayed from where it begins,
    those of the lower half up to there, so that no exponent is positive; and their products are the decayed ones. The last
    blocks are decayed from their middles, forwards and backwards: exponents are bounded there.
    """
    _, key_heads, key_dim = refs.k.shape
    key_head = head // (refs.beta.shape[1] // key_heads)
    lane, row, column = _iota((size,), 0), _iota((size, size), 0), _iota((size, size), 1)
    token = start + lane
    live = token < end
    product = functools.partial(dot, interpret=interpret)
    exact, count = refs.k.dtype == jnp.bfloat16, refs.k_before.shape[0]
    last = _last_block(refs.k_before)
    levels = len(_halves(size, last))
    split = pieces if exact else (lambda x, _: x)
    wide = lambda x: x.astype(jnp.float32)
    tile = min(_key_lanes(key_dim), _KEYS)
    tiles = _key_lanes(key_dim) // tile

    def take(n):
        """q, k and log2 decays of tile n, and its keys and which exist."""
        key, inside = pt.lanes(n, tile, key_dim)
        mask = live[:, None] & inside[None, :]
        load = lambda ref, head: pt.load(ref.at[token[:, None], head, key[None, :]], mask=mask, other=0.0)
        q, k = _as_operand(load(refs.q, key_head)), _as_operand(load(refs.k, key_head))
        return q, k, pt.LOG2_E * load(refs.g, head), key, inside

    def over_spans(g):
        """Sums of log decays over a span by its number, each on its own."""
        parts = pieces(g, 2 if exact else 3)
        return lambda span: product(pt.load(refs.spans.at[jnp.int32(span), lane[:, None], lane[None, :]]), parts)

    def products(of_keys, of_queries, of_earlier):
        """Of keys, and of queries, with earlier keys."""
        of_earlier = split(of_earlier, count)
        keys = product(split(of_keys, count), of_earlier, contract=(1, 1))
        return keys, product(split(of_queries, 1), of_earlier[:1] if exact else of_earlier, contract=(1, 1))

    def of_squares(n, carry):
        q, k, _, _, _ = take(n)
        return [x + _products_of_rows(y, z) for x, (y, z) in zip(carry, ((q, q), (k, k), (q, k)), strict=True)]

    def of_tile(n, carry):
        q, k, g, _, _ = take(n)
        sums = over_spans(jnp.maximum(g, -_LARGEST / (last // 2)))

        def of_level(level, carry):
            decay = jnp.exp2(sums(level))
            decayed = wide(k) * decay
            # From a lower half to the upper one behind it.
            half = lane >> (size.bit_length() - 2 - level)
            across = jnp.where(half % 2 == 1, half - 1, -1)[:, None] == half[None, :]
            both = products(decayed, wide(q) * decay, decayed)
            return [total + jnp.where(across, x, 0.0) for total, x in zip(carry, both, strict=True)]

        exponents = sums(levels)
        forwards, backwards = jnp.exp2(exponents), jnp.exp2(-exponents)
        in_block = (row // last == column // last) & (column < row)
        both = products(wide(k) * forwards, wide(q) * forwards, wide(k) * backwards)
        carry = [total + jnp.where(in_block, x, 0.0) for total, x in zip(carry, both, strict=True)]
        return jax.lax.fori_loop(0, levels, of_level, carry)

    # In a loop of their own: the other one has no registers to spare.
    vector, square = jnp.zeros((size,), jnp.float32), jnp.zeros((size, size), jnp.float32)
    qq, kk, qk = jax.lax.fori_loop(0, tiles, of_squares, [vector] * 3)
    q_norm, k_norm = scale * _norm(qq, use_qk_l2norm), _norm(kk, use_qk_l2norm)
    keys, queries = jax.lax.fori_loop(0, tiles, of_tile, [square] * 2)
    queries = jnp.where(row == column, qk[:, None], queries)
    beta = pt.load(refs.beta.at[token, head], mask=live, other=0.0)
    at = head, chunk, lane[:, None], lane[None, :]
    pt.store(refs.system.at[at], keys * (beta * k_norm)[:, None] * k_norm[None, :])
    _store_pieces(refs.attention, queries * q_norm[:, None] * k_norm[None, :], *at)

    def of_ends(n, _):
        q, k, g, key, inside = take(n)
        q, k, sums = wide(q) * q_norm[:, None], wide(k) * k_norm[:, None], over_spans(g)
        before, after = jnp.exp2(sums(levels + 1)), jnp.exp2(sums(levels + 2))
        at, mask = (head, chunk, lane[:, None], key[None, :]), jnp.broadcast_to(inside[None, :], (size, tile))
        for ref, values in ((refs.k_before, before * k), (refs.q_before, before * q), (refs.k_after, after * k)):
            _store_pieces(ref, values, *at, mask=mask)
        pt.store(refs.decay.at[head, chunk, key], jnp.exp2(jnp.sum(g, axis=0)), mask=inside)

    jax.lax.fori_loop(0, tiles, of_ends, None)


def _inverse(refs, head, chunk, start, end, *, size, interpret):
    """By forward substitution, alone on the diagonal and in blocks off it: exact but for rounding, whatever L holds."""
    blocks = range(size // _BLOCK)
    lane, row, column = _iota((_BLOCK,), 0), _iota((_BLOCK, _BLOCK), 0), _iota((_BLOCK, _BLOCK), 1)
    product = functools.partial(dot, interpret=interpret)
    split = (lambda x: pieces(x, 2)) if refs.solve.dtype == jnp.bfloat16 else (lambda x: x)
    load = lambda row, column: pt.load(refs.system.at[head, chunk, row, column])

    def substitute(i, tiles):
        after = []
        for b, tile in enumerate(tiles):
            known = jnp.sum(load(b * _BLOCK + i, b * _BLOCK + lane)[:, None] * tile, axis=0)
            after.append(jnp.where(row == i, tile - known[None, :], tile))
        return after

    identity = jnp.where(row == column, 1.0, 0.0)
    tiles = jax.lax.fori_loop(1, _BLOCK, substitute, [identity for _ in blocks])

    inverse = {(b, b): tile for b, tile in enumerate(tiles)}
    operand = {at: split(tile) for at, tile in inverse.items()}
    for i in blocks:
        left = [split(load((i * _BLOCK + lane)[:, None], (m * _BLOCK + lane)[None, :])) for m in range(i)]
        for j in reversed(range(i)):
            known = sum(product(left[m], operand[m, j]) for m in range(j, i))
            inverse[i, j] = -product(operand[i, i], split(known))
            operand[i, j] = split(inverse[i, j])

    for j in blocks:
        token = start + j * _BLOCK + lane
        beta = pt.load(refs.beta.at[token, head], mask=token < end, other=0.0)
        for i in blocks:
            values = inverse[i, j] * beta[None, :] if i >= j else jnp.zeros((_BLOCK, _BLOCK), jnp.float32)
            at = (i * _BLOCK + lane)[:, None], (j * _BLOCK + lane)[None, :]
            _store_pieces(refs.solve, values, head, chunk, *at)


def _of_chunk(kernel, **options):
    """A kernel with a program per head and chunk that isn't empty."""

    def body(refs):
        head, chunk = pt.program_id(0), pt.program_id(1)
        start, end = refs.cu_chunk_seqlens[chunk], refs.cu_chunk_seqlens[chunk + 1]
        pt.when(end > start)(lambda: kernel(refs, head, chunk, start, end, **options))

    return body


def _states(refs, *, size, config, interpret):
    tokens, value_heads, value_dim = refs.v.shape
    _, key_heads, key_dim = refs.k.shape
    value_tile, head, row = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    # All that addresses depend on is loaded here, ahead of any branch.
    rows = refs.read_block.shape[0]
    begin, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, write, first = refs.layer[...], refs.read_block[row], refs.write_block[row], refs.first_chunk[row]
    key_head = head // (value_heads // key_heads)
    value, value_inside = pt.lanes(value_tile, config.tile_value, value_dim)
    key, key_inside = pt.lanes(0, _key_lanes(key_dim), key_dim)
    lane = _iota((size,), 0)
    checkpoints = 0 if refs.checkpoint_block is None else refs.checkpoint_block.shape[1]
    exact = refs.k.dtype == jnp.bfloat16
    split = (lambda x: pieces(x, config.pieces)) if exact else (lambda x: x)
    rounded = (lambda x: x[0] if isinstance(x, tuple) else x.astype(jnp.bfloat16)) if exact else (lambda x: x)
    product = functools.partial(dot, interpret=interpret)

    def place(block):
        at = refs.pool.at[layer, block, head, value[None, :], key[:, None]]
        return at, value_inside[None, :] & key_inside[:, None] & (block != NULL_BLOCK)

    @pt.when(end > begin)
    def _():
        # Where in its cell of the grid the row begins; any place if one cell holds it all.
        lead = size - (refs.cu_chunk_seqlens[first + 1] - begin)

        def advance(n, state):
            """One chunk, from a state [key, value]."""
            chunk = first + n
            token = begin + jnp.maximum(n * size - lead, 0) + lane
            inside = token < jnp.minimum(begin + (n + 1) * size - lead, end)
            square = lambda ref: _load_pieces(ref, head, chunk, lane[:, None], lane[None, :])

            # What no product needs is loaded first: the compiler fetches ahead for products alone.
            if refs.scales is None:
                mask = jnp.broadcast_to(key_inside[None, :], (size, key.shape[0]))
                keys = lambda ref: _load_pieces(ref, head, chunk, lane[:, None], key[None, :], mask=mask)
                decay = pt.load(refs.decay.at[head, chunk, key], mask=key_inside, other=0.0)[:, None]
                q_before, k_before, k_after = keys(refs.q_before), keys(refs.k_before), keys(refs.k_after)
                of_query = of_key = to_end = 1.0
            else:
                mask = inside[:, None] & key_inside[None, :]
                keys = lambda ref: _as_operand(
                    pt.load(ref.at[token[:, None], key_head, key[None, :]], mask=mask, other=0.0)
                )
                scale = lambda kind: pt.load(refs.scales.at[jnp.int32(kind), head, chunk, lane])[:, None]
                of_key, of_query, to_end, decay = scale(0), scale(1), scale(2), refs.decay[head, chunk]
                q_before, k_before = keys(refs.q), keys(refs.k)
                k_after = k_before
            at, mask = (token[:, None], head, value[None, :]), inside[:, None] & value_inside[None, :]
            v = pt.load(refs.v.at[at], mask=mask, other=0.0).astype(jnp.float32)
            solve, attention = square(refs.solve), square(refs.attention)

            before = split(state)
            added = product(solve, split(v - of_key * product(k_before, before)))
            out = of_query * product(q_before, rounded(before)) + product(attention, rounded(added))
            pt.store(refs.out.at[at], out.astype(refs.out.dtype), mask=mask)
            return decay * state + product(k_after, split(to_end * added), contract=(0, 0))

        def segment(n, carry):
            """To checkpoint n; the final state is the last one, at the row's end."""
            chunk, state = carry
            offset, block = end - begin, write
            if checkpoints:
                final, at = n == checkpoints, jnp.minimum(n, checkpoints - 1)
                offset = jnp.where(final, offset, jnp.minimum(refs.checkpoint_offset[row, at], offset))
                block = jnp.where(final, block, refs.checkpoint_block[row, at])
            stop = jnp.maximum(chunk, (lead + offset + size - 1) // size)
            state = jax.lax.fori_loop(chunk, stop, advance, state)
            at, mask = place(block)
            pt.store(at, state.astype(refs.pool.dtype), mask=mask & (offset > 0))
            return stop, state

        at, mask = place(read)
        state = pt.load(at, mask=mask, other=0.0).astype(jnp.float32)
        jax.lax.fori_loop(0, checkpoints + 1, segment, (jnp.int32(0), state))

    def clear(n, _):
        token = total + (row + n * rows) * size + lane
        mask = (token < tokens)[:, None] & value_inside[None, :]
        zeros = jnp.zeros((size, config.tile_value), refs.out.dtype)
        pt.store(refs.out.at[token[:, None], head, value[None, :]], zeros, mask=mask)

    # Tokens behind the last row, shared among the rows.
    jax.lax.fori_loop(0, ((tokens - total + size - 1) // size - row + rows - 1) // rows, clear, None)


def unsupported(chunk_size: int) -> str | None:
    """Why the kernels can't run these arguments; None if they can."""
    return None if chunk_size in CHUNK_SIZES else f"chunks must be of {CHUNK_SIZES} tokens, got {chunk_size}"


def gated_delta_rule_prefill(
    q,
    k,
    v,
    g,
    beta,
    pool,
    layer,
    query_start_loc,
    chunks,
    read_block,
    write_block,
    checkpoint_offset=None,
    checkpoint_block=None,
    *,
    scale: float,
    use_qk_l2norm: bool,
    config: PrefillConfig | None = None,
    interpret: bool = False,
):
    """See api.py."""
    size, number = chunks.chunk_size, chunks.seq_idx.shape[0]
    (key_heads, key_dim), (value_heads, value_dim), rows = k.shape[1:], v.shape[1:], read_block.shape[0]
    per_channel = g.ndim == 3
    config = config or default_prefill_config(value_heads * value_dim * rows, key_dim, k.dtype.itemsize, per_channel)
    array = jax.ShapeDtypeStruct

    def in_pieces(count, *shape):
        if k.dtype == jnp.bfloat16:
            return array((count, value_heads, number, size, *shape), jnp.bfloat16)
        return array((1, value_heads, number, size, *shape), jnp.float32)

    outputs = dict(system=array((value_heads, number, size, size), jnp.float32), attention=in_pieces(1, size))
    if per_channel:
        decayed = in_pieces(config.pieces, key_dim)
        outputs |= dict(q_before=in_pieces(1, key_dim), k_before=decayed, k_after=decayed)
        outputs |= dict(decay=array((value_heads, number, key_dim), jnp.float32))
    else:
        outputs |= dict(scales=array((3, value_heads, number, size), jnp.float32))
        outputs |= dict(decay=array((value_heads, number), jnp.float32))
    products = pt.call(
        _of_chunk(
            _products_per_channel if per_channel else _products,
            size=size,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            interpret=interpret,
        ),
        name="gated_delta_rule_prefill_products",
        grid=(value_heads if per_channel else key_heads, number),
        inputs=dict(q=q, k=k, g=g, beta=beta, cu_chunk_seqlens=chunks.cu_chunk_seqlens)
        | (dict(spans=_spans(size, _last_block(outputs["k_before"]))) if per_channel else {}),
        outputs=outputs,
        updates={},
        num_warps=config.products_warps,
        interpret=interpret,
    )
    inverse = pt.call(
        _of_chunk(_inverse, size=size, interpret=interpret),
        name="gated_delta_rule_prefill_inverse",
        grid=(value_heads, number),
        inputs=dict(beta=beta, cu_chunk_seqlens=chunks.cu_chunk_seqlens, system=products.pop("system")),
        outputs=dict(solve=in_pieces(config.pieces, size)),
        updates={},
        num_warps=1,
        interpret=interpret,
    )
    results = pt.call(
        functools.partial(_states, size=size, config=config, interpret=interpret),
        name="gated_delta_rule_prefill_states",
        grid=(-(-value_dim // config.tile_value), value_heads, rows),
        inputs=dict(
            q=q,
            k=k,
            v=v,
            layer=layer,
            query_start_loc=query_start_loc,
            cu_chunk_seqlens=chunks.cu_chunk_seqlens,
            first_chunk=chunks.first_chunk_indices,
            read_block=read_block,
            write_block=write_block,
            checkpoint_offset=checkpoint_offset,
            checkpoint_block=checkpoint_block,
            scales=None,
        )
        | inverse
        | products,
        outputs=dict(out=array(v.shape, v.dtype)),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return results["out"], results["pool"]
