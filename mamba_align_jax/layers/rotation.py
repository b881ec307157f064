"""The rotation of queries and keys by position, and the ways to stretch it over longer sequences than those of training.

Sources: Su et al., "RoFormer" (2021); Chen et al., "Extending Context Window of Large Language Models via Positional
Interpolation" (2023) for "linear"; Peng et al., "YaRN" (2023); Ding et al., "LongRoPE" (2024); "llama3" is that of
Llama 3.1. The formulas and their names are those of transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The kinds of rotation, by the name that configurations have for them in `rope_type`. "dynamic" is stretched only where
# sequences are longer than the model's limit, which no sequence here is.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")


@dataclass(frozen=True)
class Rotation:
    """How pairs of a head's first dims are rotated by their token's position.

    Dims i and i + n form a pair, where n is the number of frequencies.

    Attributes:
        frequencies: Radians per position of each pair of dims.
        scale: Factor of the dims that are rotated.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the angles of tokens at `positions`, int32 [tokens], for `pallas_kernels.rotate_and_store`.

        An angle is a product of two float32 numbers, as in training. Layers with equal rotations share one computation,
        because the compiler merges what is equal.

        Returns:
            The cosines and the sines of the angles, times `scale`, each float32 [tokens, pairs].
        """
        angle = positions.astype(jnp.float32)[:, None] * np.asarray(self.frequencies, np.float32)[None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return (cos, sin) if self.scale == 1 else (cos * self.scale, sin * self.scale)


def make_rotation(dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Rotation:
    """Makes the rotation of `dim` dims of a configuration. Pair i turns by theta ** (-2 i / dim) radians per position.

    `scaling` says how it is stretched: the fields of `rope_parameters` as `models.config.rotation` completes them, with
    one of `ROPE_TYPES`. None is "default".

    Raises:
        ValueError: "longrope" has not one factor for each pair of dims, the dims are odd, or frequencies are not
            finite.
    """
    if dim % 2:
        raise ValueError(f"config.json: the number of dims that are rotated must be even, got {dim}")
    plain, scale = theta ** (-np.arange(dim // 2) / (dim // 2)), 1.0
    scaling = scaling or {}
    kind, factor = scaling.get("rope_type", "default"), scaling.get("factor", 1.0)
    if kind == "linear":
        plain = plain / factor
    elif kind == "llama3":
        plain = _llama3(plain, scaling)
    elif kind == "longrope":
        factors = scaling["short_factor"]
        if len(factors) != len(plain):
            raise ValueError(f"config.json: short_factor must have {len(plain)} factors, got {len(factors)}")
        plain, scale = plain / np.asarray(factors), scaling["attention_factor"]
    elif kind == "yarn":
        if theta <= 1:
            raise ValueError(f"config.json: rope_theta must be above 1 for rope_type 'yarn', got {theta}")
        share = _yarn_share(dim, theta, scaling)
        plain, scale = plain / factor * share + plain * (1 - share), scaling["attention_factor"]
    if not (np.abs(plain) < np.finfo(np.float32).max).all():
        raise ValueError(f"config.json: rope_theta and factor must give finite frequencies, got {theta} and {factor}")
    return Rotation(tuple(plain.astype(np.float32).tolist()), float(scale))


def _llama3(plain: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Slows the rotation of pairs down whose wavelength is near or above the length of the sequences of training."""
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = length * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * plain / factor + kept * plain


def _yarn_share(dim: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """Returns for each pair of dims how much of its rotation is slowed down: 0 for the fastest, 1 for the slowest."""

    def pair_of(turns: float) -> float:
        """Returns the pair that turns so often within a sequence of training."""
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return np.clip((np.arange(dim // 2) - first) / (last - first or 0.001), 0, 1)


def attention_factor(scaling: Mapping[str, Any]) -> float:
    """Returns the factor of rotated dims that "yarn" and "longrope" have if a configuration names none.

    `scaling` is that of `make_rotation`, with `factor` and `original_max_position_embeddings`.
    """
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]
    if factor <= 1:
        return 1.0
    if scaling["rope_type"] == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(length))
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not (above and below):
        above, below = 1.0, 0.0
    return (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
