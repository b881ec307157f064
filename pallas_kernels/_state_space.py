"""What the ops of Mamba-1's and Mamba-2's recurrence have in common: their arguments, and a token's step size."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._check import require
from pallas_kernels._math import softplus


class StateSpace(NamedTuple):
    """The tokens and parameters of a recurrence. `selective_state_update` describes them."""

    x: jax.Array
    dt: jax.Array
    A: jax.Array
    B: jax.Array
    C: jax.Array
    D: jax.Array | None
    z: jax.Array | None
    dt_bias: jax.Array | None

    def checked(self, op: str) -> "StateSpace":
        """Return itself for op `op`.

        Raises:
            ValueError: The groups of B do not divide the heads.
        """
        heads, groups = self.x.shape[1], self.B.shape[1]
        message = f"{op}: the number of groups of B must divide x's {heads} heads, got {groups}"
        require(groups > 0 and heads % groups == 0, message)
        return self


def step_size(raw: jax.Array, bias: jax.Array | None, dt_softplus: bool) -> jax.Array:
    """Return the step sizes for raw ones in float32, of whose shape the bias is."""
    step = raw if bias is None else raw + bias.astype(jnp.float32)
    return softplus(step) if dt_softplus else step
