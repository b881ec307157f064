"""A checkpoint with a random draft head, and the head as the formulas have it: NumPy, float64, one token after another."""

import copy
import itertools
import json
import shutil

import numpy as np
from models.delta_nets import feed_forward
from models.float64 import under
from safetensors.numpy import load_file, save_file

from mamba_align_jax.models.weights import read_config


def head_tensors(config):
    """Random `mtp.*` tensors for a configuration, by their published names; its feed-forward is as sparse as the model's."""
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
    """What a head has that knows by heart what follows each of `tokens`, every fourth but wrongly; the rest is faint."""
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
    """The checkpoint in `source` with a random head, in `path`; or with one that has learnt a lesson: see `taught`."""
    shutil.copytree(source, path, dirs_exist_ok=True)
    config = read_config(source) | {"mtp_num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors") | head_tensors(config)
    if lesson is not None:
        tensors |= taught(tensors, lesson)
    save_file(tensors, path / "model.safetensors")
    return path


def write_small_with_head(source, path, damping=0.15):
    """The last two layers of `source`, damped so that the next token mostly follows from the last, and a head likewise."""
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


class NumpyHead:
    """One sequence over a checkpoint's own tensors. `keys` and `values` hold what the last pass over a place wrote."""

    def __init__(self, path):
        self.weights = {name: np.asarray(w, np.float64) for name, w in load_file(path / "model.safetensors").items()}
        self.config, self.keys, self.values = read_config(path), {}, {}
        self.mlp = under(self.weights, "mtp.layers.0.mlp")

    def fork(self):
        """Another one, for trying out how the sequence may go on."""
        other = copy.copy(self)
        other.keys, other.values = dict(self.keys), dict(self.values)
        return other

    def _norm(self, name, x):
        scale = 1 + self.weights[f"mtp.{name}.weight"]
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.config["rms_norm_eps"]) * scale

    def _product(self, name, x):
        return self.weights[f"mtp.{name}.weight"] @ x

    def _rotate(self, x, position):
        rope = self.config["rope_parameters"]
        half = int(self.config["head_dim"] * rope["partial_rotary_factor"]) // 2
        angle = position * rope["rope_theta"] ** (-np.arange(half) / half)
        first, second, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
        sin, cos = np.sin(angle), np.cos(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=1)

    def step(self, hidden, next_token, position):
        """The head's output [hidden] at a place, over all places before it."""
        c, sigmoid = self.config, lambda x: 1 / (1 + np.exp(-x))
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        embedded = self.weights["model.embed_tokens.weight"][next_token]
        both = [self._norm("pre_fc_norm_embedding", embedded), self._norm("pre_fc_norm_hidden", hidden)]
        x = self._product("fc", np.concatenate(both))
        normed, attn = self._norm("layers.0.input_layernorm", x), "layers.0.self_attn."
        project = lambda part, heads: self._product(f"{attn}{part}_proj", normed).reshape(heads, -1)
        q, gate = np.split(project("q", heads), 2, axis=1)
        q = self._rotate(self._norm(attn + "q_norm", q), position)
        k = self._norm(attn + "k_norm", project("k", kv_heads))
        self.keys[position], self.values[position] = self._rotate(k, position), project("v", kv_heads)
        keys, values = (np.stack([held[p] for p in range(position + 1)]) for held in (self.keys, self.values))
        out = []
        for head in range(heads):
            mine = head * kv_heads // heads
            scores = keys[:, mine] @ q[head] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out.append(weights / weights.sum() @ values[:, mine])
        x = x + self._product(attn + "o_proj", np.concatenate(out) * sigmoid(gate.reshape(-1)))
        normed = self._norm("layers.0.post_attention_layernorm", x)
        x = x + feed_forward(self.config, self.mlp, normed[None])[0]
        return self._norm("norm", x)

    def logits(self, hidden):
        """Of the shared output layer."""
        tied = self.config["tie_word_embeddings"]
        return self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"] @ hidden
