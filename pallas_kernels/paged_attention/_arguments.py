"""The arguments that the implementations of paged_attention share."""

from typing import NamedTuple

import jax


class Attention(NamedTuple):
    """The arrays of a call, but for its rows. `paged_attention` describes them."""

    q: jax.Array
    keys: jax.Array
    values: jax.Array | None
    page_table: jax.Array
    slots: jax.Array | None
    gates: jax.Array | None
