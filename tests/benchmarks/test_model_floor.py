"""The least time of a model counts every matrix, state, entry and chosen expert."""

import functools

import numpy as np
import pytest
from flax import nnx

from benchmarks import (
    model,
    model_floor,
)
from mamba_align_jax import models
from mamba_align_jax.layers.linear import Linear


def sizes_of_products(config):
    """The number of weights of every product of a model's layers, routed and shared experts not included."""
    shapes = nnx.eval_shape(lambda: models.qwen3_5.Model(config, nnx.Rngs(0)))
    found = nnx.iter_modules(shapes)
    return [module.weight.size for path, module in found if isinstance(module, Linear) and path[0] == "layers"]


def test_the_floor_of_a_model_counts_every_matrix():
    config = model.MODELS["qwen3.5-4b"]
    kernels = sizes_of_products(config)
    assert sum(inputs * outputs for inputs, outputs in model_floor.products(config)) == sum(kernels)
    floor = functools.partial(model_floor.floor_us, config, copy_rate=4e6)
    # One row reads all weights, its keys and values and its states; twice the rows read the weights once.
    row_bytes = 4096 * 8 * 2 * 4 * 256 * 2 + 2 * 24 * 32 * 128 * 128 * 4
    one, two = (floor(model_floor.Case("decode", rows, 4096)) for rows in (1, 2))
    np.testing.assert_allclose(one, (2 * (sum(kernels) + config.hidden_size * config.vocab_size) + row_bytes) / 4e6)
    np.testing.assert_allclose(two - one, row_bytes / 4e6)
    # A long prompt is bound by arithmetic, and its attention grows with the square of its length.
    attention_us = 2 * 8 * 16 * 256 * 4096**2 / model_floor.FLOPS_PER_US
    prompt, twice = (floor(model_floor.Case("prompt", 1, context)) for context in (4096, 8192))
    head = max(2 * config.hidden_size * config.vocab_size / 4e6, 0)
    np.testing.assert_allclose(twice - head, 2 * (prompt - head) + 2 * attention_us)


def test_the_floor_of_deferred_states_counts_folds_and_entries():
    case, config = model_floor.Case("verify", 64, 4096, drafts=3), model.MODELS["qwen3.5-4b"]
    floor = functools.partial(model_floor.floor_us, config, case, copy_rate=4e6)
    state = 24 * 32 * 128 * 128 * 4
    # Rows advance by 2.5 of their 4 tokens, read 8.5 entries each and write 4.
    ring = model_floor.Ring(fold_length=16, accepted=64 * 2.5, entry_bytes=1000.0)
    np.testing.assert_allclose(
        (floor() - floor(ring=ring)) * 4e6, 64 * 4 * state - 10 * state - 64 * (8.5 + 4) * 1000, rtol=1e-6
    )


def test_the_floor_of_experts_counts_those_that_are_chosen():
    config = model.MODELS["qwen3.5-35b-a3b"]
    shapes = nnx.state(nnx.eval_shape(lambda: models.qwen3_5.Model(config, nnx.Rngs(0))))
    leaves = nnx.to_flat_state(shapes)
    kernels = sizes_of_products(config)
    # The shared expert of each layer, which all tokens have, is stored with the others.
    shared = 40 * 3 * 2048 * 512
    assert sum(inputs * outputs for inputs, outputs in model_floor.products(config)) == sum(kernels) + shared
    experts = [256 * shared]
    assert sum(leaf.size for place, leaf in leaves if "experts" in place) == 257 * shared
    assert 34e9 < sum(leaf.size for _, leaf in leaves) < 36e9
    floor = functools.partial(model_floor.floor_us, config, copy_rate=4e6)
    one, most = model_floor.Case("decode", 1, 4096), model_floor.Case("prompt", 1, 512)
    assert model_floor.expected_experts(config, 1) == pytest.approx(8)
    assert model_floor.expected_experts(config, 4096) == pytest.approx(256)
    np.testing.assert_allclose(floor(one, experts=10) - floor(one), 2 / 256 * 2 * sum(experts) / 4e6)
    few, every = floor(most, experts=240), floor(most, experts=256)
    np.testing.assert_allclose(every - few, 16 / 256 * 2 * sum(experts) / 4e6)
    np.testing.assert_allclose(floor(one, devices=2), floor(one) / 2)
    # A verify row reads its states once and writes them after each token.
    verify, decode = (floor(model_floor.Case("verify", 16, 4096, drafts), experts=256) for drafts in (3, 0))
    np.testing.assert_allclose(verify - decode, 16 * 3 * 30 * 32 * 128 * 128 * 4 / 4e6)
