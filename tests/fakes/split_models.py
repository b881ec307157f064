"""What tests of several devices share: models whose heads do not divide, and arrays that must be the same everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_align_jax.models import qwen3_5


def randomised(make):
    """What `make` returns for an `nnx.Rngs`, with random norms, biases and rates too. The arrays are in host memory."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    rng = np.random.default_rng(1)

    def draw(place, variable):
        base = float(place[-1] == "weight" and variable.ndim == 1)
        return variable.replace((base + 0.25 * rng.normal(size=variable.shape)).astype(variable.dtype))

    drawn = [(place, draw(place, variable)) for place, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(drawn))


def qwen():
    """A model whose two key heads of either kind do not divide among four devices."""
    config = qwen3_5.Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, dtype="float32",
        layer_types=(qwen3_5.LINEAR, qwen3_5.FULL), num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=16,
        max_position_embeddings=256, mtp_num_hidden_layers=1,
    )  # fmt: skip
    model = randomised(functools.partial(qwen3_5.Model, config))
    # Each device has a likely token, so that a random draft head guesses some.
    weight = model.lm_head.weight
    weight.set_value(weight[...] * jnp.where(jnp.arange(64) % 16 == 5, 1, 0.1)[:, None])
    return model


def assert_same_everywhere(tree, devices=4):
    for array in jax.tree.leaves(tree):
        first, *others = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert len(others) == devices - 1
        assert all(np.array_equal(first, other, equal_nan=True) for other in others)
