"""The rings in which deferred states of Mamba-2 keep an entry for each token, and the inputs of their kernels."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Float32

from pallas_kernels._deferred_rows import RingEntries


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mamba2Entries(RingEntries):
    """The entries that deferred states of Mamba-2 keep, one for each token, in a ring for each layer and slot.

    A ring has two ring slots for each token of a group. A ring slot without an entry of its row is undefined.

    Attributes:
        x: Inputs of the entries, in the dtype of the op's inputs.
        B: Input projections of the entries, in the dtype of the op's inputs.
        dt: Step sizes of the entries, after bias and softplus.
        g: Log decays of the entries, A dt.
    """

    x: Float[Array, "layers slots heads ring_slots head_dim"]
    B: Float[Array, "layers slots groups ring_slots state_dim"]
    dt: Float32[Array, "layers slots heads ring_slots"]
    g: Float32[Array, "layers slots heads ring_slots"]


class Inputs(NamedTuple):
    """Tokens and parameters. `selective_state_deferred` describes them."""

    xBC: jax.Array
    dt: jax.Array
    A: jax.Array
    D: jax.Array | None
    dt_bias: jax.Array | None
