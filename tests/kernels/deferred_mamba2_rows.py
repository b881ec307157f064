"""Rows of random tokens for the tests of deferred states of Mamba-2, and how the op is called on them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from kernels.common import run_by
from kernels.deferred_rows import BLOCKS, LAYERS, SLOTS, rows_of
from kernels.state_space_rows import Dims
from oracles import deferred_mamba2_by_hand
from oracles.ops import selective_state_update as oracle

from pallas_kernels.selective_state_update.deferred import Mamba2Entries, selective_state_deferred

DIMS = {
    "grouped": Dims(4, 16, 32, 2),
    "one group": Dims(2, 64, 128, 1),
    "wide states": Dims(2, 32, 256, 1),
    "odd": Dims(3, 24, 20, 3),
    "narrow": Dims(2, 8, 10, 1),
    "many heads": Dims(40, 64, 64, 2),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Sizes and dtypes of a test."""

    dims: str = "grouped"
    dtype: str = "float32"
    state: str = "float32"
    length: int = 16
    given: tuple[str, ...] = ("D", "dt_bias")
    dt_softplus: bool = True

    @property
    def pool_shape(self):
        """The shape of a pool of these states."""
        dims = DIMS[self.dims]
        return LAYERS, BLOCKS, dims.heads, dims.head_dim, dims.state_dim

    def sequences(self, rng, lengths):
        """Draws the tokens of rows of these lengths."""
        return Sequences(rng, self, lengths)

    def rings(self, slots=SLOTS):
        """NaN in every slot of every ring."""
        dims, ring_slots = DIMS[self.dims], 2 * self.length
        full = lambda dtype, *shape: np.array(jnp.full((LAYERS, slots, *shape), jnp.nan, dtype))
        return [
            full(self.dtype, dims.heads, ring_slots, dims.head_dim),
            full(self.dtype, dims.groups, ring_slots, dims.state_dim),
            full("float32", dims.heads, ring_slots),
            full("float32", dims.heads, ring_slots),
        ]


class Sequences:
    """What the rows of a call have read and will read: random projections of all tokens from each row's base on."""

    inputs = "xBC", "dt"
    rings = "x", "B", "step sizes", "log decays"

    def __init__(self, rng, kind, lengths):
        self.kind, self.dims = kind, DIMS[kind.dims]
        dims, dtype = self.dims, kind.dtype
        channels = dims.heads * dims.head_dim + 2 * dims.groups * dims.state_dim
        draw = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype))
        sign = (lambda x: x) if kind.dt_softplus else np.abs
        self.xBC = [draw(n, channels) for n in lengths]
        self.dt = [sign(draw(n, dims.heads)) for n in lengths]
        fixed = lambda: jnp.asarray(rng.normal(size=dims.heads), jnp.float32)
        self.A = -jnp.exp(fixed() - 2)
        self.given = {name: value for name, value in dict(D=fixed(), dt_bias=fixed()).items() if name in kind.given}

    def parts(self, row, tokens):
        """x, B, C and raw dt of some tokens of a row, float64."""
        dims = self.dims
        xBC, dt = (np.asarray(jnp.asarray(v[row][tokens]).astype(jnp.float32), np.float64) for v in (self.xBC, self.dt))
        inner, of_groups = dims.heads * dims.head_dim, dims.groups * dims.state_dim
        x, B, C = np.split(xBC, [inner, inner + of_groups], axis=1)
        fold = lambda v, parts: v.reshape(len(v), parts, v.shape[1] // parts)
        return fold(x, dims.heads), fold(B, dims.groups), fold(C, dims.groups), dt

    def entries(self, row, tokens):
        """What a ring keeps of some tokens, float64: see `rings`."""
        x, B, _, dt = self.parts(row, tokens)
        dt = dt + np.asarray(self.given.get("dt_bias", 0.0), np.float64)
        dt = np.logaddexp(0, dt) if self.kind.dt_softplus else dt
        return x, B, dt, np.asarray(self.A, np.float64) * dt

    def oracle(self, row, tokens, state):
        """Outputs and states of some tokens of a row."""
        x, B, C, dt = self.parts(row, tokens)
        return oracle(x, dt, self.A, B, C, state, **self.given, dt_softplus=self.kind.dt_softplus)

    def call(self, tokens, arrays, where, implementation, max_query_tokens=4, config=None):
        """Runs the op on packed tokens, each of which is (row, token) or None for padding."""

        def packed(x):
            padding = np.full_like(x[0][0], np.nan)
            return jnp.asarray(np.stack([padding if at is None else x[at[0]][at[1]] for at in tokens]))

        options = self.given | dict(dt_softplus=self.kind.dt_softplus)
        pool, *ring = arrays
        rows = rows_of(where, max_query_tokens)
        operands = packed(self.xBC), packed(self.dt), self.A, pool, Mamba2Entries(*ring), rows
        if implementation == "by hand":
            out, pool, ring = deferred_mamba2_by_hand.selective_state_deferred(*operands, **options)
        else:
            out, pool, ring = selective_state_deferred(*operands, **options, run=run_by(implementation, config))
        return out, pool, *jax.tree.leaves(ring)
