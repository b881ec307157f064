"""A tiny random Kimi Linear as Hugging Face publishes it, with attention heads of 128 dims, which sglang-jax wants."""

from pathlib import Path

import numpy as np
from tiny_model import write_tensors

VOCABULARY, HIDDEN, INNER, HEADS, WIDTH = 256, 64, 96, 2, 4
# sglang-jax's Kimi delta attention takes the size of its values from attention's.
DIM, LATENT, NOPE, ROPE = 16, 24, 96, 32
EXPERTS, EXPERT_INNER, SHARED = 6, 32, 1
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
CONFIG = dict(
    architectures=["KimiLinearForCausalLM"], model_type="kimi_linear", vocab_size=VOCABULARY, hidden_size=HIDDEN,
    intermediate_size=INNER, num_hidden_layers=len(LAYERS), num_attention_heads=HEADS, num_key_value_heads=HEADS,
    hidden_act="silu", model_max_length=4096, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False,
    linear_attn_config=dict(
        head_dim=DIM, num_heads=HEADS, short_conv_kernel_size=WIDTH,
        kda_layers=[n + 1 for n, kind in enumerate(LAYERS) if kind == "linear_attention"],
        full_attn_layers=[n + 1 for n, kind in enumerate(LAYERS) if kind == "full_attention"],
    ),
    q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=DIM, mla_use_nope=True,
    rope_theta=1e4, num_nextn_predict_layers=0, num_experts=EXPERTS, num_experts_per_token=2, num_shared_experts=SHARED,
    moe_intermediate_size=EXPERT_INNER, num_expert_group=1, topk_group=1, use_grouped_topk=True, moe_renormalize=True,
    moe_layer_freq=1, moe_router_activation_func="sigmoid", routed_scaling_factor=2.446, first_k_dense_replace=1,
    dtype="float32", torch_dtype="float32", eos_token_id=VOCABULARY - 1,
)  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor by its published name."""
    inner = HEADS * DIM
    linear = {f"{part}_proj": (inner, HIDDEN) for part in "qkv"}
    linear |= {f"{part}_conv1d": (inner, 1, WIDTH) for part in "qkv"}
    linear |= {f"{gate}_a_proj": (DIM, HIDDEN) for gate in "fg"} | {f"{gate}_b_proj": (inner, DIM) for gate in "fg"}
    linear |= dict(b_proj=(HEADS, HIDDEN), o_norm=(DIM,), o_proj=(HIDDEN, inner))
    full = dict(
        q_proj=(HEADS * (NOPE + ROPE), HIDDEN), kv_a_proj_with_mqa=(LATENT + ROPE, HIDDEN), kv_a_layernorm=(LATENT,),
        kv_b_proj=(HEADS * (NOPE + DIM), LATENT), o_proj=(HIDDEN, HEADS * DIM),
    )  # fmt: skip
    mlp = lambda size: dict(gate_proj=(size, HIDDEN), up_proj=(size, HIDDEN), down_proj=(HIDDEN, size))
    named = lambda place, parts: {f"{place}.{name}.weight": shape for name, shape in parts.items()}
    found = {f"{name}.weight": (VOCABULARY, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    found["model.norm.weight"] = (HIDDEN,)
    for n, kind in enumerate(LAYERS):
        layer = f"model.layers.{n}"
        found |= named(layer, dict(input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,)))
        found |= named(f"{layer}.self_attn", linear if kind == "linear_attention" else full)
        if kind == "linear_attention":
            found |= {f"{layer}.self_attn.A_log": (1, 1, HEADS, 1), f"{layer}.self_attn.dt_bias": (inner,)}
        if n < CONFIG["first_k_dense_replace"]:
            found |= named(f"{layer}.mlp", mlp(INNER))
            continue
        sparse = f"{layer}.block_sparse_moe"
        found |= {f"{sparse}.gate.weight": (EXPERTS, HIDDEN), f"{sparse}.gate.e_score_correction_bias": (EXPERTS,)}
        found |= named(f"{sparse}.shared_experts", mlp(SHARED * EXPERT_INNER))
        for expert in range(EXPERTS):
            parts = zip(("w1", "w3", "w2"), mlp(EXPERT_INNER).values(), strict=True)
            found |= named(f"{sparse}.experts.{expert}", dict(parts))
    return found


def write(path: Path) -> Path:
    """Writes config.json and float32 weights, the same ones every time."""
    rng = np.random.default_rng(4)

    def draw(name, shape):
        noise = rng.normal(size=shape)
        if "norm" in name:
            return 1 + 0.2 * noise
        if name.endswith("A_log"):
            return rng.uniform(-2.5, 0.5, shape)
        if name.endswith("dt_bias"):
            return noise - 2
        if name.endswith("bias"):
            return 0.1 * noise
        return noise if "embed_tokens" in name else 1.2 * noise * shape[-1] ** -0.5

    return write_tensors(path, CONFIG, shapes(), draw)
