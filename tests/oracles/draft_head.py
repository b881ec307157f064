"""The draft head (MTP) in NumPy float64, one token after another."""

import copy

import numpy as np
from oracles.layers import feed_forward, under
from safetensors.numpy import load_file

from mamba_align_jax.models.weights import read_config


class NumpyHead:
    """The head of the model in the folder `path`, over one sequence.

    `keys` and `values` map a position to what was last written there.
    """

    def __init__(self, path):
        self.weights = {name: np.asarray(w, np.float64) for name, w in load_file(path / "model.safetensors").items()}
        self.config, self.keys, self.values = read_config(path), {}, {}
        self.mlp = under(self.weights, "mtp.layers.0.mlp")

    def fork(self):
        """A copy, to try how the sequence may continue."""
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
        """The head's output [hidden] at `position`, which attends to all positions before it.

        Args:
            hidden: the model's last hidden state at the position, or the head's output for the draft before [hidden].
            next_token: the token after the position.
            position: a count from zero.
        """
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
        """Logits [vocab] by the output layer, which the head shares with the model."""
        tied = self.config["tie_word_embeddings"]
        return self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"] @ hidden
