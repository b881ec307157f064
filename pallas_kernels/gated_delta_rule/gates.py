"""The gates of a token, its log decay and correction strength, from raw projections."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels._check import require
from pallas_kernels._math import softplus


@dataclass(frozen=True, kw_only=True)
class Gates:
    """Which gates a model has. `gated_delta_rule_update` has the equations.

    Attributes:
        lower_bound: Lower bound of the log decay for the bounded gate, negative. None selects the softplus gate.
        allow_neg_eigval: Whether beta lies in (0, 2) instead of (0, 1).
    """

    lower_bound: float | None = None
    allow_neg_eigval: bool = False

    def checked(self, op: str) -> "Gates":
        """Return the gates unchanged if they are valid arguments of the op `op`.

        Raises:
            ValueError: `lower_bound` is not negative.
        """
        bound = self.lower_bound
        require(bound is None or bound < 0, f"{op}: gates.lower_bound must be negative or None, got {bound}")
        return self

    def compute(self, a: jax.Array, b: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute g and beta as `gated_delta_rule_gates` does. `A_log` must broadcast against `a`.

        The Triton kernels call it as well.
        """
        raw = a.astype(jnp.float32) + jnp.broadcast_to(dt_bias.astype(jnp.float32), a.shape)
        rate = jnp.broadcast_to(jnp.exp(A_log.astype(jnp.float32)), a.shape)
        bound = self.lower_bound
        g = -rate * softplus(raw) if bound is None else bound * jax.nn.sigmoid(rate * raw)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        return g, 2.0 * beta if self.allow_neg_eigval else beta
