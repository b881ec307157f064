"""Models that decode by chains, and the log-probabilities that their tokens must have."""

from dataclasses import replace

import numpy as np

from benchmarks.random_model import QWEN3_5_4B
from mamba_align_jax import SamplingParams
from mamba_align_jax.models.qwen3_5 import FULL, LINEAR
from pallas_kernels.product_chain import Convolution

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
H200_SMS = 132
# Why neither the projection of the first mixer nor, with several tokens, what ends with the last norm is one launch.
TO_FIRST = "there must be a product and another step, got 1 steps"
TO_HEAD = "of several tokens, the first and the last step must be products"


def without_convolution(steps):
    """Returns the steps before a convolution, about which a launch's schedule decides."""
    return tuple(step for step in steps if not isinstance(step, Convolution))


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
