"""Batches of paged_attention, their oracle, and a comparison of bits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from kernels import grouped
from kernels.common import assert_close, pack
from oracles.ops import paged_attention as oracle

from pallas_kernels import paged_attention

LAYER, LAYERS = 1, 2


@dataclasses.dataclass(frozen=True)
class Dims:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int | None = None  # of latent attention


@dataclasses.dataclass
class Batch:
    """The arguments of a call, and each row's keys and values from position 0 on."""

    arguments: dict
    rows: list
    lengths: list
    computed: list

    def run(self, **options):
        return grouped.call(paged_attention, **self.arguments | options)


def make(rng, lengths, computed, dims, dtype=jnp.float32, page_size=16, extra_tokens=3):
    """Pages are NaN wherever no row has a key, and what the table holds after a row's pages are no pages at all."""
    width = max(-(-(n + c) // page_size) for n, c in zip(lengths, computed, strict=True)) + 2
    ends = [n + c if n else 0 for n, c in zip(lengths, computed, strict=True)]
    pages = [-(-end // page_size) for end in ends]
    total = sum(pages) + 1
    order = 1 + rng.permutation(total - 1)
    table = rng.choice([0, -1, 10**6, 2**31 - 1], (len(lengths), width)).astype(np.int32)
    pool = lambda dim: np.full((LAYERS, total, page_size, dims.kv_heads, dim), np.nan, np.float32)
    pools = [pool(dims.key_dim)] + ([] if dims.value_dim else [pool(dims.key_dim)])
    rows, taken = [], 0
    for r, (end, count) in enumerate(zip(ends, pages, strict=True)):
        table[r, :count] = order[taken : taken + count]
        taken += count
        # Rounded first: keys of the oracle are those of the kernel.
        row = [np.asarray(jnp.asarray(rng.normal(size=(end, *x.shape[3:])), dtype), np.float64) for x in pools]
        for x, own in zip(pools, row, strict=True):
            padded = np.full((count * page_size, *own.shape[1:]), np.nan, np.float32)
            padded[:end] = own
            x[LAYER, table[r, :count]] = padded.reshape(count, page_size, *own.shape[1:])
        rows.append((row[0], row[0][..., : dims.value_dim] if dims.value_dim else row[1]))
    q = rng.normal(size=(sum(lengths) + extra_tokens, dims.heads, dims.key_dim)).astype(np.float32)
    q[sum(lengths) :] = np.nan
    keys, *values = (jnp.asarray(x, dtype) for x in pools)
    arguments = dict(
        q=jnp.asarray(q, dtype),
        keys=keys,
        values=values[0] if values else None,
        value_dim=dims.value_dim,
        layer=LAYER,
        query_start_loc=pack(lengths),
        num_computed_tokens=jnp.asarray(computed, jnp.int32),
        page_table=jnp.asarray(table),
    )
    return Batch(arguments, rows, list(lengths), list(computed))


def assert_is_attention(batch, out, scale=None):
    q = np.asarray(batch.arguments["q"]).astype(np.float64)
    loc, out = np.asarray(batch.arguments["query_start_loc"]), np.asarray(out)
    for r, (n, c) in enumerate(zip(batch.lengths, batch.computed, strict=True)):
        if n == 0:
            continue
        keys, values = batch.rows[r]
        wanted = oracle(q[loc[r] : loc[r + 1]], keys, values, c, scale)
        assert_close(out[loc[r] : loc[r + 1]], wanted, out.dtype, 16 * (keys.shape[2] + n + c), f"row {r}")
    assert not out[loc[-1] :].astype(np.float32).any()


def same_bits(one, other):
    np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


DIMS = {
    "4 of 32": Dims(4, 2, 32),
    "one head of 8": Dims(1, 1, 8),
    "6 of 96": Dims(6, 2, 96),
    "8 of 64": Dims(8, 8, 64),
    "8 of 192": Dims(8, 1, 192),
    "16 of 256": Dims(16, 4, 256),
    "latent 24 and 8": Dims(4, 1, 40, 24),
    "latent 576": Dims(32, 1, 576, 512),
    "40 heads": Dims(40, 1, 16),
}
