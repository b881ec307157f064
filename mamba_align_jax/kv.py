"""Pages of keys and values, for the attention layers of a hybrid model."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mamba_align_jax import _values as values
from mamba_align_jax.align._fields import dtype_name

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class KVSpec:
    """What the attention layers of a model keep for each token.

    Attributes:
        num_layers: Attention layers. 0 for a model without attention.
        num_heads: Heads of the keys and values.
        key_dim: Elements of a key.
        value_dim: Elements of a value. 0 for latent attention, which reads the values out of the keys.
        dtype: The dtype of keys and values.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        for name, minimum in (("num_layers", 0), ("num_heads", 1), ("key_dim", 1), ("value_dim", 0)):
            object.__setattr__(self, name, values.integer(f"KVSpec: {name}", getattr(self, name), minimum))
        values.choice("KVSpec: dtype", self.dtype, _DTYPES)

    def bytes_per_page(self, page_size: int) -> int:
        """Returns the bytes of one page of `page_size` tokens, all layers together."""
        page_size = values.integer("KVSpec: page_size", page_size, 1)
        dims = self.key_dim + self.value_dim
        return self.num_layers * page_size * self.num_heads * dims * jnp.dtype(self.dtype).itemsize


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVPages:
    """The keys and values of all pages. Page 0 is never handed out. Unused positions may contain anything.

    Attributes:
        keys: [layers, pages, page_size, heads, key_dim], of `KVSpec.dtype`.
        values: [layers, pages, page_size, heads, value_dim], of `KVSpec.dtype`.
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def create(cls, spec: KVSpec, num_pages: int, page_size: int) -> "KVPages":
        """Creates `num_pages` pages of zeros, page 0 included, for `page_size` tokens each.

        Raises:
            ValueError: A size is no whole number, or below 1.
        """
        values.instance("KVPages: spec", spec, KVSpec)
        num_pages = values.integer("KVPages: num_pages", num_pages, 1)
        page_size = values.integer("KVPages: page_size", page_size, 1)
        zeros = lambda dim: jnp.zeros((spec.num_layers, num_pages, page_size, spec.num_heads, dim), spec.dtype)
        return cls(keys=zeros(spec.key_dim), values=zeros(spec.value_dim))
