"""causal_conv1d in plain jax.numpy."""

import jax
import jax.numpy as jnp

from pallas_kernels._math import silu
from pallas_kernels.blocks import NULL_BLOCK, per_row, write_blocks
from pallas_kernels.causal_conv1d.config import Options
from pallas_kernels.rows import Rows, cut_columns, kept_states, token_rows


def _history(pool: jax.Array, rows: Rows, first_row: jax.Array, width: int, options: Options) -> jax.Array:
    """Return the width-1 inputs from a window row on, [rows, width-1, channels], in the pool's dtype."""
    window_row = first_row[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None]
    indices = (window_row,) if options.layout == "SD" else (slice(None), window_row)
    history = pool.at[rows.layer, rows.window_read[:, None], *indices].get(mode="clip")
    return jnp.where(per_row(rows.window_read != NULL_BLOCK, history), history, jnp.zeros_like(history))


def _convolve(
    x: jax.Array,
    history: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    query_start_loc: jax.Array,
    activation: str | None,
) -> jax.Array:
    """Return the outputs [tokens, channels], given each row's history [rows, width-1, channels]."""
    num_tokens, width = x.shape[0], weight.shape[0]
    rows = token_rows(query_start_loc, num_tokens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    taps = weight.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32) if bias is None else jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    for j in range(width):
        back = width - 1 - j
        from_row = (rows.offset >= back)[:, None]
        before = history[rows.row, jnp.clip(rows.offset + j, 0, width - 2)]
        u = jnp.where(from_row, x[jnp.maximum(token - back, 0)], before).astype(jnp.float32)
        # Padding tokens may read NaN, and the gradient of the taps would be 0 times it.
        y = y + taps[j][None] * jnp.where(rows.valid[:, None], u, 0.0)
    if activation == "silu":
        y = silu(y)
    return jnp.where(rows.valid[:, None], y, 0.0).astype(x.dtype)


def _windows(x: jax.Array, history: jax.Array, start: jax.Array, at: jax.Array) -> jax.Array:
    """Return the inputs at the indices `at` [rows, n] of each row, [rows, n, channels].

    Index 0 is the row's first token, and the negative indices are its history.
    """
    width = history.shape[1] + 1
    row = jnp.arange(at.shape[0], dtype=jnp.int32)[:, None]
    before = history[row, jnp.clip(at + width - 1, 0, width - 2)]
    tokens = x[jnp.clip(start[:, None] + at, 0, x.shape[0] - 1)]
    return jnp.where((at >= 0)[..., None], tokens, before)


def _keep(pool: jax.Array, rows: Rows, block: jax.Array, windows: jax.Array, options: Options) -> jax.Array:
    """Write windows [rows, window, channels] to blocks [rows] and return the new pool."""
    return write_blocks(pool, rows.layer, block, windows if options.layout == "SD" else windows.swapaxes(1, 2))


def causal_conv1d_update(
    x: jax.Array, pool: jax.Array, weight: jax.Array, bias: jax.Array | None, rows: Rows, *, options: Options
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Convolve decode and verify rows. See api.py."""
    width, window = weight.shape[0], pool.shape[options.axis]
    start, length = rows.query_start_loc[:-1], jnp.diff(rows.query_start_loc)
    history = _history(pool, rows, rows.window_row, width, options)
    y = _convolve(x, history, weight, bias, rows.query_start_loc, options.activation)
    at = jnp.broadcast_to(jnp.arange(window, dtype=jnp.int32) - (width - 2), (length.shape[0], window))
    kept = jnp.where((at < length[:, None])[..., None], _windows(x, history, start, at), 0)
    block = jnp.where(length > 0, rows.write[:, 0], NULL_BLOCK)
    if rows.boundary is not None:
        # All windows are written at once, so that they are read before the pool changes.
        boundary = _history(pool, rows, rows.boundary.row, width, options)
        boundary = jnp.pad(boundary, ((0, 0), (0, window - (width - 1)), (0, 0)))
        block, kept = jnp.concatenate([rows.boundary.block, block]), jnp.concatenate([boundary, kept])
    return cut_columns(y, options.parts), _keep(pool, rows, block, kept, options)


def causal_conv1d_prefill(
    x: jax.Array, pool: jax.Array, weight: jax.Array, bias: jax.Array | None, rows: Rows, *, options: Options
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Convolve rows of any length. See api.py."""
    x = x[:, : weight.shape[1]]
    width, window = weight.shape[0], pool.shape[options.axis]
    history = _history(pool, rows, rows.window_row, width, options)
    y = _convolve(x, history, weight, bias, rows.query_start_loc, options.activation)
    offset, block = kept_states(rows)
    for n in range(offset.shape[1]):
        at = offset[:, n, None] - (width - 1) + jnp.arange(width - 1, dtype=jnp.int32)[None]
        kept = jnp.pad(_windows(x, history, rows.query_start_loc[:-1], at), ((0, 0), (0, window - (width - 1)), (0, 0)))
        pool = _keep(pool, rows, block[:, n], kept, options)
    return cut_columns(y, options.parts), pool
