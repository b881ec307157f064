"""The entries that slots keep in their rings, instead of a state after each token."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Float32

from pallas_kernels._deferred_rows import RingEntries


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaRuleEntries(RingEntries):
    """The rings of all layers and slots. They are updated in place if the enclosing jit donates them, and copied otherwise.

    A ring slot without an entry of its row is undefined.

    Attributes:
        k: Raw keys of the entries, in the dtype of the op's inputs.
        u: Corrections of the entries.
        g: Log decays of the entries.
    """

    k: Float[Array, "layers slots key_heads ring_slots key_dim"]
    u: Float[Array, "layers slots value_heads ring_slots value_dim"]
    g: Float32[Array, "layers slots value_heads ring_slots"]
