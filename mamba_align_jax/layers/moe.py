"""Mixtures of experts: a router chooses a few experts per token, and the token's output is their weighted sum.

Sources: Shazeer et al., "Outrageously Large Neural Networks" (2017); DeepSeek-AI, "DeepSeek-V3" (2024) for the router
with sigmoids, groups and a bias.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels as ops
from mamba_align_jax.layers.linear import Linear, precision
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.residual import total
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.sharding import AXIS, Part

# The most weights of experts that are gathered at once: 128 MiB of bfloat16.
_ELEMENTS = 1 << 26


def softmax_router(logits: jax.Array, top_k: int, *, renormalise: bool = True) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts with the largest softmax of their logits, and weights them by it.

    Args:
        logits: [tokens, experts]
        top_k: Number of experts per token.
        renormalise: Whether the chosen experts' weights are scaled to the sum 1.

    Returns:
        The chosen experts, int32 [tokens, top_k], and their weights, float32 [tokens, top_k].
    """
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), top_k)
    return chosen, weights / jnp.sum(weights, axis=-1, keepdims=True) if renormalise else weights


def sigmoid_router(
    logits: jax.Array,
    bias: jax.Array,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts with the largest sigmoid(logit) + bias, and weights them by the sigmoid alone.

    Args:
        logits: [tokens, experts]
        bias: Added for the choice only. [experts]
        top_k: Number of experts per token.
        groups: Number of groups of consecutive experts, of equal size.
        top_groups: Number of groups from which a token's experts come: those whose two best experts have the largest
            sum.
        renormalise: Whether the chosen experts' weights are scaled to the sum 1.
        scale: Factor of the weights, after that.

    Returns:
        The chosen experts, int32 [tokens, top_k], and their weights, float32 [tokens, top_k].
    """
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    choice = (scores + bias).reshape(scores.shape[0], groups, -1)
    if top_groups < groups:
        group_scores = jnp.sum(jax.lax.top_k(choice, 2)[0], axis=-1)
        best = jax.lax.top_k(group_scores, top_groups)[1]
        allowed = jnp.any(best[:, :, None] == jnp.arange(groups, dtype=best.dtype), axis=1)
        choice = jnp.where(allowed[:, :, None], choice, -jnp.inf)
    chosen = jax.lax.top_k(choice.reshape(scores.shape), top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * scale


def swiglu(x: jax.Array) -> jax.Array:
    """Computes silu(gate) * up, where `x` is [gate | up] along the last axis."""
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


class Experts(nnx.Module):
    """The weights of all experts: an expert computes down(activation(up(x))).

    `up` is [experts, hidden, size], or [experts, hidden, 2 * size] with gates, and `down` is [experts, size, hidden].
    """

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        size: int,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        activation: Callable[[jax.Array], jax.Array] = swiglu,
        gated: bool = True,
    ) -> None:
        """Makes experts with random weights.

        Args:
            experts: Number of experts.
            hidden_size: Channels of an expert's inputs and outputs.
            size: Channels between the activation and `down`.
            dtype: Dtype of weights and products.
            rngs: Random numbers for the weights.
            activation: Takes `up`'s outputs to `down`'s inputs.
            gated: Whether `up` yields [gate | up], which `activation` reduces to half.
        """

        def draw(*shape: int) -> jax.Array:
            return jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-2] ** -0.5

        self.up = nnx.Param(draw(experts, hidden_size, size * (1 + gated)).astype(dtype))
        self.down = nnx.Param(draw(experts, size, hidden_size).astype(dtype))
        self.activation = activation
        # The mesh axis over which `size` is split; None if it is not split.
        self.axis: str | None = None

    def split(self, cut: Cut) -> None:
        """Keeps one device's share of the channels of every expert: see `SplitMixer.split`."""
        width = Part(self.down.shape[1], 1)
        # `up` yields [gate | up], or up alone.
        cut.put(self.up, 2, [width] * (self.up.shape[2] // width.heads))
        cut.put(self.down, 1, [width])
        self.axis = AXIS

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """Computes the weighted sum of each token's experts. Split experts are summed over the devices.

        Args:
            x: Inputs. [tokens, hidden]
            chosen: Index of each token's experts. int32 [tokens, top_k]
            weights: Weight of each of them. [tokens, top_k]

        Returns:
            [tokens, hidden] in the dtype of `x`. The sum is float32.
        """
        out = self._weighted_sum(x, chosen, weights)
        return out if self.axis is None else jax.lax.psum(out.astype(jnp.float32), self.axis).astype(x.dtype)

    def _weighted_sum(self, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        # A row is a token and one of its experts. Rows are sorted by expert and cut into blocks of one expert, so that
        # no row is multiplied by another expert and only a few experts' weights are gathered at once. (Outside of TPUs
        # `jax.lax.ragged_dot` multiplies every row by every expert.)
        up, down = self.up[...], self.down[...]
        experts, top_k = up.shape[0], chosen.shape[1]
        rows = chosen.size
        # In a decode step most experts have one row, so larger blocks would consist of padding.
        size = min(128, max(8, 1 << (rows // experts).bit_length()))
        blocks = min(rows, rows // size + experts)
        expert, row = jax.lax.sort_key_val(chosen.reshape(-1), jnp.arange(rows, dtype=jnp.int32))
        end = jnp.searchsorted(expert, jnp.arange(experts, dtype=expert.dtype), side="right").astype(jnp.int32)
        begin = jnp.concatenate([jnp.zeros(1, jnp.int32), end[:-1]])
        last_block = jnp.cumsum(-(-(end - begin) // size), dtype=jnp.int32)
        first_block = jnp.concatenate([jnp.zeros(1, jnp.int32), last_block[:-1]])
        number = jnp.arange(blocks, dtype=jnp.int32)
        # Blocks after the last one have no expert. They compute on arbitrary rows, and their results are not read.
        owner = jnp.minimum(jnp.searchsorted(last_block, number, side="right"), experts - 1).astype(jnp.int32)
        start = begin[owner] + (number - first_block[owner]) * size

        def run(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            owner, start = block
            token = row.at[start + jnp.arange(size, dtype=jnp.int32)].get(mode="clip") // top_k
            exact = precision(str(up.dtype))
            middle = self.activation(jnp.matmul(x[token], up[owner], precision=exact))
            return jnp.matmul(middle, down[owner], precision=exact)

        batch = max(1, _ELEMENTS // (up[0].size + down[0].size))
        out = jax.vmap(run)((owner, start)) if blocks <= batch else jax.lax.map(run, (owner, start), batch_size=batch)
        # Back from (block, lane) to the sorted row, and from there to the token.
        at = jnp.arange(rows, dtype=jnp.int32) - begin[expert]
        out = out[first_block[expert] + at // size, at % size]
        out = jnp.zeros_like(out).at[row].set(out, unique_indices=True).reshape(-1, top_k, x.shape[1])
        return jnp.sum(out.astype(jnp.float32) * weights.astype(jnp.float32)[..., None], axis=1).astype(x.dtype)


class SharedExpertMoE(nnx.Module):
    """Computes the routed experts' weighted sum plus sigmoid(gate(x)) * shared_expert(x), as in Qwen's models."""

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        top_k: int,
        size: int,
        shared_size: int,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        renormalise: bool = True,
    ) -> None:
        """Makes a layer with random weights.

        Args:
            hidden_size: Channels of the residual stream.
            experts: Number of routed experts.
            top_k: Number of routed experts per token.
            size: Intermediate channels of a routed expert.
            shared_size: Intermediate channels of the shared expert.
            dtype: Dtype of weights and products.
            rngs: Random numbers for the weights.
            renormalise: Whether the chosen experts' weights are scaled to the sum 1.
        """
        self.top_k, self.renormalise = top_k, renormalise
        self.gate = Linear(hidden_size, experts, dtype, rngs)
        self.experts = Experts(experts, hidden_size, size, dtype, rngs)
        self.shared_expert = GatedMLP(hidden_size, shared_size, dtype, rngs)
        self.shared_expert_gate = Linear(hidden_size, 1, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Takes [tokens, hidden] to [tokens, hidden]."""
        chosen, weights = softmax_router(self.gate(x), self.top_k, renormalise=self.renormalise)
        shared = total(self.shared_expert(x), x.dtype)
        return self.experts(x, chosen, weights) + jax.nn.sigmoid(self.shared_expert_gate(x)) * shared


class SigmoidGate(nnx.Module):
    """Routes by `sigmoid_router`, with weights and products in float32 for models of every dtype."""

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        top_k: int,
        rngs: nnx.Rngs,
        *,
        groups: int = 1,
        top_groups: int = 1,
        renormalise: bool = True,
        scale: float = 1.0,
    ) -> None:
        """Makes a router with random weights. The other arguments are those of `sigmoid_router`.

        Args:
            hidden_size: Channels of the residual stream.
            experts: Number of experts.
            top_k: Number of experts per token.
            rngs: Random numbers for the weights.
            groups: See `sigmoid_router`.
            top_groups: See `sigmoid_router`.
            renormalise: See `sigmoid_router`.
            scale: See `sigmoid_router`.
        """
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (experts, hidden_size)) * hidden_size**-0.5)
        self.e_score_correction_bias = nnx.Param(jnp.zeros(experts, jnp.float32))
        self.top_k, self.groups, self.top_groups = top_k, groups, top_groups
        self.renormalise, self.scale = renormalise, scale

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chooses the experts of tokens [tokens, hidden]. Returns them and their weights, each [tokens, top_k]."""
        (logits,) = ops.linear(x.astype(jnp.float32), self.weight[...])
        return sigmoid_router(
            logits,
            self.e_score_correction_bias[...],
            self.top_k,
            groups=self.groups,
            top_groups=self.top_groups,
            renormalise=self.renormalise,
            scale=self.scale,
        )


class SharedExpertsMoE(nnx.Module):
    """Computes the weighted sum of the experts that `gate` chooses plus shared_experts(x), as in DeepSeek-V3."""

    def __init__(self, gate: SigmoidGate, experts: Experts, shared_experts: GatedMLP) -> None:
        """Puts the parts together."""
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    def __call__(self, x: jax.Array) -> jax.Array:
        """Takes [tokens, hidden] to [tokens, hidden]."""
        return self.experts(x, *self.gate(x)) + total(self.shared_experts(x), x.dtype)
