"""Makes models with random weights in the shapes of a published one, for measurements that depend on shapes only."""

from dataclasses import replace

import jax
from flax import nnx

from mamba_align_jax.models.qwen3_5 import FULL, LINEAR, Config, Model

QWEN3_5_4B = Config(
    vocab_size=248320,
    hidden_size=2560,
    intermediate_size=9216,
    num_hidden_layers=32,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    rope_theta=1e7,
    tie_word_embeddings=True,
)
QWEN3_5_35B_A3B = replace(
    QWEN3_5_4B,
    hidden_size=2048,
    num_hidden_layers=40,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 10,
    num_key_value_heads=2,
    intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    tie_word_embeddings=False,
    model_type="qwen3_5_moe_text",
)
# Models that a CPU runs in milliseconds, for tests.
TINY = replace(
    QWEN3_5_4B,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    layer_types=(LINEAR, FULL),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    dtype="float32",
)
TINY_MOE = replace(
    TINY,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    tie_word_embeddings=False,
    model_type="qwen3_5_moe_text",
)
MODELS = {"qwen3.5-4b": QWEN3_5_4B, "qwen3.5-35b-a3b": QWEN3_5_35B_A3B, "tiny": TINY, "tiny-moe": TINY_MOE}


def random_model(config: Config, seed: int = 0) -> Model:
    """Makes a model whose weights are drawn on the device, in the model's own dtype.

    Layers are drawn one period at a time (up to and including the first full attention layer), so that one small program is
    compiled and used for every period. Besides the model, memory holds one period in float32 at most.
    """
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Model(config, nnx.Rngs(0))))
    period = config.layer_types.index(FULL) + 1
    one = replace(config, num_hidden_layers=period, layer_types=config.layer_types[:period])
    draw = jax.jit(lambda key: nnx.state(Model(one, nnx.Rngs(key))))
    weights = {}
    for first in range(0, config.num_hidden_layers, period):
        # The "rbg" generator takes one instruction per tensor, so it compiles faster than the default one.
        drawn = jax.block_until_ready(draw(jax.random.key(seed + first, impl="rbg")))
        for path, variable in nnx.to_flat_state(drawn):
            if path[0] == "layers":
                path = (path[0], int(str(path[1])) + first, *path[2:])
            weights.setdefault(path, variable)
    state = nnx.from_flat_state(weights.items())
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    return nnx.merge(graph, state)
