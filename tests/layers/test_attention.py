"""Attention over pages against float64, with every combination of norms, rotation and gates that a model has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import layer_steps as steps
from flax import nnx
from oracles.ops import paged_attention
from oracles.ops import rotate as rotated

from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.rotation import make_rotation

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

HIDDEN, HEADS, KV_HEADS, DIM, EPSILON, THETA = 24, 4, 2, 12, 1e-3, 50.0
LAYERS, LAYER = 2, 1
OPTIONS = {
    "plain": dict(),
    "rotated as a whole, biased": dict(rotary_dim=12, bias=True),
    "rotated in part, normed, gated": dict(rotary_dim=6, norm=1.0, gated=True),
    "normed, scaled": dict(norm=0.0, scale=0.5),
    "normed over all heads, rotated, gated": dict(rotary_dim=12, norm=0.0, norm_whole=True, gated=True),
}


def make(options, rng):
    """A layer with random weights, biases and norms."""
    options = dict(options)
    if "norm" in options:
        options["norm"] = functools.partial(RMSNorm, epsilon=EPSILON, offset=options["norm"])
    sizes = HIDDEN, HEADS, KV_HEADS, DIM
    layer = Attention(*sizes, "float32", nnx.Rngs(0), rope_theta=THETA, **options)
    for _, variable in nnx.iter_graph(layer):
        if isinstance(variable, nnx.Param) and variable[...].ndim == 1:
            variable.set_value(jnp.asarray(rng.normal(size=variable.shape), jnp.float32))
    return layer


def projected(layer, x, positions):
    """Queries, keys, values and gates in float64."""
    of = lambda variable: np.asarray(variable[...], np.float64)
    y = x @ of(layer.qkv_proj.weight).T + (0 if layer.qkv_proj.bias is None else of(layer.qkv_proj.bias))
    q, k, v = np.split(y, np.cumsum(layer.qkv_proj.parts)[:-1], axis=1)
    q, gate = np.split(q.reshape(len(x), HEADS, -1), [DIM], axis=2)
    k, v = (y.reshape(len(x), KV_HEADS, DIM) for y in (k, v))

    def finish(y, norm):
        angle = positions[:, None] * THETA ** (-2 * np.arange(layer.rotary_dim // 2) / max(layer.rotary_dim, 1))
        weight, offset = (None, None) if norm is None else (of(norm.weight), norm.offset)
        if weight is not None and layer.norm_whole:
            y = np.array([rotated(row.ravel(), None, None, weight, EPSILON, offset) for row in y]).reshape(y.shape)
            weight = None
        cos, sin = np.cos(angle), np.sin(angle)
        return np.array(
            [[rotated(y, *pair, weight, EPSILON, offset) for y in row] for row, *pair in zip(y, cos, sin, strict=True)]
        )

    return finish(q, layer.q_norm), finish(k, layer.k_norm), v, gate.reshape(len(x), -1)


def real_rows(loc):
    """Each row that has tokens, with the place of its tokens among the packed ones."""
    return [(row, slice(loc[r], loc[r + 1])) for r, row in enumerate(steps.ROWS) if row.length]


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", OPTIONS)
def test_attention_over_pages_is_the_equation(options, implementation, rng):
    layer = make(OPTIONS[options], rng)
    step, num_tokens, loc = steps.make()
    x = rng.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    keys, values = np.full((2, LAYERS, steps.PAGES, steps.PAGE_SIZE, KV_HEADS, DIM), np.nan, np.float32)

    def places(row, begin, end):
        """Indices of a row's positions in a pool."""
        position = np.arange(begin, end)
        return LAYER, np.array(row.pages)[position // steps.PAGE_SIZE], position % steps.PAGE_SIZE

    for row, _ in real_rows(loc):
        for pool in (keys, values):
            pool[places(row, 0, row.computed)] = rng.normal(size=(row.computed, KV_HEADS, DIM))
    run = jax.jit(lambda x, *pools: layer(x, step.layer(LAYER, implementation=implementation), *pools))
    sums, keys_after, values_after = map(np.asarray, run(x, keys, values))
    out, o_proj = sums.sum(axis=0), np.asarray(layer.o_proj.weight[...], np.float64)
    written = np.zeros(keys.shape[:3], bool)
    for row, at in real_rows(loc):
        own, end = places(row, row.computed, row.computed + row.length), row.computed + row.length
        q, k, v, gate = projected(layer, x[at].astype(np.float64), np.arange(row.computed, end))
        np.testing.assert_allclose(keys_after[own], k, atol=2e-5, rtol=0)
        np.testing.assert_allclose(values_after[own], v, atol=2e-5, rtol=0)
        seen = (pool[places(row, 0, end)] for pool in (keys_after, values_after))
        wanted = paged_attention(q, *seen, row.computed, layer.scale).reshape(row.length, -1)
        wanted = (wanted / (1 + np.exp(-gate)) if layer.gated else wanted) @ o_proj.T
        if layer.o_proj.bias is not None:
            wanted = wanted + np.asarray(layer.o_proj.bias[...])
        np.testing.assert_allclose(out[at], wanted, atol=2e-5 * max(1, np.abs(wanted).max()), rtol=0)
        written[own] = True
    for before, after in ((keys, keys_after), (values, values_after)):
        np.testing.assert_array_equal(after[~written], before[~written])


@pytest.mark.parametrize("options", OPTIONS)
def test_project_computes_what_the_pages_get(options, rng):
    layer = make(OPTIONS[options], rng)
    x, positions = rng.normal(size=(5, HIDDEN)).astype(np.float32), np.array([0, 1, 7, 100, 3])
    actual = layer.project(jnp.asarray(x), jnp.asarray(positions, jnp.int32))
    *wanted, gate = projected(layer, x.astype(np.float64), positions)
    for one, other in zip(actual, [*wanted, gate if layer.gated else None], strict=True):
        if other is None:
            assert one is None
        else:
            np.testing.assert_allclose(one, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("_", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_angles_are_exact_for_large_positions(_):
    """The angle is a float32 product. Its cosine and its sine are those of that angle, however large it is."""
    positions = np.concatenate([np.arange(2048), np.arange(262144 - 2048, 262145)])
    cos, sin = jax.jit(make_rotation(64, 1e7).angles)(jnp.asarray(positions, jnp.int32))
    frequency = (1e7 ** (-np.arange(32) / 32)).astype(np.float32)
    angle = (positions[:, None].astype(np.float32) * frequency).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angle), atol=3e-7, rtol=0)
    np.testing.assert_allclose(sin, np.sin(angle), atol=3e-7, rtol=0)


@pytest.mark.gpu
def test_layers_share_their_angles(rng):
    """On a CPU each layer's code computes them on the way. A kernel reads them from memory."""
    step, num_tokens, _ = steps.make()
    layers = [make(OPTIONS["rotated in part, normed, gated"], rng) for _ in range(3)]
    pool = jnp.zeros((3, steps.PAGES, steps.PAGE_SIZE, KV_HEADS, DIM))

    def run(x, *pools):
        for number, layer in enumerate(layers):
            out, *pools = layer(x, step.layer(number, implementation="triton"), *pools)
            x = x + out.sum(axis=0)
        return x, pools

    text = jax.jit(run).lower(jnp.zeros((num_tokens, HIDDEN)), pool, pool).compile().as_text()
    assert text.count(" cosine(") == 1
