"""Makes the tiny random models of some families here, with what transformers computes for them.

It needs torch and transformers 5.23.0, which nothing else here needs: `python tests/data/make_references.py [NAME ...]`.
A reference is computed in float64 from float32 weights.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
SHARED = dict(hidden_size=64, vocab_size=256, dtype="float32", eos_token_id=2, max_position_embeddings=512)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=12)
LFM2 = dict(
    **ATTENTION, intermediate_size=96, num_hidden_layers=5, conv_L_cache=3, norm_eps=1e-5,
    layer_types=["conv", "full_attention", "conv", "conv", "full_attention"],
)  # fmt: skip
# transformers clamps step sizes from below by time_step_min, which no other implementation does.
ZAMBA2 = dict(
    num_attention_heads=4, num_hidden_layers=6, intermediate_size=96, mamba_d_state=12, mamba_ngroups=2, n_mamba_heads=8,
    layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"], adapter_rank=6, time_step_min=1e-12,
)  # fmt: skip
FALCON = dict(
    **ATTENTION, **MAMBA2, num_hidden_layers=2, intermediate_size=96, mamba_d_ssm=128, head_dim=16, key_multiplier=0.7,
    ssm_multipliers=[0.9, 0.8, 1.1, 0.7, 1.2], mlp_multipliers=[0.9, 1.1], lm_head_multiplier=0.8,
)  # fmt: skip
MODELS = {
    "bamba": dict(**ATTENTION, **MAMBA2, intermediate_size=96, num_hidden_layers=4, attn_layer_indices=[2]),
    "lfm2": dict(**LFM2, block_multiple_of=8, block_ffn_dim_multiplier=1.3, tie_word_embeddings=True),
    "lfm2_moe": dict(
        **LFM2, num_dense_layers=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
        routed_scaling_factor=1.3, tie_word_embeddings=True,
    ),
    "zamba2": dict(**ZAMBA2, num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True),
    "falcon_h1": FALCON,
}  # fmt: skip
# Kinds of `rope_scaling`, whose logits the model falcon_h1 has, too.
SCALINGS = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=3.0),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "longrope": dict(
        rope_type="longrope", short_factor=[1.0, 1.1, 1.2, 1.5, 1.9, 2.0, 2.2, 2.5], original_max_position_embeddings=256,
        long_factor=[1.0, 1.3, 1.7, 2.0, 3.0, 4.0, 5.0, 6.0],
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
    "yarn with factors": dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=16, beta_slow=2, mscale=0.7,
        mscale_all_dim=0.4,
    ),
    "yarn with attention_factor": dict(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=256, attention_factor=1.3, truncate=False
    ),
}  # fmt: skip


def draw(generator, name, parameter, scale):
    """Random weights: states neither vanish nor blow up, and no norm is all ones. Embeddings have a scale of their own."""
    value = torch.randn(parameter.shape, generator=generator)
    if "norm" in name or name.endswith(".D"):
        return 1 + 0.3 * value
    if name.endswith("A_log"):
        return torch.rand(parameter.shape, generator=generator) * 3 - 2.5
    if name.endswith("dt_bias"):
        return value - 2
    if name.endswith("bias"):
        return 0.3 * value
    if "embed_tokens" in name:
        return value * scale
    # Adapters add to what they adapt.
    return value * (0.4 if "adapter" in name else 1.2 if "shared" not in name else 0.8) * parameter.shape[-1] ** -0.5


def make_model(name, **change):
    fields = SHARED | MODELS[name] | change
    config = AutoConfig.for_model(fields.pop("model_type", name), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        # Buffers that are not saved follow from the configuration.
        for place, parameter in model.state_dict().items():
            parameter.copy_(draw(generator, place, parameter, 0.15 if config.tie_word_embeddings else 1.0))
    return model


@torch.no_grad()
def logits_of(model, tokens):
    return model.double()(torch.tensor(tokens)[None], use_cache=False, logits_to_keep=0).logits[0].numpy()


@torch.no_grad()
def states_of(model, tokens):
    """The states and the keys and values after the tokens, by layer."""
    cache = model.double()(torch.tensor(tokens)[None], use_cache=True).past_key_values
    found = {}
    for number, layer in enumerate(cache.layers):
        if getattr(layer, "conv_states", None) and layer.conv_states.get(0) is not None:
            found[f"L{number}.conv0"] = layer.conv_states[0]
        if getattr(layer, "recurrent_states", None) and layer.recurrent_states.get(0) is not None:
            found[f"L{number}.rec0"] = layer.recurrent_states[0]
        if getattr(layer, "keys", None) is not None:
            found |= {f"L{number}.k": layer.keys, f"L{number}.v": layer.values}
    return {f"prompt_state/{place}": value.float().numpy() for place, value in found.items()}


def make_reference(name):
    model, rng = make_model(name), np.random.default_rng(7)
    model.save_pretrained(HERE / name)
    prompt, long = rng.integers(3, 256, 37), rng.integers(3, 256, 150)
    tokens = [*prompt]
    while len(tokens) < 69:
        tokens.append(logits_of(model, tokens)[-1].argmax())
    arrays = {
        "prompt": prompt[None],
        "tokens": np.array(tokens)[None],
        "logits": logits_of(model, tokens).astype(np.float32),
        "long_tokens": long[None],
        "long_last_logits": logits_of(model, long)[-16:].astype(np.float32),
        **states_of(model, prompt),
    }
    if name == "falcon_h1":
        for kind, scaling in SCALINGS.items():
            scaled = make_model(name, rope_parameters=scaling | {"rope_theta": 1e4})
            arrays[f"logits/{kind}"] = logits_of(scaled, tokens).astype(np.float32)
    np.savez_compressed(HERE / name / "reference.npz", **arrays)
    best = np.sort(arrays["logits"][36:-1])[:, -2:]
    print(name, sorted(arrays), "std", arrays["logits"].std(), "smallest lead", (best[:, 1] - best[:, 0]).min())


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        make_reference(chosen)
