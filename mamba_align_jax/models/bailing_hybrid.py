"""Ling 3: Kimi's layers with a bounded decay and gates of one product each; latent attention is rotated and gated."""

from dataclasses import dataclass
from typing import Any, ClassVar

from mamba_align_jax.models import kimi_linear
from mamba_align_jax.models.config import require, rotation
from mamba_align_jax.models.kimi_linear import FULL, LINEAR, renamed, transformers_sources
from mamba_align_jax.models.kimi_linear import Model as Model
from mamba_align_jax.models.weights import Source


@dataclass(frozen=True, kw_only=True)
class Config(kimi_linear.Config):
    """The fields of config.json that shape the model, as Kimi's."""

    num_expert_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    model_type: str = "bailing_hybrid"

    low_rank_gates: ClassVar[bool] = False
    gated_attention: ClassVar[bool] = True

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Layer kinds, head sizes, rotation and the decay's bound."""
        layers, every = config.get("num_hidden_layers", 0), config.get("layer_group_size", 6)
        kinds = config.get("layer_types") or [LINEAR if (n + 1) % every else FULL for n in range(layers)]
        require(config, rope_interleave=(True,))
        safe = config.get("kda_safe_gate", True)
        return cls.shared(config | {"layer_types": kinds}, first_dense=2) | {
            # transformers saves the rotated dims as head_dim, and this under a name of its own.
            "linear_head_dim": config.get("linear_head_dim") or config.get("head_dim"),
            "linear_num_heads": config.get("linear_num_heads") or config.get("num_attention_heads"),
            **rotation(config, rope_theta=6e6),
            "kda_lower_bound": config.get("kda_lower_bound", -5.0) if safe else None,
        }


_RENAMES = (
    lambda name: name.replace("model.embed_tokens", "model.word_embeddings"),
    lambda name: name.replace(".self_attn.", ".attention."),
    lambda name: name.replace(".o_proj.", ".dense."),
    lambda name: name.replace("gate.e_score_correction_bias", "gate.expert_bias"),
)


def ignored(config: Config) -> tuple[str, ...]:
    """The draft head's layer, behind the others."""
    return (f"model.layers.{config.num_hidden_layers}.",)


def sources(place: str, config: Config) -> list[Source]:
    """Where a checkpoint holds the parameter at `place` in the module tree."""
    return renamed(transformers_sources(place, config), _RENAMES)
