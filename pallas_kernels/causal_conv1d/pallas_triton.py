"""causal_conv1d's update as a Pallas kernel: one program per (tile of channels, row of the batch)."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._math import silu
from pallas_kernels._pool import NULL_BLOCK
from pallas_kernels.causal_conv1d.config import Config, default_config


def _update_kernel(refs, *, tile, activation):
    tokens, channels = refs.x.shape
    rows, width = refs.read_block.shape[0], refs.weight.shape[0]
    longest = refs.pool.shape[2] - (width - 2)
    channel, inside = pt.lanes(pt.program_id(0), tile, channels)
    program = pt.program_id(1)
    # All that addresses depend on is loaded here, ahead of any branch: one trip to memory instead of one after another.
    row = jnp.minimum(program, rows - 1)
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, read_row, write = refs.layer[...], refs.read_block[row], refs.read_row[row], refs.write_block[row]

    load = lambda at, mask: pt.load(at, mask=mask, other=0.0)
    taps = [load(refs.weight.at[jnp.int32(j), channel], inside).astype(jnp.float32) for j in range(width)]
    bias = None if refs.bias is None else load(refs.bias.at[channel], inside).astype(jnp.float32)

    @pt.when((program < rows) & (end > start))
    def _():
        # Everything is read before anything is written, and one channel stays in one thread: the blocks may be the same.
        old = lambda j: refs.pool.at[layer, read, read_row + j, channel]
        history = [load(old(j), inside & (read != NULL_BLOCK)) for j in range(width - 1)]
        new = [load(refs.x.at[jnp.minimum(start + t, end - 1), channel], inside) for t in range(longest)]
        inputs = history + new
        for j, value in enumerate(inputs[1:]):
            keep = inside & (write != NULL_BLOCK) & (j < width - 2 + end - start)
            pt.store(refs.pool.at[layer, write, jnp.int32(j), channel], value, mask=keep)
        for t in range(longest):
            y = jnp.zeros((tile,), jnp.float32) if bias is None else bias
            for tap, value in zip(taps, inputs[t : t + width], strict=True):
                y = y + tap * value.astype(jnp.float32)
            y = silu(y) if activation == "silu" else y
            pt.store(refs.y.at[start + t, channel], y.astype(refs.y.dtype), mask=inside & (start + t < end))

    # Tokens behind the last row have no row of their own.
    @pt.when((program < tokens) & (program >= total))
    def _():
        pt.store(refs.y.at[program, channel], jnp.zeros((tile,), refs.y.dtype), mask=inside)


def causal_conv1d_update(
    x,
    pool,
    layer,
    weight,
    bias,
    query_start_loc,
    read_block,
    read_row,
    write_block,
    *,
    activation: str | None,
    config: Config | None = None,
    interpret: bool = False,
):
    """See api.py."""
    rows = read_block.shape[0]
    config = config or default_config()
    results = pt.call(
        functools.partial(_update_kernel, tile=config.tile, activation=activation),
        name="causal_conv1d_update",
        grid=(-(-x.shape[1] // config.tile), max(x.shape[0], rows)),
        inputs=dict(
            x=x,
            layer=layer,
            weight=weight,
            bias=bias,
            query_start_loc=query_start_loc,
            read_block=read_block,
            read_row=read_row,
            write_block=write_block,
        ),
        outputs=dict(y=jax.ShapeDtypeStruct(x.shape, x.dtype)),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return results["y"], results["pool"]
