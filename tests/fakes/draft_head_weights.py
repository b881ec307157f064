"""Weights of models with a draft head (MTP): random ones, or a head that has learnt a sequence."""

import itertools
import json
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

from mamba_align_jax.models.weights import read_config


def head_tensors(config):
    """Random `mtp.*` tensors for a configuration, by their published names. The head has experts if the model has."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    gated = lambda at, size: {
        f"{at}.gate_proj": (size, hidden), f"{at}.up_proj": (size, hidden), f"{at}.down_proj": (hidden, size)
    }  # fmt: skip
    mlp, experts = "layers.0.mlp", config.get("num_experts", 0)
    shapes = {
        "fc": (hidden, 2 * hidden), "norm": (hidden,), "pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (hidden,),
        "layers.0.input_layernorm": (hidden,), "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.self_attn.q_proj": (2 * heads, hidden), "layers.0.self_attn.k_proj": (kv_heads, hidden),
        "layers.0.self_attn.v_proj": (kv_heads, hidden), "layers.0.self_attn.o_proj": (hidden, heads),
        "layers.0.self_attn.q_norm": (dim,), "layers.0.self_attn.k_norm": (dim,),
    }  # fmt: skip
    if experts:
        shapes |= {f"{mlp}.gate": (experts, hidden), f"{mlp}.shared_expert_gate": (1, hidden)}
        shapes |= gated(f"{mlp}.shared_expert", config["shared_expert_intermediate_size"])
        for expert in range(experts):
            shapes |= gated(f"{mlp}.experts.{expert}", config["moe_intermediate_size"])
    else:
        shapes |= gated(mlp, config["intermediate_size"])
    random = np.random.default_rng(0)
    scale = lambda shape: 0.3 if len(shape) == 1 else shape[1] ** -0.5
    return {
        f"mtp.{name}.weight": random.normal(0, scale(shape), shape).astype(np.float32) for name, shape in shapes.items()
    }


def taught(tensors, tokens, damping=0.05):
    """Tensors of a head that has learnt what follows each of `tokens`, wrongly for every fourth. The rest is damped."""
    embedding, output, fc = (tensors[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head", "mtp.fc"))
    hidden = len(fc)
    after = {
        token: (following + (n % 4 == 0)) % len(output)
        for n, (token, following) in enumerate(itertools.pairwise(tokens))
    }
    unit = lambda x: x / np.sqrt(np.mean(x * x, axis=1, keepdims=True))
    learnt = np.linalg.lstsq(unit(embedding[list(after)]), unit(output[list(after.values())]))[0].T
    faint = [name for name in tensors if name.startswith("mtp.") and ("o_proj" in name or "down_proj" in name)]
    return {
        **{name: damping * tensors[name] for name in faint},
        **{f"mtp.{name}.weight": np.zeros(hidden, np.float32) for name in ("pre_fc_norm_embedding", "norm")},
        "mtp.fc.weight": np.concatenate([learnt, damping * fc[:, hidden:]], axis=1, dtype=np.float32),
    }


def write_with_head(source, path, lesson=None):
    """Writes the model in `source` to `path` with a random head, or with one that `lesson` has taught (see `taught`)."""
    shutil.copytree(source, path, dirs_exist_ok=True)
    config = read_config(source) | {"mtp_num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors") | head_tensors(config)
    if lesson is not None:
        tensors |= taught(tensors, lesson)
    save_file(tensors, path / "model.safetensors")
    return path


def write_small_with_head(source, path, damping=0.15):
    """Writes the last two layers of the model in `source` and a head, damped: a token mostly follows from the last."""
    path.mkdir(exist_ok=True)
    config, tensors = read_config(source), load_file(source / "model.safetensors")
    first = config["num_hidden_layers"] - 2
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][first:], "mtp_num_hidden_layers": 1}
    kept = {}
    for name, array in (tensors | head_tensors(config)).items():
        if name.startswith("model.layers."):
            number = int(name.split(".")[2]) - first
            if number < 0:
                continue
            name = ".".join(["model", "layers", str(number), *name.split(".")[3:]])
        damped = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
        kept[name] = array * np.float32(damping) if damped else array
    hidden = config["hidden_size"]
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        kept[f"mtp.{norm}.weight"] = np.zeros(hidden, np.float32)
    kept["mtp.norm.weight"] = kept["model.norm.weight"]
    beside = damping * kept["mtp.fc.weight"][:, hidden:]
    kept["mtp.fc.weight"] = np.concatenate([np.eye(hidden), beside], axis=1, dtype=np.float32)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in kept.items()}, path / "model.safetensors")
    return path
