"""The arguments that the implementations of gated_delta_rule share."""

from typing import NamedTuple

import jax

from pallas_kernels.blocks import StateLayout
from pallas_kernels.gated_delta_rule.gates import Gates


class Projections(NamedTuple):
    """Tokens with raw gates, and the parameters of these. `gated_delta_rule_update` describes them."""

    qkv: jax.Array
    a: jax.Array
    b: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array


class Tokens(NamedTuple):
    """Tokens with computed gates. `gated_delta_rule_recurrent` describes them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class Options(NamedTuple):
    """The static arguments. `gated_delta_rule_update` describes them."""

    scale: float
    use_qk_l2norm: bool
    layout: StateLayout = "VK"
    gates: Gates = Gates()
