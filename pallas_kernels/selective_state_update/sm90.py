"""selective_state_update on Hopper GPUs, for Mamba-2. The state rows of a warp are channels of one head.

Products are fused with sums, which a kernel that XLA gives to Triton's compiler cannot do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._state_space import StateSpace
from pallas_kernels.hopper import state_warps
from pallas_kernels.hopper.state_warps import State, Warp
from pallas_kernels.rows import Rows


def unsupported(inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool) -> str | None:
    """Return the reason why the kernel cannot run these arguments, or None if it can."""
    for name, ndim in dict(dt=2, A=1, D=1, dt_bias=1).items():
        array = getattr(inputs, name)
        if array is not None and array.ndim != ndim:
            return f"{name} must have a value per head, got {list(array.shape)}"
    return state_warps.unsupported(pool, *(each for each in inputs if each is not None))


class _StateSpace:
    """The recurrence of one head. `refs` are `x`, `dt`, `A`, `B`, `C`, and `D`, `z` and `dt_bias` if there are any."""

    def __init__(self, refs: Any, warp: Warp, dt_softplus: bool) -> None:
        self.refs, self.warp, self.dt_softplus, self.head = refs, warp, dt_softplus, warp.indices.head
        heads, groups = refs.x.shape[1], refs.B.shape[1]
        self.group = self.head // (heads // groups)
        self.rate = refs.A[self.head].astype(jnp.float32)
        optional = lambda name: getattr(refs, name)[self.head].astype(jnp.float32) if hasattr(refs, name) else None
        self.skip, self.bias = optional("D"), optional("dt_bias")

    def take(self, token: Any) -> list[Any]:
        """Load the lane's columns of B and C, the step size, and the input and the gate of its own state row."""
        refs, warp = self.refs, self.warp
        vectors = [warp.load_columns(ref, token, self.group, warp.column) for ref in (refs.B, refs.C)]
        channels = [refs.x, refs.z] if hasattr(refs, "z") else [refs.x]
        of_row = [ref[token, self.head, warp.own_row].astype(jnp.float32) for ref in channels]
        return [*vectors, refs.dt[token, self.head].astype(jnp.float32), *of_row]

    def advance(self, inputs: Sequence[Any], state: State, keep: Callable[[list[Any]], None]) -> Any:
        """Advance the state by one token, and return the output of the lane's own state row."""
        B, C, dt, x, *z = inputs
        B, C = (hp.unpack(each.astype(jnp.float32)) for each in (B, C))
        dt = dt if self.bias is None else dt + self.bias
        dt = hp.softplus(dt) if self.dt_softplus else dt
        decay, sums = hp.exp(self.rate * dt), []
        for slice_, factor in zip(state, self.warp.of_each_load(dt * x), strict=True):
            after = [hp.fma(factor, k, decay * s) for k, s in zip(B, slice_, strict=True)]
            sums.append(self.warp.product(after, C))
            keep(after)
        y = self.warp.whole_sum(sums)
        y = y if self.skip is None else hp.fma(self.skip, x, y)
        return y * hp.silu(*z) if z else y


def selective_state_update(
    inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel. See api.py."""
    return state_warps.advance_states(
        "selective_state_update",
        lambda refs, warp: _StateSpace(refs, warp, dt_softplus),
        {name: array for name, array in inputs._asdict().items() if array is not None},
        jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype),
        pool,
        rows,
    )
