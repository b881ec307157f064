"""The steps of a chain: gated norms, products with weights, norms, mixtures of experts, and a convolution at the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import jax

from pallas_kernels.blocks import WindowLayout

# The activation of a gated norm's gate.
GateActivation: TypeAlias = Literal["silu", "sigmoid"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatedNorm:
    """Normalise and gate each head: x / rms(x) * weight * activation(gate), in the dtype of x.

    A head is `len(weight)` consecutive channels. All heads have the same weights.

    Attributes:
        gate: The gates. [tokens, channels]
        weight: Weights of the norm. [channels of a head]
        epsilon: Added to the mean square.
        activation: "silu" or "sigmoid".
    """

    gate: jax.Array
    weight: jax.Array
    epsilon: float = field(metadata=dict(static=True))
    activation: GateActivation = field(default="silu", metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Product:
    """Multiply by weights: x weight^T, or silu(gate) * up of its halves.

    Attributes:
        weight: The weights. [outputs, inputs]
        is_gated: Whether the first half of the outputs is a gate of the second half.
    """

    weight: jax.Array
    is_gated: bool = field(default=False, metadata=dict(static=True))

    @property
    def outputs(self) -> int:
        """The number of results."""
        return self.weight.shape[0] // (1 + self.is_gated)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """Add the results of the step before to the residual stream, and normalise the sum: see `add_rms_norm`.

    Attributes:
        weight: Weights of the norm. [channels]
        epsilon: Added to the mean square.
        offset: Added to the weights.
        scale: Factor of the results that are added.
        out_dtype: Dtype of the normed values; None is the residual stream's dtype.
        over_devices: Whether the results are first summed over the devices: see `all_reduce_product_chain`.
    """

    weight: jax.Array
    epsilon: float = field(metadata=dict(static=True))
    offset: float = field(default=0.0, metadata=dict(static=True))
    scale: float = field(default=1.0, metadata=dict(static=True))
    out_dtype: str | None = field(default=None, metadata=dict(static=True))
    over_devices: bool = field(default=False, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Experts:
    """Choose a token's experts by a softmax over the router's outputs, and compute the weighted sum of their outputs.

    It is `linear_sums` with the router's weights, whose total is rounded to their dtype, and `routed_experts_sums` with
    "swiglu". Of experts with equal logits, the lower index is chosen first.

    Attributes:
        router: Weights of the router: a row for each routed expert, and with `shared_gate` one more row. [outputs, inputs]
        up: First weights of all experts, shared experts last: see `mixture_of_experts`. [experts, 2 * size, inputs]
        down: Second weights of all experts. [experts, channels, size]
        valid: False for padding tokens, which get no experts. None if no token is padding. bool [tokens]
        top_k: The number of routed experts per token.
        shared: The number of shared experts, which every token has.
        shared_gate: Whether the sigmoid of the router's last output is the weight of the shared experts.
        renormalise: Whether the weights of a token's experts are scaled to the sum 1.
    """

    router: jax.Array
    up: jax.Array
    down: jax.Array
    valid: jax.Array | None = None
    top_k: int = field(default=1, metadata=dict(static=True))
    shared: int = field(default=0, metadata=dict(static=True))
    shared_gate: bool = field(default=False, metadata=dict(static=True))
    renormalise: bool = field(default=True, metadata=dict(static=True))

    @property
    def outputs(self) -> int:
        """The number of results."""
        return self.down.shape[1]

    @property
    def routed(self) -> int:
        """The number of experts that are not shared."""
        return self.router.shape[0] - self.shared_gate

    @property
    def chosen(self) -> int:
        """The number of experts per token."""
        return self.top_k + self.shared


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Convolution:
    """Convolve the first results of a product causally, and keep their windows, of rows with at most one token.

    It is `causal_conv1d_update` without a bias. The other results of the product stay as they are. Results of tokens after
    the last row are unspecified.

    Attributes:
        pool: Windows of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied otherwise.
            [layers, blocks, window, channels], or as `layout` says
        layer: The layer whose blocks are read and written. int32 []
        weight: The taps. [width, channels]
        query_start_loc: Index of each row's token; the last entry is the end of the last row. A row without a token has the
            index of the next token. int32 [rows + 1]
        read_block: The block that holds each row's window; NULL_BLOCK reads as zeros. int32 [rows]
        window_row: The first window row that each row reads. int32 [rows]
        write_block: The block that receives each row's new window; NULL_BLOCK skips the write. It may be the row's own read
            block. int32 [rows]
        activation: "silu" or None.
        layout: The layout of the windows: see `causal_conv1d_update`.
    """

    pool: jax.Array
    layer: jax.Array
    weight: jax.Array
    query_start_loc: jax.Array
    read_block: jax.Array
    window_row: jax.Array
    write_block: jax.Array
    activation: Literal["silu"] | None = field(default="silu", metadata=dict(static=True))
    layout: WindowLayout = field(default="SD", metadata=dict(static=True))

    @property
    def channels(self) -> int:
        """The number of results that are convolved."""
        return self.weight.shape[1]


def weights_of(steps: "Sequence[Step]") -> list[jax.Array]:
    """Return the weights of a chain's products, in the order in which they are multiplied."""
    weights: list[jax.Array] = []
    for step in steps:
        if isinstance(step, Product):
            weights.append(step.weight)
        elif isinstance(step, Experts):
            weights += [step.router, step.up, step.down]
    return weights


def norms_of(steps: "Sequence[Step]") -> list[Norm]:
    """Return the norms of a chain, without the gated norm."""
    return [step for step in steps if isinstance(step, Norm)]


def gated_norm_of(steps: "Sequence[Step]") -> GatedNorm | None:
    """Return the gated norm with which a chain begins, or None."""
    return steps[0] if isinstance(steps[0], GatedNorm) else None


# A step that one launch may run anywhere. A convolution can only be the last one.
Step: TypeAlias = GatedNorm | Product | Norm | Experts
