"""Few requests that decode have the log-probabilities that their tokens have as a prompt.

A step of few tokens launches products and norms together (`layers/chain.py`), and a prompt launches them one by one. The
model's sizes are such that the one launch of a Hopper GPU takes all chains of one token, and most of several tokens.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.random_model import QWEN3_5_4B, random_model
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.layers import chain
from mamba_align_jax.models.qwen3_5 import FULL, LINEAR
from pallas_kernels.product_chain import Convolution, _schedule

CONFIG = replace(
    QWEN3_5_4B,
    vocab_size=1000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    layer_types=(LINEAR, FULL, LINEAR, FULL),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
# Every token has all experts, because a rounding may decide which ones are chosen.
WITH_EXPERTS = replace(
    CONFIG, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=256, shared_expert_intermediate_size=256
)
H200_CORES = 132
# Why neither the projection of the first mixer nor, with several tokens, what ends with the last norm is one launch.
TO_FIRST = "there must be a product and another step, got 1 steps"
TO_HEAD = "of several tokens, the first and the last step must be products"


def without_convolution(steps):
    """Returns the steps before a convolution, about which a launch's schedule decides."""
    return tuple(step for step in steps if not isinstance(step, Convolution))


@pytest.fixture
def chains(monkeypatch):
    """Lists, for each chain that is launched, why the launch of a Hopper GPU does not take it; None if it does."""
    found, original = [], chain.product_chain

    def record(x, steps, residual, *, parts=None, **options):
        products = without_convolution(steps)
        few = "few steps" if _schedule.is_short(products) else None
        found.append(_schedule.unsupported(x, products, residual, parts, H200_CORES) or few)
        return original(x, steps, residual, parts=parts, **options)

    monkeypatch.setattr(chain, "product_chain", record)
    return found


def check_log_probabilities(engine, rng, requests):
    """Decodes some requests, and compares with the same tokens as prompts."""
    prompts = [rng.integers(1, CONFIG.vocab_size, 70).tolist() for _ in range(requests)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0))
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = [*prompt, *output.token_ids]
        (again,) = engine.generate(tokens, SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
        found = np.array([each.logprob for each in output.logprobs])
        wanted = np.array([each.logprob for each in again.prompt_logprobs[len(prompt) :]])
        # Roundings to bfloat16 make up to 0.04 on a CPU, and outputs of mixers that are a fifth too large 0.5.
        np.testing.assert_allclose(found, wanted, atol=0.1, rtol=0)


@pytest.mark.parametrize("model", [CONFIG, WITH_EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("requests", [1, 3])
def test_decoded_tokens_have_the_log_probabilities_that_they_have_in_a_prompt(chains, rng, requests, model):
    config = EngineConfig(
        block_size=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        num_state_blocks=16,
        num_kv_pages=99,
    )
    check_log_probabilities(Engine(random_model(model), config), rng, requests)
    # To the first mixer, between the mixers of four layers, and from the last one to the head.
    if requests == 1:
        assert chains == [TO_FIRST, *[None] * 4]
    elif model is CONFIG:
        assert [TO_FIRST, *[None] * 3, TO_HEAD] in [chains[n : n + 5] for n in range(len(chains))]


@pytest.mark.gpu
@pytest.mark.parametrize("model", [CONFIG, WITH_EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("requests", [1, 3])
def test_compiled_chains_decode_the_same(chains, rng, requests, model):
    jax.clear_caches()
    test_decoded_tokens_have_the_log_probabilities_that_they_have_in_a_prompt(chains, rng, requests, model)
