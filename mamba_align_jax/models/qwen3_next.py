"""Qwen3-Next: Qwen3.5's layers from weights that are interleaved by key head."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mamba_align_jax.models import qwen3_5
from mamba_align_jax.models.qwen3_5 import Model as Model
from mamba_align_jax.models.weights import Source, mapped, product


@dataclass(frozen=True, kw_only=True)
class Config(qwen3_5.Config):
    """The fields of config.json that shape the model, by their published names."""

    model_type: str = "qwen3_next"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """As Qwen3.5's."""
        return super().derive(config) | {"model_type": cls.model_type}


def sources(place: str, config: Config) -> list[Source]:
    """Where a checkpoint holds the parameter at `place` in the module tree."""
    mixer, _, leaf = place.partition(".in_proj_")
    if not leaf:
        return qwen3_5.sources(place, config)
    # A key head's queries, keys, values and gates follow each other; so do its betas and decays.
    keys, ratio = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
    part = leaf.removesuffix(".kernel")
    if part in ("qkv", "z"):
        sizes = {"q": keys, "k": keys, "v": ratio * config.linear_value_head_dim}
        sizes["z"], name = sizes["v"], "in_proj_qkvz"
    else:
        sizes, name = {"b": ratio, "a": ratio}, "in_proj_ba"
    ends = dict(zip(sizes, np.cumsum(list(sizes.values())), strict=True))

    def take(weight: np.ndarray) -> np.ndarray:
        heads = weight.reshape(weight.shape[0], config.linear_num_key_heads, -1)
        cut = [heads[:, :, ends[p] - sizes[p] : ends[p]].reshape(weight.shape[0], -1) for p in part]
        return np.concatenate(cut, axis=1)

    return [mapped(product(f"model.{mixer}.{name}.weight"), take)]
