"""Qwen3.5 text, dense: gated-delta-net layers with gated full attention at every fourth, and its draft head."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import Precision

from mamba_align_jax.kv import KVPages
from mamba_align_jax.layers.attention import GatedAttention
from mamba_align_jax.layers.gated_delta_net import GatedDeltaNet
from mamba_align_jax.layers.linear import linear
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.metadata.attention import StepInputs
from mamba_align_jax.models.mtp import MTPHead
from mamba_align_jax.pool import StatePool
from mamba_align_jax.spec import GroupSpec
from pallas_kernels import Implementation

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of config.json that shape the model, by their published names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    tie_word_embeddings: bool = False
    eos_token_id: int | None = None
    mtp_num_hidden_layers: int = 0
    dtype: str = "bfloat16"
    model_type: str = "qwen3_5_text"

    @classmethod
    def from_dict(cls, config: dict[str, Any], dtype: str | None = None) -> "Config":
        """Reads config.json's fields; `dtype` replaces the checkpoint's.

        Raises:
            ValueError: names the field that is missing or asks for what is not supported.
        """
        layers = config.get("num_hidden_layers", 0)
        every = config.get("full_attention_interval", 4)
        default = [FULL if (n + 1) % every == 0 else LINEAR for n in range(layers)]
        rope = config.get("rope_parameters") or config
        fields = config | {
            "layer_types": tuple(config.get("layer_types") or default),
            "rope_theta": rope.get("rope_theta", cls.rope_theta),
            "partial_rotary_factor": rope.get("partial_rotary_factor", cls.partial_rotary_factor),
            "dtype": dtype or config.get("dtype") or config.get("torch_dtype") or cls.dtype,
            "model_type": cls.model_type,
        }
        if isinstance(fields.get("eos_token_id"), list):
            fields["eos_token_id"] = fields["eos_token_id"][0]
        known = cls.__dataclass_fields__
        missing = [name for name in known if name not in fields and not hasattr(cls, name)]
        if missing:
            raise ValueError(f"config.json must have {missing[0]!r}")
        result = cls(**{name: fields[name] for name in known if fields.get(name) is not None})
        unsupported = {
            "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
            "attention_bias": (config.get("attention_bias", False), (False,)),
            "rope_type": (rope.get("rope_type", "default"), ("default",)),
            "dtype": (result.dtype, ("float32", "bfloat16", "float16")),
            "num_experts": (config.get("num_experts") or 0, (0,)),
            "mtp_num_hidden_layers": (result.mtp_num_hidden_layers, (0, 1)),
            "mtp_use_dedicated_embeddings": (config.get("mtp_use_dedicated_embeddings", False), (False,)),
        }
        for name, (got, supported) in unsupported.items():
            if got not in supported:
                raise ValueError(f"config.json: {name} must be one of {supported}, got {got!r}")
        if len(result.layer_types) != layers or not set(result.layer_types) <= {LINEAR, FULL}:
            raise ValueError(f"config.json: layer_types must name {layers} layers, each {LINEAR!r} or {FULL!r}")
        if LINEAR not in result.layer_types:
            raise ValueError(
                f"config.json: layer_types must have a {LINEAR!r} layer: there is no state to keep otherwise"
            )
        return result

    def to_dict(self) -> dict[str, Any]:
        """As config.json."""
        fields = asdict(self)
        rope = {name: fields.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            **fields,
            "layer_types": list(self.layer_types),
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", **rope},
        }


class Layer(nnx.Module):
    """Mixer and feed-forward, each on a normed copy of the residual stream."""

    def __init__(self, config: Config, kind: str, rngs: nnx.Rngs) -> None:
        c, dtype = config, config.dtype
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, dtype, rngs)
        if kind == LINEAR:
            self.linear_attn = GatedDeltaNet(
                c.hidden_size, c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim,
                c.linear_value_head_dim, c.linear_conv_kernel_dim, c.rms_norm_eps, dtype, rngs,
            )  # fmt: skip
        else:
            self.self_attn = GatedAttention(
                c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
                int(c.head_dim * c.partial_rotary_factor), c.rope_theta, c.rms_norm_eps, dtype, rngs,
            )  # fmt: skip


class Model(nnx.Module):
    """The causal language model over pools: every call is one step of a batch."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=config.dtype, param_dtype=config.dtype, rngs=rngs
        )
        self.layers = nnx.List([Layer(config, kind, rngs) for kind in config.layer_types])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else linear(config.hidden_size, config.vocab_size, config.dtype, rngs)
        has_head = config.mtp_num_hidden_layers > 0
        self.mtp = MTPHead(Layer(config, FULL, rngs), config, rngs) if has_head else None

    @property
    def dtype(self) -> str:
        """Of weights, activations, windows, keys and values."""
        return self.config.dtype

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values, the draft head's apart: where a model has one, it comes behind them."""
        return self.config.layer_types.count(FULL)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Dims of a key or value."""
        return self.config.head_dim

    def state_groups(self, state_dtype: str = "float32") -> tuple[GroupSpec, ...]:
        """What `AlignConfig` needs: one group, as all gated-delta-net layers are alike."""
        linear_layers = [layer for layer in self.layers if hasattr(layer, "linear_attn")]
        states = linear_layers[0].linear_attn.states(self.dtype, state_dtype)
        return (GroupSpec("gdn", len(linear_layers), states),)

    def __call__(
        self,
        tokens: jax.Array,
        step: StepInputs,
        pool: StatePool,
        kv: KVPages,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[jax.Array, StatePool, KVPages]:
        """Runs packed tokens [tokens] through all layers.

        Args:
            tokens: int32, decode and verify rows first.
            step: The step's inputs.
            pool: States. Donate it.
            kv: Keys and values. Donate them.
            implementation: Of the ops.

        Returns:
            Hidden states [tokens, hidden] for `logits`, and the pools.
        """
        x = self.embed_tokens(tokens)
        conv, recurrent = pool.states[0]
        keys, values = kv.keys, kv.values
        linear_layer = full_layer = 0
        for layer in self.layers:
            normed = layer.input_layernorm(x)
            if hasattr(layer, "linear_attn"):
                out, conv, recurrent = layer.linear_attn(
                    normed, step.split, step.chunks, conv, recurrent, jnp.int32(linear_layer),
                    num_decode_tokens=step.num_decode_tokens, implementation=implementation,
                )  # fmt: skip
                linear_layer += 1
            else:
                out, keys, values = layer.self_attn(normed, step, keys, values, jnp.int32(full_layer))
                full_layer += 1
            x = x + out
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x), pool.with_group(0, (conv, recurrent)), KVPages(keys=keys, values=values)

    def draft(
        self, hidden: jax.Array, next_tokens: jax.Array, step: StepInputs, kv: KVPages
    ) -> tuple[jax.Array, KVPages]:
        """Runs the draft head over a step's tokens: see `MTPHead`.

        Args:
            hidden: Of each token, as `__call__` gives it, or as this gave it for the token before. [tokens, hidden]
            next_tokens: The token behind each. int32 [tokens].
            step: The step's inputs.
            kv: Keys and values, with one layer more than `num_attention_layers`. Donate them.

        Returns:
            Hidden states [tokens, hidden], whose `logits` foretell the token behind the next one, and the pages.

        Raises:
            ValueError: the model has no head.
        """
        if self.mtp is None:
            raise ValueError("draft: model must have an MTP head, got a checkpoint without mtp.* tensors")
        layer = jnp.int32(self.num_attention_layers)
        out, keys, values = self.mtp(self.embed_tokens(next_tokens), hidden, step, kv.keys, kv.values, layer)
        return out, KVPages(keys=keys, values=values)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [n, vocab] of hidden states [n, hidden]: rounded to bfloat16, distinct logits would be ties."""
        weight = self.embed_tokens.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]
        exact = jnp.dtype(self.dtype) == jnp.float32
        precision = Precision.HIGHEST if exact else Precision.DEFAULT
        return jnp.matmul(hidden, weight, precision=precision, preferred_element_type=jnp.float32)


_RENAMED = {"conv_weight": "conv1d.weight", "embedding": "weight", "kernel": "weight"}


def tensor_name(place: tuple[Any, ...]) -> str:
    """The checkpoint's name of the parameter at `place` in the module tree."""
    *path, leaf = (str(part) for part in place)
    prefix = [] if path[0] in ("lm_head", "mtp") else ["model"]
    return ".".join([*prefix, *path, _RENAMED.get(leaf, leaf)])


def _is_product(name: str) -> bool:
    products = ("_proj.weight", "_qkv.weight", "_z.weight", "_a.weight", "_b.weight", "lm_head.weight", "mtp.fc.weight")
    return name.endswith(products)


def from_checkpoint(name: str, array: np.ndarray) -> np.ndarray:
    """A checkpoint's tensor as the module holds it: products [in, out], taps [width, channels]."""
    if name.endswith("conv1d.weight"):
        return array.reshape(array.shape[0], -1).T
    return array.T if _is_product(name) else array


def to_checkpoint(name: str, array: np.ndarray) -> np.ndarray:
    """The inverse of `from_checkpoint`."""
    if name.endswith("conv1d.weight"):
        return array.T[:, None, :]
    return array.T if _is_product(name) else array
