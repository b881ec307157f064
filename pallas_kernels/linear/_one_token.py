"""The body of linear's kernel for a single token: a program of one warp computes a few outputs by FMAs."""

import functools
import operator
from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.linear.config import Config


def kernel(refs: pt.Refs, *, config: Config, parts: Sequence[int], is_gated: bool, interpret: bool) -> None:
    """Store the split-K partial sums to `refs.sums` if it exists, else the results to `refs.part0`, `refs.part1`, ..

    A tile for tensor cores has 16 tokens and passes through SMEM. Here weights go from GMEM to the registers in which they
    are multiplied, and all loads of a program are issued before its first multiplication.
    """
    num_inputs, num_outputs = refs.x.shape[1], refs.values0.shape[0]
    width = num_outputs // (1 + is_gated)
    split = pt.program_id(2)
    output, output_exists = pt.lanes(pt.program_id(1), config.outputs, width)
    rows = [half * width + output for half in range(1 + is_gated)]
    per_split = -(-num_inputs // (config.shares * config.inputs))
    blocks = [pt.lanes(split * per_split + block, config.inputs, num_inputs) for block in range(per_split)]

    # Loads of full tiles are not predicated, because each mask is an instruction.
    is_full = num_inputs % (config.shares * config.inputs) == 0 and width % config.outputs == 0

    def take(ref, mask):
        return pt.load(ref) if is_full else pt.load(ref, mask=mask, other=0.0)

    def tile(row, index, exists):
        return take(refs.values0.at[row[:, None], index[None, :]], output_exists[:, None] & exists[None, :])

    weights = [[tile(row, *block) for block in blocks] for row in rows]
    x = [take(refs.x.at[0, index], exists) for index, exists in blocks]
    x = [values.astype(jnp.float32)[None, :] for values in x]

    def total(tiles):
        products = [tile.astype(jnp.float32) * values for tile, values in zip(tiles, x, strict=True)]
        return jnp.sum(functools.reduce(operator.add, products), axis=1)

    sums = [total(tiles) for tiles in weights]
    if hasattr(refs, "sums"):
        for row, value in zip(rows, sums, strict=True):
            pt.store(refs.sums.at[split, 0, row], value, mask=output_exists)
        return
    if refs.bias is not None:
        load = lambda row: pt.load(refs.bias.at[row], mask=output_exists, other=0.0).astype(jnp.float32)
        sums = [value + load(row) for value, row in zip(sums, rows, strict=True)]
    out = pt.silu(sums[0], interpret) * sums[1] if is_gated else sums[0]
    for ref, column, inside in pt.parts(refs, parts, output):
        pt.store(ref.at[0, column], out.astype(ref.dtype), mask=output_exists & inside)
