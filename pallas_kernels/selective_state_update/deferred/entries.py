"""The rings in which deferred states of Mamba-2 keep an entry for each token."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Float32

from pallas_kernels._check import Arguments


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mamba2Entries(Arguments):
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

    @property
    def by_name(self) -> dict[str, jax.Array]:
        """The arrays by their names in kernels."""
        return dict(ring_x=self.x, ring_B=self.B, ring_dt=self.dt, ring_g=self.g)

    @classmethod
    def of(cls, results: Mapping[str, jax.Array]) -> "Mamba2Entries":
        """Take the arrays from a kernel's results by these names."""
        return cls(results["ring_x"], results["ring_B"], results["ring_dt"], results["ring_g"])
