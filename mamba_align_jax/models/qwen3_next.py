"""Qwen3-Next: Qwen3.5's layers, whose weights are interleaved by key head in the files."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mamba_align_jax.models import qwen3_5
from mamba_align_jax.models.qwen3_5 import Model as Model
from mamba_align_jax.models.weights import Source, mapped, product


@dataclass(frozen=True, kw_only=True)
class Config(qwen3_5.Config):
    """The fields of config.json that shape the model, under their published names."""

    model_type: str = "qwen3_next"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes the same fields as Qwen3.5's `derive`, with this model's type."""
        return super().derive(config) | {"model_type": cls.model_type}


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    mixer, _, leaf = place.partition(".in_proj_")
    if not leaf:
        return qwen3_5.sources(place, config)
    # In in_proj_qkvz each key head has its queries, keys, values and gates side by side. In in_proj_ba it has its betas
    # and decays side by side.
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
