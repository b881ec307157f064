"""linear as a Pallas kernel: each program multiplies a tile of tokens by the weights of a tile of outputs."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import _weight_tiles as tiles
from pallas_kernels._check import require
from pallas_kernels.dispatch import Run
from pallas_kernels.linear import _one_token, xla
from pallas_kernels.linear.config import Config, Options, default_config
from pallas_kernels.quantized import QuantizedWeight


def unsupported(x: jax.Array, weight: jax.Array | QuantizedWeight, *, is_gated: bool) -> str | None:
    """Return why the kernel cannot run these arguments, or None if it can."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x must be float32, bfloat16 or float16, got {x.dtype}"
    return tiles.unsupported((weight, 1 + is_gated))


def _kernel(
    refs,
    *,
    runs: Sequence[tiles.Columns],
    dtype: Any,
    config: Config,
    parts: Sequence[int],
    is_gated: bool,
    interpret: bool,
):
    """Multiply by the weights of the run of columns to which the program's tile belongs."""
    options = dict(dtype=dtype, config=config, parts=parts, is_gated=is_gated, interpret=interpret)
    token_tile, split = pt.program_id(0), pt.program_id(2)
    do = lambda run, tile: _multiply(refs, run, token_tile, tile, split, **options)
    tiles.each_run(runs, pt.program_id(1), config.outputs, do)


def _multiply(refs, run: tiles.Columns, token_tile, tile, split, *, dtype, config: Config, parts, is_gated, interpret):
    """Store the split-K partial sums to `refs.sums` if it exists, else the results to `refs.part0`, `refs.part1`, .."""
    num_tokens, num_inputs = refs.x.shape
    # The programs of one tile of weights are neighbours, so that only the first reads it from GMEM, the others from L2.
    token, token_exists = pt.lanes(token_tile, config.tokens, num_tokens)
    output, output_exists = pt.lanes(tile, config.outputs, run.size)
    rows = [place.first + output for place in run.places]
    # A column of the product is a row of the weights, unless they have several parts.
    column = output if run.is_whole else run.begin + output
    columns = rows if run.is_whole else [half * run.size + column for half in range(1 + is_gated)]
    lane, _ = pt.lanes(0, config.inputs, config.inputs)

    def advance(block, sums):
        index = block * config.inputs + lane
        exists = None if num_inputs % config.inputs == 0 else index < num_inputs

        def take(ref, row, row_exists):
            mask = row_exists[:, None] if exists is None else row_exists[:, None] & exists[None, :]
            return pt.load(ref.at[row[:, None], index[None, :]], mask=mask, other=0.0)

        x = take(refs.x, token, token_exists).astype(dtype)
        places = list(zip(run.places, rows, strict=True))
        values = [take(getattr(refs, f"values{place.part}"), row, output_exists) for place, row in places]
        scales = [tiles.scale_of(refs, *each, (), output_exists, block, config.inputs) for each in places]
        return [
            tiles.add_product(total, x, weight, scale, interpret)
            for total, weight, scale in zip(sums, values, scales, strict=True)
        ]

    blocks = -(-num_inputs // config.inputs)
    per_split = -(-blocks // config.shares)
    first = split * per_split
    sums = [jnp.zeros((config.tokens, config.outputs), jnp.float32) for _ in rows]
    sums = jax.lax.fori_loop(first, jnp.minimum(first + per_split, blocks), advance, sums)
    exists = token_exists[:, None] & output_exists[None, :]
    if hasattr(refs, "sums"):
        for at, total in zip(columns, sums, strict=True):
            pt.store(refs.sums.at[split, token[:, None], at[None, :]], total, mask=exists)
        return
    if refs.bias is not None:
        biases = [pt.load(refs.bias.at[at], mask=output_exists, other=0.0).astype(jnp.float32) for at in columns]
        sums = [total + bias[None, :] for total, bias in zip(sums, biases, strict=True)]
    out = pt.silu(sums[0], interpret) * sums[1] if is_gated else sums[0]
    for ref, index, inside in pt.parts(refs, parts, column):
        pt.store(ref.at[token[:, None], index[None, :]], out.astype(ref.dtype), mask=exists & inside[None, :])


def _launch(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight,
    bias: jax.Array | None,
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    config: Config,
    is_gated: bool,
    interpret: bool,
) -> dict[str, jax.Array]:
    """Launch the kernel. `outputs` are `part0`, `part1`, .., or the partial sums `sums`."""
    runs = tiles.runs(weight, 1 + is_gated)
    grid = -(-x.shape[0] // config.tokens), sum(-(-run.size // config.outputs) for run in runs)
    parts = [output.shape[1] for output in outputs.values()]
    options = dict(config=config, parts=parts, is_gated=is_gated, interpret=interpret)
    if config.tokens == 1:
        require(not isinstance(weight, QuantizedWeight), "linear: tiles of one token need an array of weights")
        kernel = functools.partial(_one_token.kernel, **options)
    else:
        kernel = functools.partial(_kernel, runs=runs, dtype=weight.dtype, **options)
    return pt.call(
        kernel,
        name="linear",
        grid=(*grid, config.shares),
        inputs=dict(x=x) | tiles.operands(weight) | dict(bias=bias),
        outputs=outputs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )


def _sums(
    x: jax.Array, weight: jax.Array | QuantizedWeight, config: Config, *, is_gated: bool, interpret: bool
) -> jax.Array:
    sums = jax.ShapeDtypeStruct((config.shares, x.shape[0], weight.shape[0]), jnp.float32)
    return _launch(x, weight, None, {"sums": sums}, config=config, is_gated=is_gated, interpret=interpret)["sums"]


def linear(
    x: jax.Array, weight: jax.Array | QuantizedWeight, bias: jax.Array | None, *, options: Options, run: Run
) -> tuple[jax.Array, ...]:
    """See api.py."""
    config = run.config or default_config(x, weight, is_gated=options.is_gated)
    if config.shares > 1:
        sums = _sums(x, weight, config, is_gated=options.is_gated, interpret=run.interpret)
        total = functools.reduce(operator.add, [sums[split] for split in range(config.shares)])
        return xla.finish(total, bias, options)
    outputs = pt.part_shapes(x.shape[0], options.parts, options.out_dtype)
    results = _launch(x, weight, bias, outputs, config=config, is_gated=options.is_gated, interpret=run.interpret)
    return tuple(results.values())


def linear_sums(x: jax.Array, weight: jax.Array | QuantizedWeight, *, splits: int, run: Run) -> jax.Array:
    """See api.py. `splits` is the configuration's `shares`."""
    config = run.config or default_config(x, weight, is_summed=True)
    assert config.shares == splits, (config, splits)
    return _sums(x, weight, config, is_gated=False, interpret=run.interpret)
