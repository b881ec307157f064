"""least_kept as a Pallas kernel: one launch for each pass over the weights.

A program adds up a chunk of a row's weights. The programs of the next pass first add the sums of all chunks, each for
itself, which costs less than a launch between them.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.dispatch import Run
from pallas_kernels.least_kept._bits import WEIGHT_BITS, float_of, weight_of
from pallas_kernels.least_kept.config import Config, default_config


def _digit(sums: jax.Array, value: jax.Array, enough: jax.Array) -> jax.Array:
    """Returns the largest of the next bits' values that is reached: the number of values from 1 on with `enough`."""
    return jnp.sum(((sums >= enough) & (value > 0)).astype(jnp.int32), axis=-1, dtype=jnp.int32)


def _kernel(refs, *, config: Config, shift: int, counts: bool):
    """Finds the bits of the pass before from its sums, if there was one, and computes the sums of this pass."""
    num_tokens = refs.weights.shape[1]
    chunk, row = pt.program_id(0), pt.program_id(1)
    value, _ = pt.lanes(0, 1 << config.bits, 1 << config.bits)
    bits = jnp.int32(0)
    if refs.before is not None:
        num_chunks = refs.before.shape[1]
        part, exists = pt.lanes(0, pt.power_of_two(num_chunks), num_chunks)
        parts = pt.load(refs.before.at[row, part[:, None], value[None, :]], mask=exists[:, None], other=0.0)
        digit = _digit(jnp.sum(parts, axis=0), value, refs.enough[row])
        bits = refs.bits[row] + (digit << (shift + config.bits))

    @pt.when(chunk == 0)
    def _():
        refs.found[row] = bits

    numbers = float_of(bits + (value << shift))

    def add(step, sums):
        # A token that does not exist reaches no number, as no weight is negative.
        token, exists = pt.lanes(chunk * (config.chunk // config.lanes) + step, config.lanes, num_tokens)
        weight = pt.load(refs.weights.at[row, token], mask=exists, other=-1.0)[:, None]
        return sums + jnp.where(weight >= numbers[None, :], 1.0 if counts else weight, 0.0)

    zeros = jnp.zeros((config.lanes, 1 << config.bits), jnp.float32)
    sums = jax.lax.fori_loop(0, config.chunk // config.lanes, add, zeros)
    pt.store(refs.sums.at[row, chunk, value], jnp.sum(sums, axis=0))


def last_to_reach(weights: jax.Array, enough: jax.Array, *, counts: bool, run: Run) -> jax.Array:
    """See xla.py."""
    rows, num_tokens = weights.shape
    config = run.config or default_config(rows, num_tokens)
    num_chunks = -(-num_tokens // config.chunk)
    bits, sums = jnp.zeros((rows,), jnp.int32), None
    for shift in range(WEIGHT_BITS - config.bits, -1, -config.bits):
        results = pt.call(
            functools.partial(_kernel, config=config, shift=shift, counts=counts),
            name="least_kept",
            grid=(num_chunks, rows),
            inputs=dict(weights=weights, enough=enough, bits=bits, before=sums),
            outputs=dict(
                found=jax.ShapeDtypeStruct((rows,), jnp.int32),
                sums=jax.ShapeDtypeStruct((rows, num_chunks, 1 << config.bits), jnp.float32),
            ),
            updates={},
            num_warps=config.num_warps,
            interpret=run.interpret,
        )
        bits, sums = results["found"], results["sums"]
    assert sums is not None  # 30 bits take at least one pass
    value = jnp.arange(1 << config.bits, dtype=jnp.int32)
    return weight_of(bits + _digit(jnp.sum(sums, axis=1), value[None], enough[:, None]))
