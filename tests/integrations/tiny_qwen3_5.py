"""A tiny random Qwen3.5 as Hugging Face publishes it, with attention heads of 128 dims, which sglang-jax wants."""

from pathlib import Path

import numpy as np
from tiny_model import write_tensors

VOCABULARY, HIDDEN, INNER, HEAD_DIM, HEADS = 256, 64, 96, 128, 2
KEY_HEADS, VALUE_HEADS, STATE_DIM, WIDTH = 2, 4, 16, 4
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
TEXT = dict(
    model_type="qwen3_5_text", vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER,
    num_hidden_layers=len(LAYERS), layer_types=LAYERS, num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HEAD_DIM,
    hidden_act="silu", max_position_embeddings=4096, rms_norm_eps=1e-6, attn_output_gate=True, tie_word_embeddings=False,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25, mrope_section=[6, 5, 5], mrope_interleaved=True
    ),
    linear_conv_kernel_dim=WIDTH, linear_key_head_dim=STATE_DIM, linear_value_head_dim=STATE_DIM,
    linear_num_key_heads=KEY_HEADS, linear_num_value_heads=VALUE_HEADS, mtp_num_hidden_layers=0, dtype="float32",
    eos_token_id=VOCABULARY - 1,
)  # fmt: skip
CONFIG = dict(
    architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", text_config=TEXT, vision_config=None,
    tie_word_embeddings=False, dtype="float32", torch_dtype="float32", eos_token_id=VOCABULARY - 1,
)  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor by its published name."""
    keys, values = KEY_HEADS * STATE_DIM, VALUE_HEADS * STATE_DIM
    linear = dict(
        in_proj_qkv=(2 * keys + values, HIDDEN), in_proj_z=(values, HIDDEN), in_proj_a=(VALUE_HEADS, HIDDEN),
        in_proj_b=(VALUE_HEADS, HIDDEN), conv1d=(2 * keys + values, 1, WIDTH), norm=(STATE_DIM,), out_proj=(HIDDEN, values),
    )  # fmt: skip
    full = dict(
        q_proj=(2 * HEADS * HEAD_DIM, HIDDEN), k_proj=(HEAD_DIM, HIDDEN), v_proj=(HEAD_DIM, HIDDEN),
        o_proj=(HIDDEN, HEADS * HEAD_DIM), q_norm=(HEAD_DIM,), k_norm=(HEAD_DIM,),
    )  # fmt: skip
    top = "model.language_model"
    found = {f"{top}.embed_tokens.weight": (VOCABULARY, HIDDEN), f"{top}.norm.weight": (HIDDEN,)}
    found["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for n, kind in enumerate(LAYERS):
        mixer, parts = ("linear_attn", linear) if kind == "linear_attention" else ("self_attn", full)
        parts = {f"{mixer}.{name}.weight": shape for name, shape in parts.items()}
        if kind == "linear_attention":
            parts |= {f"{mixer}.A_log": (VALUE_HEADS,), f"{mixer}.dt_bias": (VALUE_HEADS,)}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            parts[f"{norm}.weight"] = (HIDDEN,)
        for product in ("gate_proj", "up_proj", "down_proj"):
            parts[f"mlp.{product}.weight"] = (HIDDEN, INNER) if product == "down_proj" else (INNER, HIDDEN)
        found |= {f"{top}.layers.{n}.{name}": shape for name, shape in parts.items()}
    return found


def write(path: Path) -> Path:
    """Writes config.json and float32 weights, the same ones every time."""
    rng = np.random.default_rng(3)

    def draw(name, shape):
        noise = rng.normal(size=shape)
        if name.endswith("linear_attn.norm.weight"):
            return 1 + 0.2 * noise
        if name.endswith("norm.weight"):  # The other norms multiply by 1 + weight.
            return 0.2 * noise
        if name.endswith("A_log"):
            return rng.uniform(-2.5, 0.5, shape)
        if name.endswith("dt_bias"):
            return noise - 2
        return noise if "embed_tokens" in name else 1.2 * noise * shape[-1] ** -0.5

    return write_tensors(path, CONFIG, shapes(), draw)
