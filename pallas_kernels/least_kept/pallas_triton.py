"""least_kept as a Pallas kernel: one launch for each pass over the probabilities.

A program adds up a chunk of a row. The programs of the next pass first add the sums of all chunks, each for
itself, which costs less than a launch between them.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.dispatch import Run
from pallas_kernels.least_kept._bits import PROBABILITY_BITS, float_of, probability_of, search
from pallas_kernels.least_kept.config import Config, default_config


def _digit(sums: jax.Array, value: jax.Array, enough: jax.Array) -> jax.Array:
    """Return the next bits of the result: the number of their possible values, from 1 on, whose sum is at least `enough`."""
    return jnp.sum(((sums >= enough) & (value > 0)).astype(jnp.int32), axis=-1, dtype=jnp.int32)


def _kernel(refs, *, config: Config, shift: int, counts: bool):
    """Find the bits of the pass before from its sums, if there was a pass, and compute the sums of this pass."""
    num_tokens = refs.weights.shape[1]
    chunk, row = pt.program_id(0), pt.program_id(1)
    value, _ = pt.lanes(0, 1 << config.bits, 1 << config.bits)
    bits = jnp.int32(0)
    if refs.before is not None:
        num_chunks = refs.before.shape[1]
        other, exists = pt.lanes(0, pt.power_of_two(num_chunks), num_chunks)
        partial_sums = pt.load(refs.before.at[row, other[:, None], value[None, :]], mask=exists[:, None], other=0.0)
        digit = _digit(jnp.sum(partial_sums, axis=0), value, refs.enough[row])
        bits = refs.bits[row] + (digit << (shift + config.bits))

    @pt.when(chunk == 0)
    def _():
        refs.found[row] = bits

    candidates = float_of(bits + (value << shift))

    def add(step, sums):
        # A token that does not exist gets -1, which is below all candidates.
        token, exists = pt.lanes(chunk * (config.chunk // config.lanes) + step, config.lanes, num_tokens)
        probability = pt.load(refs.weights.at[row, token], mask=exists, other=-1.0)[:, None]
        return sums + jnp.where(probability >= candidates[None, :], 1.0 if counts else probability, 0.0)

    zeros = jnp.zeros((config.lanes, 1 << config.bits), jnp.float32)
    sums = jax.lax.fori_loop(0, config.chunk // config.lanes, add, zeros)
    pt.store(refs.sums.at[row, chunk, value], jnp.sum(sums, axis=0))


def least_kept(weights: jax.Array, top_k: jax.Array, top_p: jax.Array, *, run: Run) -> jax.Array:
    """See api.py."""
    return search(functools.partial(_last_to_reach, run=run), weights, top_k, top_p)


def _last_to_reach(weights: jax.Array, enough: jax.Array, *, counts: bool, run: Run) -> jax.Array:
    """See xla.py."""
    rows, num_tokens = weights.shape
    config = run.config or default_config(rows, num_tokens)
    num_chunks = -(-num_tokens // config.chunk)
    bits, sums = jnp.zeros((rows,), jnp.int32), None
    for shift in range(PROBABILITY_BITS - config.bits, -1, -config.bits):
        results = pt.call(
            functools.partial(_kernel, config=config, shift=shift, counts=counts),
            name="least_kept",
            grid=(num_chunks, rows),
            inputs=dict(weights=weights, enough=enough, bits=bits, before=sums),
            outputs=dict(
                found=jax.ShapeDtypeStruct((rows,), jnp.int32),
                sums=jax.ShapeDtypeStruct((rows, num_chunks, 1 << config.bits), jnp.float32),
            ),
            num_warps=config.num_warps,
            interpret=run.interpret,
        )
        bits, sums = results["found"], results["sums"]
    assert sums is not None  # 30 bits take at least one pass
    value = jnp.arange(1 << config.bits, dtype=jnp.int32)
    return probability_of(bits + _digit(jnp.sum(sums, axis=1), value[None], enough[:, None]))
