"""A Mamba mixer by itself agrees with the recurrence in float64 in prefill, verify and decode rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.common import assert_untouched
from oracles.layers import mamba1, mamba2

from mamba_align_jax.layers.mamba1 import Mamba1Mixer
from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.layers.norm import RMSNorm, UnitRMSNorm
from mamba_align_jax.layers.residual import total
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.metadata.rows import Rows, RowSplit
from pallas_kernels import chunk_rows

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

HIDDEN, ROWS, WINDOW, BLOCKS, DECODE_TOKENS, PREFILL_TOKENS = 24, 3, 3, 12, 8, 90


def one(norm=None, norm_epsilon=None, **options):
    make = functools.partial(Mamba1Mixer, HIDDEN, 40, 6, 5, 4, norm=norm, **options)
    return make, functools.partial(mamba1, norm_epsilon=norm_epsilon)


# The epsilons are so large that a misplaced one shows.
def two(conv_bias=True, in_bias=False, out_bias=False, **same):
    biases = dict(conv_bias=conv_bias, in_bias=in_bias, out_bias=out_bias)
    make = functools.partial(Mamba2Mixer, HIDDEN, 4, 10, 6, 2, 4, epsilon=0.1, **biases, **same)
    return make, functools.partial(mamba2, state_dim=6, epsilon=0.1, **same)


CASES = {
    "mamba": one(),
    "falcon_mamba": one(lambda size: UnitRMSNorm(0.1), 0.1),
    "jamba": one(lambda size: RMSNorm(size, 0.1), 0.1, conv_bias=False, proj_bias=True),
    "mamba2": two(),
    "norm before gate": two(norm_before_gate=True, in_bias=True, out_bias=True),
    "multiplied, no norm": two(norm=False, conv_bias=False, multipliers=(0.7, 1.3, 0.6, 1.7, 0.8)),
}


def random_layer(make):
    """A layer with random weights, and its weights by published names. Ones and zeros would hide their places."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make("float32", nnx.Rngs(0))))
    rng, variables, tensors = np.random.default_rng(1), {}, {}
    for place, variable in nnx.to_flat_state(state):
        value = (0.2 + rng.normal(size=variable.shape) * (0.5 if len(variable.shape) > 1 else 0.7)).astype(np.float32)
        variables[place] = variable.replace(jnp.asarray(value))
        name = ".".join(map(str, place)).replace("dt_proj_bias", "dt_proj.bias")
        value = value.astype(np.float64)
        tensors[name] = value.T[:, None] if name == "conv1d.weight" else value
    return nnx.merge(graph, nnx.from_flat_state(variables.items())), tensors


def summed(out, *pools):
    """A mixer's results, its outputs as one array."""
    return total(out, out.dtype), *pools


def rows(*calls):
    """Rows from (tokens before, new tokens, recurrent_read, conv_read, window_row, write), padded to ROWS."""
    padding = [(0, 0, 0, 0, 0, ())] * (ROWS - len(calls))
    before, lengths, recurrent, conv, row, write = zip(*calls, *padding, strict=True)
    int32 = lambda x: jnp.asarray(x, jnp.int32)
    return Rows(
        query_start_loc=int32(np.cumsum([0, *lengths])),
        num_computed_tokens=int32(before),
        read=int32([recurrent]),
        window_read=int32([conv]),
        window_row=int32(row),
        write=int32([[(*blocks, *[0] * (WINDOW - len(blocks))) for blocks in write]]),
        max_query_tokens=WINDOW,
    )


@pytest.mark.parametrize("case", CASES)
def test_mixer_matches_the_oracle(case):
    """Runs a whole and a split prompt, a verify row with two accepted tokens, decode rows, and a chunk after them."""
    make, oracle = CASES[case]
    layer, w = random_layer(make)
    a, b = np.random.default_rng(2).normal(size=(2, 90, HIDDEN)).astype(np.float32)
    wanted = {"a": oracle(w, a.astype(np.float64)), "b": oracle(w, b.astype(np.float64))}
    conv_state, state = layer.states("float32", "float32")
    pools = tuple(jnp.full((2, BLOCKS, *s.block_shape(WINDOW - 1)), jnp.nan, jnp.float32) for s in (conv_state, state))
    none = jax.tree.map(lambda v: v[..., :0] if v.ndim < 3 else v[:, :0], rows())
    none = dataclasses.replace(none, query_start_loc=jnp.zeros(1, jnp.int32))
    run = jax.jit(lambda x, at, *pools: summed(*layer(x, at, *pools)))

    def step(x, decode=None, prefill=None):
        nonlocal pools
        first = 0 if decode is None else int(decode.query_start_loc[-1])
        size = DECODE_TOKENS * (decode is not None) + PREFILL_TOKENS * (prefill is not None)
        padded = np.full((size, HIDDEN), 7.0, np.float32)
        padded[: len(x)] = x
        split = RowSplit(
            decode=decode or none,
            prefill=prefill or none,
            first_prefill_token=jnp.int32(first),
            num_decode_tokens=DECODE_TOKENS,
        )
        chunks = prefill and chunk_rows(prefill.query_start_loc, prefill.num_computed_tokens, PREFILL_TOKENS)
        out, *pools = run(padded, LayerStep(rows=split, chunks=chunks, layer=jnp.int32(1)), *pools)
        assert np.isfinite(out).all()
        return np.asarray(out)[: len(x)]

    def check(out, name, begin, end, block=None, row=0):
        outs, inputs, states = wanted[name]
        np.testing.assert_allclose(out, outs[begin:end], atol=2e-5 * np.abs(outs).max(), rtol=0)
        if block is not None:
            conv, recurrent = (np.asarray(pool)[1] for pool in pools)
            width = conv_state.width
            np.testing.assert_allclose(
                conv[block[0], row : row + width - 1], inputs[end : end + width - 1], atol=2e-5 * np.abs(inputs).max()
            )
            np.testing.assert_allclose(recurrent[block[1]], states[end - 1], atol=2e-5 * np.abs(states).max(), rtol=0)

    prompts = rows((0, 70, 0, 0, 0, (1,)), (0, 2, 0, 0, 0, (2,)))
    out = step(np.concatenate([a[:70], b[:2]]), prefill=prompts)
    check(out[:70], "a", 0, 70, block=(1, 1))
    check(out[70:], "b", 0, 2, block=(2, 2))

    junk = np.full((1, HIDDEN), 9.0, np.float32)
    before = pools
    out = step(
        np.concatenate([a[70:72], junk, b[2:80]]),
        decode=rows((70, 3, 1, 1, 0, (3, 4, 5))),
        prefill=rows((2, 78, 2, 2, 0, (2,))),
    )
    check(out[:2], "a", 70, 72, block=(3, 4), row=1)
    check(out[3:], "b", 2, 80, block=(2, 2))
    for old, new in zip(before, pools, strict=True):
        assert_untouched(old[1:], new[1:], {2, 3, 4, 5})
        assert np.isnan(new[0]).all()

    out = step(np.concatenate([a[72:73], b[80:81]]), decode=rows((72, 1, 4, 3, 1, (6,)), (80, 1, 2, 2, 0, (2,))))
    check(out[:1], "a", 72, 73, block=(6, 6))
    check(out[1:], "b", 80, 81, block=(2, 2))
    check(step(a[73:], prefill=rows((73, 17, 6, 6, 0, (7,)))), "a", 73, 90, block=(7, 7))
