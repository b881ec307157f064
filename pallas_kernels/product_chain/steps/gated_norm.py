"""The gated norm of a delta-rule layer's heads, with which a chain begins.

In one launch each CTA computes it for its own inputs, while its first weights are in flight.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import require
from pallas_kernels._lazy_hopper import hp
from pallas_kernels._math import silu
from pallas_kernels._warpgroup import LANES, pack_of_spread
from pallas_kernels.product_chain import fragments
from pallas_kernels.product_chain.schedule import ONE_TOKEN, Launch, Phase
from pallas_kernels.product_chain.step import Place, Separate, Step
from pallas_kernels.product_chain.steps.product import Product

# The activation of a gated norm's gate.
GateActivation: TypeAlias = Literal["silu", "sigmoid"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatedNorm(Step):
    """Normalise and gate each head: x / rms(x) * weight * activation(gate), in the dtype of x.

    A head is `len(weight)` consecutive channels. All heads have the same weights.

    Attributes:
        gate: The gates.
        weight: Weights of the norm, one for each channel of a head.
        epsilon: Added to the mean square.
        activation: "silu" or "sigmoid".
    """

    gate: Float[Array, "tokens channels"]
    weight: Float[Array, " head"]
    epsilon: float = field(metadata=dict(static=True))
    activation: GateActivation = field(default="silu", metadata=dict(static=True))

    computes_inputs: ClassVar[bool] = True
    is_counted: ClassVar[bool] = False
    roles: ClassVar[dict[str, tuple[str, ...]]] = dict(gated=("gate", "weight"))

    def check(self, name: str, place: Place, x: jax.Array, residual: jax.Array | None) -> None:
        """See `Step`."""
        require(place.index == 0, f"{name}: a gated norm must be the first step")
        require(self.gate.shape == x.shape, f"{name}: gate must be {list(x.shape)}, got {list(self.gate.shape)}")
        weight, channels = self.weight.shape, x.shape[-1]
        is_right = weight[0] > 0 and channels % weight[0] == 0
        require(is_right, f"{name}: weight must be [a divisor of {channels}], got {list(weight)}")
        known = list(get_args(GateActivation))
        require(self.activation in known, f"{name}: activation must be one of {known}, got {self.activation!r}")
        is_followed = place.after is None or isinstance(place.after, Product)
        require(is_followed, f"{name}: a product must follow a gated norm, got {place.names}")

    def run_alone(self, value: jax.Array, place: Place, chain: Separate) -> jax.Array:
        """Return the normed and gated heads, by XLA."""
        shape = value.shape[0], value.shape[1] // self.weight.shape[0], self.weight.shape[0]
        heads, gate = (each.astype(jnp.float32).reshape(shape) for each in (value, self.gate))
        heads = heads * jax.lax.rsqrt(jnp.mean(heads * heads, axis=-1, keepdims=True) + self.epsilon)
        activation = silu if self.activation == "silu" else jax.nn.sigmoid
        gated = heads * self.weight.astype(jnp.float32)[None, None] * activation(gate)
        return gated.astype(value.dtype).reshape(value.shape)

    def unsupported_inputs(self, phase: Phase, launch: Launch) -> str | None:
        """See `Step`. Of one token each head must be in one warp's registers."""
        dim = self.weight.shape[0]
        if launch is not ONE_TOKEN:
            is_right = dim in (32, 64, 128, 256)
            return None if is_right else f"heads of a gated norm must have 32, 64, 128 or 256 channels, got {dim}"
        pack = pack_of_spread(phase.vector)
        if dim in [pack * lanes for lanes in (1, 2, 4, 8, 16, LANES)]:
            return None
        return f"heads of a gated norm must have a power of two channels from {pack} to {pack * LANES}, got {dim}"

    def prepared(self) -> Self:
        """See `Step`."""
        return replace(self, gate=self.gate.reshape(-1), weight=self.weight.astype(jnp.float32))

    def load_one_token(self, cta: Any, phase: Phase) -> list[jax.Array]:
        """Normalise and gate the inputs of the chain that this CTA's split of the first product takes."""
        count = phase.vector
        first = cta.work[phase.index].split * count
        (value,) = cta.results_before(phase.index, first, count)
        gate, dim = hp.load_spread(self.gate.at[hp.ds(first, count)]), self.weight.shape[0]
        weight = hp.load_for_each_head(self.weight, count)
        factor = jax.lax.rsqrt(hp.sums_of_heads(value * value, dim) / dim + self.epsilon)
        scaled = value * factor * weight
        activated = (gate if self.activation == "silu" else 1.0) / (1.0 + jnp.exp(-gate))
        return cta.for_each_warp([(scaled * activated).astype(cta.refs.x.dtype).astype(cta.dtype)])

    def load_few_tokens(self, cta: Any, phase: Phase, first: Any) -> jax.Array:
        """Load inputs like `fragments.load`, normalise each head, and multiply it by its activated gates.

        Sums of squares of the warps that hold a head together go through `partials`, float32 [K tiles, MOST_TOKENS, warps].
        """
        x = fragments.Vectors(cta.refs.x, 0, phase.inputs, first)
        dim, k_tiles, tokens = self.weight.shape[0], phase.k_tiles, cta.tokens
        every, halves = fragments.WARPS, fragments.halves(tokens)
        warps = max(1, dim // 32)  # that hold a head together

        def body(ref: Any, gate: Any, weight: Any, heads: Any, first: Any) -> Any:
            at = fragments.offsets_of(x, first, k_tiles, tokens)
            kind = ref.dtype
            values, gates = ([hp.load_vector(each, offset, count=8) for offset in at] for each in (ref, gate))
            here = fragments.thread()
            weights = hp.load_vector(weight, here.column & (dim - 1), count=8)
            stored = lambda n, warp: hp.index(hp.add(here.row * every, warp, (n // halves) * 128 + n % halves * 64))
            for index, value in enumerate(values):
                wide = value.astype(jnp.float32)
                total = hp.reduce_add(wide * wide)
                total = hp.sum_over_lanes(total, (1, 2))
                heads[stored(index, here.warp)] = total
            hp.barrier_of_warpgroups(fragments.WARPGROUPS)
            first_warp = here.warp & (every - warps)
            found = []
            for index, (value, closed) in enumerate(zip(values, gates, strict=True)):
                sums = [heads[stored(index, first_warp + n)] for n in range(warps)]
                factor = hp.approximate("rsqrt", hp.add(*sums) * (1.0 / dim) + self.epsilon)
                activation = hp.silu if self.activation == "silu" else hp.sigmoid
                opened = hp.pack([activation(one) for one in hp.unpack(closed.astype(jnp.float32))])
                scaled = value.astype(jnp.float32) * hp.broadcast(factor, 8) * weights
                found.append(hp.words((scaled * opened).astype(kind)))
            hp.barrier_of_warpgroups(fragments.WARPGROUPS)  # `partials` may be used again
            return (found,)

        operands = (x.ref, ()), (self.gate, ()), (self.weight, ()), (cta.refs.partials, ()), x.first
        return hp.inline(body, *operands, results=[(fragments.registers(k_tiles, tokens), jnp.int32)])[0]
