"""Rows of Mamba-1 and Mamba-2, and the recurrence that they must compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from kernels.common import (
    assert_close,
    assert_untouched,
    dirty_pool,
)
from oracles.ops import selective_state_update as oracle

from pallas_kernels import Rows

LAYER, LAYERS, BLOCKS = 1, 2, 24


@dataclasses.dataclass(frozen=True)
class Dims:
    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1

    @property
    def is_mamba1(self):
        return self.heads == 1


DIMS = {
    "mamba2": Dims(4, 8, 32, 2),
    "mamba2 128": Dims(2, 16, 128, 1),
    "mamba2 256": Dims(2, 8, 256, 1),
    "mamba2 odd": Dims(3, 10, 24, 3),
    "64 x 128": Dims(4, 64, 128, 2),
    "128 x 64": Dims(2, 128, 64, 1),
    "mamba1": Dims(1, 40, 16),
    "mamba1 odd": Dims(1, 37, 20),
}


def make(rng, lengths, dims, dtype=jnp.float32, state_dtype=jnp.float32, extra_tokens=3, clean=(3, 4, 5)):
    """Returns the arguments up to C, a dirty pool, and the optional arguments."""
    tokens = sum(lengths) + extra_tokens

    def draw(*shape):
        x = rng.normal(size=(tokens, *shape)).astype(np.float32)
        x[sum(lengths) :] = np.nan  # padding tokens may hold anything
        return jnp.asarray(x).astype(dtype)

    channel = (dims.heads, dims.head_dim)
    per = channel if dims.is_mamba1 else (dims.heads,)
    fixed = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    A = -jnp.exp(fixed(*(*channel, dims.state_dim) if dims.is_mamba1 else per))
    B, C = draw(dims.groups, dims.state_dim), draw(dims.groups, dims.state_dim)
    pool = dirty_pool(rng, (LAYERS, BLOCKS, *channel, dims.state_dim), state_dtype, clean)
    return (draw(*channel), draw(*per), A, B, C), pool, dict(D=fixed(*per), z=draw(*channel), dt_bias=fixed(*per))


def rows_at(query_start_loc, read, write, layer=LAYER, **fields):
    """Rows that read these blocks and write those: after each token, or after the last one if `write` has one per row."""
    write = write if write.ndim == 2 else write[:, None]
    return Rows(layer=layer, query_start_loc=query_start_loc, read=read, write=write, **fields)


def state_of(pool, block):
    state = np.asarray(pool.astype(jnp.float32), np.float64)[LAYER, block]
    return state if block else np.zeros_like(state)


def in_float64(tree):
    return jax.tree.map(lambda v: np.asarray(v.astype(jnp.float32), np.float64), tree)


def assert_rows_match_the_oracle(lengths, read, write, out, before, after, arguments, options):
    """Checks the outputs, every state that was kept, and that nothing else in the pool changed."""
    (x, dt, A, B, C), given = in_float64(arguments), in_float64(options)
    written, ends = [], np.cumsum([0, *lengths])
    for r, n in enumerate(lengths):
        tokens = slice(ends[r], ends[r] + n)
        per_row = given | {name: given[name][tokens] for name in given if name == "z"}
        wanted, states = oracle(x[tokens], dt[tokens], A, B[tokens], C[tokens], state_of(before, read[r]), **per_row)
        # A token's output sums state_dim products of a state, to which n tokens have added one product each.
        terms = 4 * (n + 1) * before.shape[-1]
        assert_close(out[tokens], wanted, out.dtype, terms, f"row {r}")
        for t in range(n):
            if write[r, t]:
                written.append(write[r, t])
                assert_close(state_of(after, write[r, t]), states[t], after.dtype, terms, f"state {r}, {t}")
    assert not np.asarray(out[sum(lengths) :].astype(jnp.float32)).any()
    assert_untouched(before, after, written)
    assert_untouched(before[:LAYER], after[:LAYER], written=())
