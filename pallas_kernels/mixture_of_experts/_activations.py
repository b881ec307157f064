"""The activations between an expert's two products, for both implementations."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._math import silu

Activation = Literal["swiglu", "relu2"]


class _Function(NamedTuple):
    """An activation of `projections` arrays of equal size, which the first product computes: [gate and] up."""

    projections: int
    apply: Callable[..., jax.Array]


ACTIVATIONS: Mapping[str, _Function] = MappingProxyType(
    {
        "swiglu": _Function(2, lambda gate, up: silu(gate) * up),
        "relu2": _Function(1, lambda up: jnp.square(jnp.maximum(up, 0.0))),
    }
)
