"""Kimi Linear and Ling 3 in NumPy float64, a token at a time, from config.json's fields and the checkpoint's tensors."""

import numpy as np
from layers.oracle_kimi import kimi_delta_attention, multi_head_latent_attention, rms, sigmoid


def below(tensors, prefix):
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def gated_mlp(x, gate, up, down):
    y = x @ gate.T
    return (y * sigmoid(y) * (x @ up.T)) @ down.T


def mixture(x, w, c):
    """Tokens [n, hidden] through the experts that each chooses, and through the shared ones."""
    out = gated_mlp(x, *(w[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")))
    bias = w["gate.e_score_correction_bias"] if "gate.e_score_correction_bias" in w else w["gate.expert_bias"]
    names = ("w1", "w3", "w2") if "experts.0.w1.weight" in w else ("gate_proj", "up_proj", "down_proj")
    groups, chosen_groups, chosen = c["num_expert_group"], c["topk_group"], c["num_experts_per_token"]
    for n, token in enumerate(x):
        score = sigmoid(w["gate.weight"] @ token)
        choice = (score + bias).reshape(groups, -1)
        group_score = np.sort(choice, 1)[:, -2:].sum(1)
        choice[np.argsort(-group_score)[chosen_groups:]] = -np.inf
        experts = np.argsort(-choice.reshape(-1))[:chosen]
        weight = score[experts] / score[experts].sum() if c.get("moe_renormalize", True) else score[experts]
        for expert, share in zip(experts, weight * c["routed_scaling_factor"], strict=True):
            out[n] += share * gated_mlp(token, *(w[f"experts.{expert}.{name}.weight"] for name in names))
    return out


def decode(tensors, c, kinds, tokens):
    """Logits [tokens, vocab]. `c` has Kimi's names of the fields; `kinds` is each layer's."""
    tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    x = tensors["model.embed_tokens.weight"][tokens]
    heads, dim = c["linear_num_heads"], c["linear_head_dim"]
    for n, kind in enumerate(kinds):
        w = below(tensors, f"model.layers.{n}.")
        normed, mixer = rms(x, w["input_layernorm.weight"], c["rms_norm_eps"]), below(w, "self_attn.")
        if kind == "linear_attention":
            state, window = np.zeros((heads, dim, dim)), np.zeros((c["linear_conv_kernel_dim"] - 1, 3 * heads * dim))
            bound = c.get("lower_bound")
            out, _, _ = kimi_delta_attention(normed, mixer, heads, c["rms_norm_eps"], state, window, bound)
        else:
            sizes = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
            history = np.zeros((0, c["kv_lora_rank"] + c["qk_rope_head_dim"]))
            out, _ = multi_head_latent_attention(normed, mixer, *sizes, history, c.get("rope_theta"))
        x = x + out
        normed = rms(x, w["post_attention_layernorm.weight"], c["rms_norm_eps"])
        mlp = below(w, "block_sparse_moe.") | below(w, "mlp.")
        dense = "gate_proj.weight" in mlp
        x = x + (
            gated_mlp(normed, *(mlp[f"{m}_proj.weight"] for m in ("gate", "up", "down")))
            if dense
            else mixture(normed, mlp, c)
        )
    return rms(x, tensors["model.norm.weight"], c["rms_norm_eps"]) @ tensors["lm_head.weight"].T
