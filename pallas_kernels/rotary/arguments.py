"""Groups of arguments of rotate_and_store."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import Arguments


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PageIndices(Arguments):
    """The layer, page and offset in the page to which each token's key and value are stored.

    Attributes:
        layer: The layer whose pages are written.
        page: The page of each token's key and value, which are dropped if it is out of range.
        offset: The offset of each token in its page, in [0, page_size). No two tokens have the same page and
            offset; this is not checked.
    """

    layer: int | Int32[Array, ""]
    page: Int32[Array, " tokens"]
    offset: Int32[Array, " tokens"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class HeadNorms(Arguments):
    """The RMS norms of queries and keys, per head.

    Attributes:
        q_weight: Weights of the norm of each query. None leaves queries as they are.
        k_weight: Weights of the norm of each key. None leaves keys as they are.
        epsilon: Added to the mean squares of both norms. Static.
        offset: Added to the weights of both norms. Static.
    """

    q_weight: Float[Array, " key_dim"] | None = None
    k_weight: Float[Array, " key_dim"] | None = None
    epsilon: float = field(default=0.0, metadata=dict(static=True))
    offset: float = field(default=0.0, metadata=dict(static=True))
