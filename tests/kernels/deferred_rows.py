"""Rows of random tokens for the tests of deferred states, and how the op is called on them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from kernels import delta_rule_claims, grouped
from kernels.common import IMPLEMENTATIONS, MOSAIC_GPU, how
from kernels.delta_rule_claims import Dims, unpack
from oracles import deferred_by_hand
from oracles.ops import gated_delta_rule_entries, gates

from pallas_kernels import Fold, Rows
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred

LAYER, LAYERS, BLOCKS, SLOTS = 1, 2, 16, 9


DIMS = delta_rule_claims.DIMS | {"64 x 128": Dims(2, 4, 64, 128)}
# The Mosaic GPU kernel cannot be interpreted. "by hand" stands for it there.
EVERY = [*IMPLEMENTATIONS, MOSAIC_GPU]


ARGUMENTS = ("qkv", "a", "b", "A_log", "dt_bias", "pool", "ring_k", "ring_u", "ring_g", "layer", "query_start_loc")
ARGUMENTS += ("slot", "base", "position", "read_block", "fold_block")


def two_rows():
    """The arguments of an op of deferred states for two rows of one token each, which start from nothing."""
    zeros = dict.fromkeys(("base", "position", "read_block", "fold_block"), jnp.zeros(2, jnp.int32))
    starts, slot = jnp.arange(3, dtype=jnp.int32), jnp.arange(2, dtype=jnp.int32)
    return dict(layer=0, query_start_loc=starts, slot=slot, max_query_tokens=8) | zeros


def rows_of(where, max_query_tokens):
    """Returns rows of query_start_loc and of each row's slot, base, position, read block and fold block."""
    query_start_loc, slot, base, position, read, block = where
    fold = Fold(slot=slot, base=base, block=block)
    fields = dict(num_computed_tokens=position, read=read, fold=fold, max_query_tokens=max_query_tokens)
    return Rows(layer=LAYER, query_start_loc=query_start_loc, **fields)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Sizes and dtypes of a test."""

    dims: str = "grouped"
    dtype: str = "float32"
    state: str = "float32"
    ring: str = "float32"
    length: int = 16
    l2norm: bool = True
    lower_bound: float | None = None
    beta_max: int = 1

    @property
    def pool_shape(self):
        """The shape of a pool of these states."""
        dims = DIMS[self.dims]
        return LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim

    def sequences(self, rng, lengths):
        """Draws the tokens of rows of these lengths."""
        return Sequences(rng, self, lengths)

    def rings(self, slots=SLOTS):
        """NaN in every slot of every ring."""
        return dirty_rings(self, slots)


class Sequences:
    """What the rows of a call have read and will read: random projections of all tokens from each row's base on."""

    inputs = "qkv", "a", "b"

    def __init__(self, rng, kind, lengths, head_rng=None):
        self.kind, self.dims = kind, DIMS[kind.dims]
        dims, dtype = self.dims, kind.dtype
        self.channels = 2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim
        draw = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype))
        # Keys that are not normalised must be short, or states grow without a bound.
        shrink = 1 if kind.l2norm else self.dims.key_dim**-0.5
        self.qkv = [draw(n, self.channels) * np.asarray(shrink, dtype) for n in lengths]
        self.a, self.b = ([draw(n, dims.value_heads) for n in lengths] for _ in range(2))
        self.A_log, self.dt_bias = (jnp.asarray(rng.normal(size=dims.value_heads), jnp.float32) for _ in range(2))
        self.scale = dims.key_dim**-0.5

    def parts(self, row, tokens):
        """q, k, v, g and beta of some tokens of a row, float64."""
        bounds = self.kind.lower_bound, self.kind.beta_max
        a, b = (np.asarray(x[row][tokens], np.float64) for x in (self.a, self.b))
        q, k, v = unpack(jnp.asarray(self.qkv[row][tokens]), self.dims)
        return q, k, v, *gates(a, b, self.A_log, self.dt_bias, *bounds)

    def oracle(self, row, tokens, state):
        """Outputs, states and corrections of some tokens of a row."""
        return gated_delta_rule_entries(*self.parts(row, tokens), state, self.scale, self.kind.l2norm)

    def call(self, tokens, arrays, rows, implementation, max_query_tokens=4, **options):
        """Runs the op on packed tokens, each of which is (row, token) or None for padding."""

        def packed(x):
            padding = np.full_like(x[0][0], np.nan)
            return jnp.asarray(np.stack([padding if at is None else x[at[0]][at[1]] for at in tokens]))

        kind = self.kind
        gate = dict(lower_bound=kind.lower_bound, allow_neg_eigval=kind.beta_max == 2)
        operands = *(packed(x) for x in (self.qkv, self.a, self.b)), self.A_log, self.dt_bias, *arrays, LAYER, *rows
        options |= gate | dict(max_query_tokens=max_query_tokens, use_qk_l2norm=kind.l2norm)
        if implementation == "by hand":
            options.pop("config", None)
            return deferred_by_hand.gated_delta_rule_deferred(*operands, **options, scale=self.scale)
        named = dict(zip(ARGUMENTS, operands, strict=True))
        out, pool, ring = grouped.call(gated_delta_rule_deferred, **named, **how(implementation), **options)
        return out, pool, *ring.arrays


def dirty_rings(kind, slots=SLOTS):
    """NaN in every slot of every ring."""
    dims, ring_slots = DIMS[kind.dims], 2 * kind.length
    full = lambda dtype, *shape: np.array(jnp.full((LAYERS, slots, *shape), jnp.nan, dtype))
    return [
        full(kind.dtype, dims.key_heads, ring_slots, dims.key_dim),
        full(kind.ring, dims.value_heads, ring_slots, dims.value_dim),
        full("float32", dims.value_heads, ring_slots),
    ]


def exact(x):
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def coarsest(*dtypes):
    return max((jnp.dtype(dtype) for dtype in dtypes), key=lambda dtype: float(jnp.finfo(dtype).eps))
