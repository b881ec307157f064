"""Rows of random tokens for the tests of deferred states of Mamba-1, and how the op is called on them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from kernels.common import how
from kernels.deferred_rows import BLOCKS, LAYER, LAYERS, SLOTS, exact
from kernels.test_selective_state_update import Dims
from oracles.ops import selective_state_update as oracle

from pallas_kernels import selective_scan_deferred

DIMS = {
    "one head": Dims(1, 40, 16, 1),
    "odd": Dims(1, 37, 20, 1),
    "narrow": Dims(1, 5, 3, 1),
    "heads": Dims(4, 8, 16, 2),
    "wide states": Dims(1, 12, 128, 1),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Sizes and dtypes of a test."""

    dims: str = "one head"
    dtype: str = "float32"
    state: str = "float32"
    length: int = 16
    given: tuple[str, ...] = ("D", "z", "dt_bias")
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
        """NaN in every place of every ring."""
        dims, places = DIMS[self.dims], 2 * self.length
        full = lambda dtype, *shape: np.array(jnp.full((LAYERS, slots, *shape), jnp.nan, dtype))
        return [
            full(self.dtype, dims.heads, places, dims.head_dim),
            full(self.dtype, dims.groups, places, dims.state_dim),
            full(self.dtype, dims.heads, places, dims.head_dim),
        ]


class Sequences:
    """What the rows of a call have read and will read: random projections of all tokens from each row's base on."""

    inputs = "x", "dt", "B", "C", "z"
    rings = "x", "B", "dt"

    def __init__(self, rng, kind, lengths):
        self.kind, self.dims = kind, DIMS[kind.dims]
        dims, dtype = self.dims, kind.dtype
        channel, vector = (dims.heads, dims.head_dim), (dims.groups, dims.state_dim)
        draw = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype))
        sign = (lambda x: x) if kind.dt_softplus else np.abs
        self.x, self.z = ([draw(n, *channel) for n in lengths] for _ in range(2))
        self.B, self.C = ([draw(n, *vector) for n in lengths] for _ in range(2))
        self.dt = [sign(draw(n, *channel)) for n in lengths]
        fixed = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        self.A = -jnp.exp(fixed(*channel, dims.state_dim) - 2)
        self.given = {
            name: v for name, v in dict(D=fixed(*channel), dt_bias=fixed(*channel)).items() if name in kind.given
        }

    def entries(self, row, tokens):
        """What a ring keeps of some tokens, float64: see `rings`."""
        return tuple(exact(v[row][tokens]) for v in (self.x, self.B, self.dt))

    def oracle(self, row, tokens, state):
        """Outputs and states of some tokens of a row."""
        x, dt, B, C, z = (exact(getattr(self, name)[row][tokens]) for name in self.inputs)
        options = self.given | (dict(z=z) if "z" in self.kind.given else {})
        return oracle(x, dt, self.A, B, C, state, **options, dt_softplus=self.kind.dt_softplus)

    def call(self, tokens, arrays, rows, implementation, max_query_tokens=4, **options):
        """Runs the op on packed tokens, each of which is (row, token) or None for padding."""

        def packed(x):
            padding = np.full_like(x[0][0], np.nan)
            return jnp.asarray(np.stack([padding if at is None else x[at[0]][at[1]] for at in tokens]))

        options |= self.given | dict(max_query_tokens=max_query_tokens, dt_softplus=self.kind.dt_softplus)
        x, dt, B, C, z = (packed(getattr(self, name)) for name in self.inputs)
        options |= dict(z=z) if "z" in self.kind.given else {}
        return selective_scan_deferred(x, dt, self.A, B, C, *arrays, LAYER, *rows, **how(implementation), **options)
