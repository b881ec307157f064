"""Pages of keys and values, for the attention layers of a hybrid model."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVPages:
    """[layers, pages, page_size, kv_heads, head_dim] each. Page 0 is never handed out; pages may hold anything."""

    keys: jax.Array
    values: jax.Array

    @classmethod
    def create(
        cls, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> "KVPages":
        """Pages of zeros."""
        zeros = lambda: jnp.zeros((num_layers, num_pages, page_size, num_kv_heads, head_dim), dtype)
        return cls(keys=zeros(), values=zeros())
