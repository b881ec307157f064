"""The mixture of experts agrees with a loop over tokens under any routing, and padding tokens change no result."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.lowered_cases import on
from oracles.ops import mixture_of_experts as oracle

from mamba_align_jax.layers import moe
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual, total
from mamba_align_jax.models import nemotron_h
from pallas_kernels import Run
from pallas_kernels.mixture_of_experts import api, xla

TOKENS, TOP_K, EXPERTS, HIDDEN, SIZE = 37, 3, 6, 10, 7


@pytest.fixture(scope="module", params=[1 << 26, 2 * 3 * HIDDEN * SIZE], ids=["at_once", "two_tiles_at_a_time"])
def run(request):
    """The experts as jitted programs. The second one gathers the weights of few tiles at once."""
    layer = moe.Experts(EXPERTS, HIDDEN, SIZE, "float32", nnx.Rngs(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "_ELEMENTS", request.param)
        jax.clear_caches()  # The op is jitted, and has been traced with another value.
        call = jax.jit(lambda x, chosen, weights: layer(x, chosen, weights))
        arguments = jnp.zeros((TOKENS, HIDDEN)), jnp.zeros((TOKENS, TOP_K), jnp.int32), jnp.zeros((TOKENS, TOP_K))
        compiled = call.lower(*arguments).compile()
    jax.clear_caches()
    return compiled, layer.up[...], layer.down[...]


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
    chosen[TOKENS - padding :] = data.draw(st.sampled_from([-1, 0]))
    out = np.asarray(compiled(x, chosen, weights))[: TOKENS - padding]
    wanted = oracle(x[: TOKENS - padding], up, down, chosen, weights)
    np.testing.assert_allclose(out, wanted, atol=2e-5, rtol=0)


def layers():
    """One layer of each class that has experts, by name, with 6 experts."""
    rngs, sizes = nnx.Rngs(0), (HIDDEN, EXPERTS, TOP_K)
    gate = moe.SigmoidGate(HIDDEN, EXPERTS, TOP_K, rngs, groups=2, top_groups=1, shared=2)
    experts = moe.Experts(EXPERTS + 2, HIDDEN, SIZE, "float32", rngs)
    config = SimpleNamespace(n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=HIDDEN, dtype="float32")
    config.moe_intermediate_size = config.moe_shared_expert_intermediate_size = SIZE
    config.moe_latent_size, config.mlp_bias = 4, False
    config.n_group, config.topk_group, config.norm_topk_prob, config.routed_scaling_factor = 1, 1, True, 2.0
    return {
        "shared expert": moe.SharedExpertMoE(*sizes, SIZE, SIZE + 1, "float32", rngs),
        "shared experts": moe.SharedExpertsMoE(gate, experts),
        "softmax": moe.SoftmaxMoE(*sizes, SIZE, "float32", rngs),
        "nemotron": nemotron_h.MoE(config, rngs),
    }


@pytest.mark.parametrize("name", ["shared expert", "shared experts", "softmax", "nemotron"])
def test_padding_tokens_choose_no_experts(name, rng, monkeypatch):
    """Each class tells its experts which tokens are padding, and the other tokens' results stay as they are."""
    layer, seen = layers()[name], []
    assert isinstance(layer, moe.MixtureOfExperts)
    call = api.mixture_of_experts_sums
    for module in (api, moe):
        monkeypatch.setattr(
            module,
            "mixture_of_experts_sums",
            lambda x, up, down, chosen, *rest, **how: seen.append(chosen) or call(x, up, down, chosen, *rest, **how),
        )
    x, valid = jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.float32), np.arange(TOKENS) < 30
    by_xla = Run(implementation="xla")
    whole, some = (total(out, jnp.float32) for out in (layer(x), layer(x, jnp.asarray(valid), by_xla)))
    np.testing.assert_array_equal(np.asarray(seen[1]).max(axis=1) >= 0, valid)
    np.testing.assert_array_equal(seen[0][:30], seen[1][:30])
    np.testing.assert_allclose(some[:30], whole[:30], atol=1e-6)


@pytest.mark.parametrize(("tokens", "others"), [(1, set()), (64, set()), (65, {"dot_general"})])
def test_decode_steps_launch_nothing_but_kernels(tokens, others):
    """Between two norms, few tokens take a kernel each for router, choice, and the experts' two products."""
    hidden, dtype = 2048, "bfloat16"

    def layer():
        norm = functools.partial(RMSNorm, hidden, 1e-6)
        return norm(), moe.SharedExpertMoE(hidden, 256, 8, 512, 512, dtype, nnx.Rngs(0)), norm()

    graph, params = nnx.split(nnx.eval_shape(lambda: nnx.List(layer())))

    def run(params, x, waiting):
        before, experts, after = nnx.merge(graph, params)
        normed, x = Residual(x, waiting).normed(before)
        return x.add(experts(normed)).normed(after)[0]

    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    with on("NVIDIA H200"):
        traced = jax.jit(run).trace(params, array(dtype, tokens, hidden), array(jnp.float32, 4, tokens, hidden))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    work = set(re.findall(r"stablehlo\.(\w+)", text)) - {"case", "constant", "reshape", "return"}
    assert work >= {"custom_call", *others}
    assert others or work == {"custom_call"}


@pytest.mark.parametrize("name", ["shared expert", "shared experts", "gate"])
@pytest.mark.parametrize("implementation", ["xla", None])
def test_a_router_takes_the_implementation_that_is_named(name, implementation):
    gate = moe.SigmoidGate(16, 8, 2, nnx.Rngs(0), shared=1)
    layer = {
        "shared expert": moe.SharedExpertMoE(16, 8, 2, 16, 16, "bfloat16", nnx.Rngs(0)),
        "shared experts": moe.SharedExpertsMoE(gate, moe.Experts(9, 16, 16, "float32", nnx.Rngs(0))),
        "gate": gate,
    }[name]
    x = jax.ShapeDtypeStruct((4, 16), "bfloat16" if name == "shared expert" else "float32")
    with on("NVIDIA H200"):
        traced = jax.jit(lambda x: layer(x, run=Run(implementation=implementation))).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("xla.gpu.triton" in text) == (implementation is None)


def test_weights_gathered_at_once_are_bounded():
    """In XLA's implementation, a long chunk does not gather the weights of all its tiles at once."""
    layer = nnx.eval_shape(lambda: moe.Experts(64, 2048, 512, "float32", nnx.Rngs(0)))
    graph, params = nnx.split(layer)
    call = jax.jit(lambda params, *arguments: nnx.merge(graph, params)(*arguments, Run(implementation="xla")))
    shape = lambda *dims, dtype="float32": jax.ShapeDtypeStruct(dims, dtype)
    lowered = call.lower(params, shape(2048, 2048), shape(2048, 8, dtype="int32"), shape(2048, 8))
    # The weights of all tiles would be 2.4 GB, and the rows of `jax.lax.ragged_dot` 8.6 GB.
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 1 << 30
