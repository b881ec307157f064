"""Ling 3: Kimi's layers with a bounded decay and gates of a single product, and rotated, gated latent attention.

Ling 2.5 has the same `model_type`, and lightning attention instead of Kimi's layers. It is refused.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from mamba_align_jax.models import kimi_linear
from mamba_align_jax.models.config import require, rotation
from mamba_align_jax.models.kimi_linear import FULL, LINEAR, renamed, transformers_sources
from mamba_align_jax.models.kimi_linear import Model as Model
from mamba_align_jax.models.sources import Source

# The width of the convolution of Kimi delta attention: in published configurations, and in those of transformers.
_CONV_WIDTHS = ("short_conv_kernel_size", "linear_conv_kernel_dim")


@dataclass(frozen=True, kw_only=True)
class Config(kimi_linear.Config):
    """The fields of config.json that shape the model, under the names of `kimi_linear.Config`."""

    rms_norm_eps: float = 1e-6
    num_expert_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    model_type: str = "bailing_hybrid"

    low_rank_gates: ClassVar[bool] = False
    gated_attention: ClassVar[bool] = True

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds, head sizes, the rotation and the decay's bound: see `ModelConfig.derive`."""
        cls._refuse_lightning(config)
        layers, every = config.get("num_hidden_layers", 0), config.get("layer_group_size", 6)
        kinds = config.get("layer_types") or [LINEAR if (n + 1) % every else FULL for n in range(layers)]
        require(config, rope_interleave=(True,), no_kda_lora=(True,), use_kda=(True,), use_kda_lora=(False,))
        require(config, gated_attention_proj_granularity_type=("head_wise",), use_bias=(False,), use_qkv_bias=(False,))
        is_safe = config.get("kda_safe_gate") is not False
        return cls.shared(config | {"layer_types": kinds}, first_dense=2) | {
            # Published files call the recurrent heads' size head_dim. transformers saves it as linear_head_dim, and
            # saves the number of rotated dims as head_dim.
            "linear_head_dim": config.get("linear_head_dim") or config.get("head_dim"),
            "linear_num_heads": config.get("linear_num_heads") or config.get("num_attention_heads"),
            **rotation(config, scaled=False, rope_theta=6e6),
            "kda_lower_bound": config.get("kda_lower_bound", -5.0) if is_safe else None,
        }

    @classmethod
    def _refuse_lightning(cls, config: dict[str, Any]) -> None:
        """Refuses models with lightning attention, which has no convolution: only its width tells the models apart."""
        if not any(map(config.get, _CONV_WIDTHS)):
            raise ValueError(
                f"config.json: {cls.model_type!r} without {_CONV_WIDTHS[0]}, as in Ling 2.5, has lightning attention, "
                "which can't be loaded; Kimi delta attention must have it"
            )


_RENAMES = (
    lambda name: name.replace("model.embed_tokens", "model.word_embeddings"),
    lambda name: name.replace(".self_attn.", ".attention."),
    lambda name: name.replace(".o_proj.", ".dense."),
    lambda name: name.replace("gate.e_score_correction_bias", "gate.expert_bias"),
)


def ignored(config: Config) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not loaded: the draft head's layer, which follows the model's own."""
    return (f"model.layers.{config.num_hidden_layers}.",)


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    return renamed(transformers_sources(place, config), _RENAMES)
