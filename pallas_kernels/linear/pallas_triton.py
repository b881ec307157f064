"""linear as a Pallas kernel: each program multiplies a tile of tokens by the weights of a tile of outputs."""

import functools
import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot
from pallas_kernels.dispatch import Run
from pallas_kernels.linear import _one_token, xla
from pallas_kernels.linear.config import Config, Options, default_config


def unsupported(x: jax.Array) -> str | None:
    """Return why the kernel cannot run these arguments, or None if it can."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x must be float32, bfloat16 or float16, got {x.dtype}"
    return None


def _kernel(refs, *, config: Config, parts: Sequence[int], is_gated: bool, interpret: bool):
    """Store the split-K partial sums to `refs.sums` if it exists, else the results to `refs.part0`, `refs.part1`, .."""
    (num_tokens, num_inputs), num_outputs = refs.x.shape, refs.weight.shape[0]
    width = num_outputs // (1 + is_gated)
    # The programs of one tile of weights are neighbours, so that only the first reads it from GMEM, the others from L2.
    token, token_exists = pt.lanes(pt.program_id(0), config.tokens, num_tokens)
    output, output_exists = pt.lanes(pt.program_id(1), config.outputs, width)
    split = pt.program_id(2)
    rows = [half * width + output for half in range(1 + is_gated)]
    lane, _ = pt.lanes(0, config.inputs, config.inputs)

    def advance(block, sums):
        index = block * config.inputs + lane
        exists = None if num_inputs % config.inputs == 0 else index < num_inputs

        def take(ref, row, row_exists):
            mask = row_exists[:, None] if exists is None else row_exists[:, None] & exists[None, :]
            return pt.load(ref.at[row[:, None], index[None, :]], mask=mask, other=0.0)

        x = take(refs.x, token, token_exists).astype(refs.weight.dtype)
        weights = [take(refs.weight, row, output_exists) for row in rows]
        return [
            total + dot(x, weight, contract=(1, 1), interpret=interpret)
            for total, weight in zip(sums, weights, strict=True)
        ]

    blocks = -(-num_inputs // config.inputs)
    per_split = -(-blocks // config.shares)
    first = split * per_split
    sums = [jnp.zeros((config.tokens, config.outputs), jnp.float32) for _ in rows]
    sums = jax.lax.fori_loop(first, jnp.minimum(first + per_split, blocks), advance, sums)
    exists = token_exists[:, None] & output_exists[None, :]
    if hasattr(refs, "sums"):
        for row, total in zip(rows, sums, strict=True):
            pt.store(refs.sums.at[split, token[:, None], row[None, :]], total, mask=exists)
        return
    if refs.bias is not None:
        biases = [pt.load(refs.bias.at[row], mask=output_exists, other=0.0).astype(jnp.float32) for row in rows]
        sums = [total + bias[None, :] for total, bias in zip(sums, biases, strict=True)]
    out = pt.silu(sums[0], interpret) * sums[1] if is_gated else sums[0]
    for ref, column, inside in pt.parts(refs, parts, output):
        pt.store(ref.at[token[:, None], column[None, :]], out.astype(ref.dtype), mask=exists & inside[None, :])


def _launch(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    config: Config,
    is_gated: bool,
    interpret: bool,
) -> dict[str, jax.Array]:
    """Launch the kernel. `outputs` are `part0`, `part1`, .., or the partial sums `sums`."""
    tiles = -(-x.shape[0] // config.tokens), -(-weight.shape[0] // (1 + is_gated) // config.outputs)
    parts = [output.shape[1] for output in outputs.values()]
    kernel = _one_token.kernel if config.tokens == 1 else _kernel
    return pt.call(
        functools.partial(kernel, config=config, parts=parts, is_gated=is_gated, interpret=interpret),
        name="linear",
        grid=(*tiles, config.shares),
        inputs=dict(x=x, weight=weight, bias=bias),
        outputs=outputs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )


def _sums(x: jax.Array, weight: jax.Array, config: Config, *, is_gated: bool, interpret: bool) -> jax.Array:
    sums = jax.ShapeDtypeStruct((config.shares, x.shape[0], weight.shape[0]), jnp.float32)
    return _launch(x, weight, None, {"sums": sums}, config=config, is_gated=is_gated, interpret=interpret)["sums"]


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, options: Options, run: Run
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


def linear_sums(x: jax.Array, weight: jax.Array, *, splits: int, run: Run) -> jax.Array:
    """See api.py. `splits` is the configuration's `shares`."""
    config = run.config or default_config(x, weight, is_summed=True)
    assert config.shares == splits, (config, splits)
    return _sums(x, weight, config, is_gated=False, interpret=run.interpret)
