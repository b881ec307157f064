"""Pages of keys and values, for the attention layers of a hybrid model."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mamba_align_jax.align.config import dtype_name


@dataclass(frozen=True)
class KVSpec:
    """What a model's attention layers keep of a token.

    Attributes:
        num_layers: Layers with keys; 0 for a model without attention.
        num_heads: Heads of keys and values.
        key_dim: Dims of a key.
        value_dim: Dims of a value; 0 where values are read out of the keys, as latent attention does.
        dtype: Of both.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        for name, least in (("num_layers", 0), ("num_heads", 1), ("key_dim", 1), ("value_dim", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"KVSpec: {name} must be at least {least}, got {getattr(self, name)}")

    def bytes_per_page(self, page_size: int) -> int:
        """Of one page of `page_size` tokens, all layers together."""
        dims = self.key_dim + self.value_dim
        return self.num_layers * page_size * self.num_heads * dims * jnp.dtype(self.dtype).itemsize


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVPages:
    """[layers, pages, page_size, heads, key_dim or value_dim]. Page 0 is never handed out; pages may hold anything."""

    keys: jax.Array
    values: jax.Array

    @classmethod
    def create(cls, spec: KVSpec, num_pages: int, page_size: int) -> "KVPages":
        """Pages of zeros."""
        zeros = lambda dim: jnp.zeros((spec.num_layers, num_pages, page_size, spec.num_heads, dim), spec.dtype)
        return cls(keys=zeros(spec.key_dim), values=zeros(spec.value_dim))
