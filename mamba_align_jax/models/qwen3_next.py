"""Qwen3-Next: Qwen3.5's layers, whose weights are interleaved by key head in the files."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mamba_align_jax.models import qwen3_5
from mamba_align_jax.models.qwen3_5 import Model as Model
from mamba_align_jax.models.sources import Source, joined, ordered, tensor


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
    values = ratio * config.linear_value_head_dim

    def of_each_part(*sizes: int) -> np.ndarray:
        heads = np.arange(config.linear_num_key_heads * sum(sizes)).reshape(-1, sum(sizes))
        return np.concatenate([part.reshape(-1) for part in np.split(heads, np.cumsum(sizes)[:-1], axis=1)])

    qkvz = ordered(tensor(f"model.{mixer}.in_proj_qkvz.weight"), of_each_part(keys, keys, values, values))
    ba = ordered(tensor(f"model.{mixer}.in_proj_ba.weight"), of_each_part(ratio, ratio))
    return [joined([qkvz, ba], axis=0)]
