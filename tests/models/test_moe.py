"""The mixture of experts agrees with a loop over tokens under any routing, and padding tokens change no result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.layers import moe

TOKENS, TOP_K, EXPERTS, HIDDEN, SIZE = 37, 3, 6, 10, 7


def reference(x, up, down, chosen, weights):
    """The mixture in float64, one token and expert at a time."""
    out = np.zeros_like(x, dtype=np.float64)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            gate, middle = np.split(x[token].astype(np.float64) @ up[expert], 2)
            out[token] += weight * ((gate / (1 + np.exp(-gate)) * middle) @ down[expert])
    return out


@pytest.fixture(scope="module", params=[1 << 26, 2 * 3 * HIDDEN * SIZE], ids=["at_once", "two_blocks_at_a_time"])
def run(request):
    """The experts as jitted programs. The second one gathers the weights of few blocks at once."""
    layer = moe.Experts(EXPERTS, HIDDEN, SIZE, "float32", nnx.Rngs(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "_ELEMENTS", request.param)
        call = jax.jit(lambda x, chosen, weights: layer(x, chosen, weights))
        arguments = jnp.zeros((TOKENS, HIDDEN)), jnp.zeros((TOKENS, TOP_K), jnp.int32), jnp.zeros((TOKENS, TOP_K))
        compiled = call.lower(*arguments).compile()
    return compiled, np.asarray(layer.up[...]), np.asarray(layer.down[...])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_routing_matches_the_loop(run, data):
    """Some experts are chosen by no token, one by all tokens, and a token may choose an expert twice."""
    compiled, up, down = run
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    most = data.draw(st.integers(1, EXPERTS))
    chosen = rng.choice(rng.permutation(EXPERTS)[:most], (TOKENS, TOP_K)).astype(np.int32)
    x = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    weights = rng.uniform(0, 1, (TOKENS, TOP_K)).astype(np.float32)
    padding = data.draw(st.integers(0, TOKENS - 1))
    x[TOKENS - padding :] = np.nan
    out = np.asarray(compiled(x, chosen, weights))[: TOKENS - padding]
    wanted = reference(x, up, down, chosen, weights)[: TOKENS - padding]
    np.testing.assert_allclose(out, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 64), (9, 4), (300, 2), (64, 1)])
def test_any_number_of_tokens_and_experts_matches_the_loop(tokens, experts, rng):
    """There are blocks of one row and of many."""
    layer = moe.Experts(experts, HIDDEN, SIZE, "float32", nnx.Rngs(0))
    x = rng.normal(size=(tokens, HIDDEN)).astype(np.float32)
    chosen = rng.integers(0, experts, (tokens, 2), dtype=np.int32)
    weights = np.ones((tokens, 2), np.float32)
    out = jax.jit(lambda *arguments: layer(*arguments))(x, chosen, weights)
    wanted = reference(x, np.asarray(layer.up[...]), np.asarray(layer.down[...]), chosen, weights)
    np.testing.assert_allclose(out, wanted, atol=2e-5, rtol=0)


def test_softmax_router_matches_the_equation(rng):
    logits = rng.normal(size=(5, 8)).astype(np.float32)
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    best = np.argsort(-logits, axis=1)[:, :3]
    for renormalise in (False, True):
        chosen, weights = moe.softmax_router(jnp.asarray(logits), 3, renormalise=renormalise)
        wanted = np.take_along_axis(scores, best, 1)
        assert np.array_equal(chosen, best)
        np.testing.assert_allclose(weights, wanted / wanted.sum(1, keepdims=True) if renormalise else wanted, rtol=1e-5)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (2, 1), (3, 3)])
def test_sigmoid_router_matches_the_equation(groups, top_groups, rng):
    """The bias takes part only in the choice, and a token chooses no expert outside its groups."""
    logits = rng.normal(size=(50, 12)).astype(np.float32)
    bias = rng.normal(size=12).astype(np.float32)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for renormalise in (False, True):
        options = dict(groups=groups, top_groups=top_groups, renormalise=renormalise, scale=2.5)
        chosen, weights = map(np.asarray, moe.sigmoid_router(jnp.asarray(logits), jnp.asarray(bias), 3, **options))
        for token in range(50):
            choice = (scores[token] + bias).reshape(groups, -1)
            kept = sorted(range(groups), key=lambda group: -sum(sorted(choice[group])[-2:]))[:top_groups]
            allowed = [expert for expert in range(12) if expert // (12 // groups) in kept]
            best = sorted(allowed, key=lambda expert: -choice.reshape(-1)[expert])[:3]
            wanted = scores[token, best] * 2.5 / (scores[token, best].sum() if renormalise else 1)
            assert chosen[token].tolist() == best
            np.testing.assert_allclose(weights[token], wanted, rtol=1e-5)


def test_weights_gathered_at_once_are_bounded():
    """A long chunk does not gather the weights of all its blocks at once."""
    layer = nnx.eval_shape(lambda: moe.Experts(64, 2048, 512, "float32", nnx.Rngs(0)))
    graph, params = nnx.split(layer)
    call = jax.jit(lambda params, *arguments: nnx.merge(graph, params)(*arguments))
    shape = lambda *dims, dtype="float32": jax.ShapeDtypeStruct(dims, dtype)
    lowered = call.lower(params, shape(2048, 2048), shape(2048, 8, dtype="int32"), shape(2048, 8))
    # The weights of all blocks would be 2.4 GB, and the rows of `jax.lax.ragged_dot` 8.6 GB.
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 1 << 30
