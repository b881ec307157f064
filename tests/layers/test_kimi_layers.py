"""One of Kimi's layers by itself agrees with the equations in float64 in one step over all kinds of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import layer_steps as steps
from flax import nnx
from oracles.layers import kimi_delta_attention, multi_head_latent_attention

from mamba_align_jax.layers.kimi_delta_attention import KimiDeltaAttention
from mamba_align_jax.layers.mla import MultiHeadLatentAttention
from mamba_align_jax.layers.residual import total

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

HIDDEN, LAYERS, LAYER = 24, 2, 1
ATOL = 2e-5
HEADS, DIM, WIDTH = 3, 8, 4
KDA = {
    "softplus gate, low rank": dict(f_rank=5, g_rank=6),
    "bounded gate, full rank": dict(lower_bound=-5.0),
}
MLA = {
    "without rotation": {},
    "queries of low rank, rotated, gated": dict(q_lora_rank=12, rope_theta=100.0, gated=True),
}
NOPE, ROPE, VALUE, RANK = 10, 6, 7, 16


def tensors(module):
    """The parameters of a layer in float64, by their published names."""
    out = {}
    for place, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        value, name = np.asarray(variable[...], np.float64), ".".join(place)
        if name == "in_proj_qkvbfg.weight":
            channels, rank = HEADS * DIM, "_a" if module.f_b_proj is not None else ""
            ends = np.cumsum([channels, channels, channels, HEADS, module.in_proj_qkvbfg.parts[2]])
            names = "q", "k", "v", "b", f"f{rank}", f"g{rank}"
            out |= {f"{n}_proj.weight": part for n, part in zip(names, np.split(value, ends), strict=True)}
        elif name == "conv1d.weight":
            parts = np.split(value.T[:, None], 3)
            out |= {f"{n}_conv1d.weight": part for n, part in zip("qkv", parts, strict=True)}
        else:
            out[name] = value
    return out


def randomised(module, rng):
    """The layer with norms and biases that are not all ones or zeros."""
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if variable[...].ndim == 1:
            variable[...] = variable[...] + jnp.asarray(rng.normal(0, 0.5, variable[...].shape), jnp.float32)
    graph, state = nnx.split(module)
    return nnx.merge(graph, state)


def real_rows(loc):
    return [(row, slice(*bounds)) for row, *bounds in zip(steps.ROWS, loc, loc[1:], strict=False) if row.length]


@pytest.mark.parametrize("variant", KDA)
def test_kimi_delta_attention_matches_the_oracle(variant, rng):
    layer = randomised(KimiDeltaAttention(HIDDEN, HEADS, DIM, WIDTH, 1e-3, "float32", nnx.Rngs(0), **KDA[variant]), rng)
    step, num_tokens, loc = steps.make()
    x = rng.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    conv = np.full((LAYERS, steps.BLOCKS, WIDTH - 1 + steps.WINDOW - 1, 3 * HEADS * DIM), np.nan, np.float32)
    recurrent = np.full((LAYERS, steps.BLOCKS, HEADS, DIM, DIM), np.nan, np.float32)
    for row in steps.ROWS:
        if row.read:
            conv[LAYER, row.read, row.window_row : row.window_row + WIDTH - 1] = rng.normal(
                size=(WIDTH - 1, conv.shape[3])
            )
            recurrent[LAYER, row.read] = rng.normal(size=recurrent.shape[2:])

    @jax.jit
    def run(x, conv, recurrent):
        out, *pools = layer(x, step.layer(LAYER), conv, recurrent)
        return total(out, x.dtype), *pools

    out, conv_after, recurrent_after = map(np.asarray, run(x, conv, recurrent))
    weights, written = tensors(layer), set()
    for row, at in real_rows(loc):
        state = recurrent[LAYER, row.read].astype(float) if row.read else np.zeros(recurrent.shape[2:])
        window = conv[LAYER, row.read, row.window_row :][: WIDTH - 1].astype(float)
        window = window if row.read else np.zeros_like(window)
        wanted, states, window = kimi_delta_attention(
            x[at].astype(float), weights, HEADS, 1e-3, state, window, layer.lower_bound
        )
        np.testing.assert_allclose(out[at], wanted, atol=ATOL, rtol=0)
        kept = dict(zip(row.write, states, strict=False)) if row in steps.DECODE else {row.write[0]: states[-1]}
        for block, state in kept.items():
            np.testing.assert_allclose(recurrent_after[LAYER, block], state, atol=ATOL, rtol=0)
        last = row.length - 1 if row in steps.DECODE else 0
        np.testing.assert_allclose(conv_after[LAYER, row.write[0], last : last + WIDTH - 1], window, atol=ATOL, rtol=0)
        written |= set(kept)
    others = [block for block in range(steps.BLOCKS) if block not in written]
    np.testing.assert_array_equal(recurrent_after[:, others], recurrent[:, others])
    assert not out[loc[-1] :].any()


@pytest.mark.parametrize("variant", MLA)
def test_multi_head_latent_attention_matches_the_oracle(variant, rng):
    layer = MultiHeadLatentAttention(HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK, "float32", nnx.Rngs(0), **MLA[variant])
    layer = randomised(layer, rng)
    step, num_tokens, loc = steps.make()
    x = rng.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    pages = np.full((LAYERS, steps.PAGES, steps.PAGE_SIZE, 1, RANK + ROPE), np.nan, np.float32)
    places = lambda row, begin, end: [
        (LAYER, row.pages[n // steps.PAGE_SIZE], n % steps.PAGE_SIZE, 0) for n in range(begin, end)
    ]
    take = lambda pool, row, end: np.array([pool[place] for place in places(row, 0, end)]).reshape(end, RANK + ROPE)
    for row in steps.ROWS:
        for place in places(row, 0, row.computed):
            pages[place] = rng.normal(size=RANK + ROPE)
    run = jax.jit(lambda x, pages: layer(x, step.layer(LAYER), pages, pages[..., :0])[:2])
    out, after = run(x, pages)
    out, after = np.asarray(total(out, x.dtype)), np.asarray(after)
    weights, written = tensors(layer), np.zeros(pages.shape[:3], bool)
    for row, at in real_rows(loc):
        wanted, history = multi_head_latent_attention(
            x[at].astype(float),
            weights,
            HEADS,
            NOPE,
            ROPE,
            take(pages, row, row.computed).astype(float),
            layer.rope_theta,
        )
        np.testing.assert_allclose(out[at], wanted, atol=ATOL, rtol=0)
        np.testing.assert_allclose(take(after, row, len(history)), history, atol=ATOL, rtol=0)
        for place in places(row, row.computed, row.computed + row.length):
            written[place[:3]] = True
    np.testing.assert_array_equal(after[~written], pages[~written])
    assert not out[loc[-1] :].any()
