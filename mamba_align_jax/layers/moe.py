"""Mixtures of experts: a router chooses a few experts per token, and the token's output is their weighted sum.

Sources: Shazeer et al., "Outrageously Large Neural Networks" (2017); DeepSeek-AI, "DeepSeek-V3" (2024) for the router
with sigmoids, groups and a bias.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels as ops
from mamba_align_jax.layers.chain import Chain, Inputs, settled
from mamba_align_jax.layers.exchange import Outputs, Partial
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.residual import total
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.sharding import AXIS, Part
from pallas_kernels import Activation, Routing, Run, choose_experts, mixture_of_experts, mixture_of_experts_sums
from pallas_kernels.product_chain import Experts as ExpertsStep


def shared_experts(shared_size: int, size: int) -> int:
    """Counts the experts of `size` intermediate channels that a shared expert of `shared_size` is cut into.

    A gated layer is the sum of layers that each have some of its intermediate channels. So a shared expert is the sum of
    experts that every token has, with equal weights. Channels that the last of them lacks are 0.
    """
    return -(-shared_size // size)


class Experts(nnx.Module):
    """The weights of all experts: an expert computes down(activation(up(x))). Shared experts come last.

    They are stored as files hold them, outputs first: `up` is [experts, size, hidden], or [experts, 2 * size, hidden] with
    gates, which come first, and `down` is [experts, hidden, size].
    """

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        size: int,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        activation: Activation = "swiglu",
    ) -> None:
        """Makes experts with random weights.

        Args:
            experts: Number of experts.
            hidden_size: Channels of an expert's inputs and outputs.
            size: Channels between the activation and `down`.
            dtype: Dtype of weights and products.
            rngs: Random numbers for the weights.
            activation: What an expert does between its products: see `pallas_kernels.mixture_of_experts`.
        """

        def draw(*shape: int) -> jax.Array:
            return (jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)

        self.up = nnx.Param(draw(experts, size * (2 if activation == "swiglu" else 1), hidden_size))
        self.down = nnx.Param(draw(experts, hidden_size, size))
        self.activation: Activation = activation
        # The mesh axis over which `size` is split; None if it is not split.
        self.axis: str | None = None

    def split(self, cut: Cut) -> None:
        """Keeps one device's share of the channels of every expert: see `SplitMixer.split`."""
        width = Part(self.down.shape[2], 1)
        # `up` yields [gate | up], or up alone.
        cut.put(self.up, 1, [width] * (self.up.shape[1] // width.heads))
        cut.put(self.down, 2, [width])
        self.axis = AXIS

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, run: Run = Run()) -> jax.Array:
        """Adds up what `sums` returns: the weighted sum of the outputs of each token's experts, float32 [tokens, hidden]."""
        return total(self.sums(x, chosen, weights, run), jnp.float32)

    def sums(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, run: Run = Run()) -> Outputs:
        """Computes the weighted sum of the outputs of each token's experts, in partial sums that the caller adds up.

        If the experts are split over devices, each device has a summand, in float32.

        Args:
            x: Inputs. [tokens, hidden]
            chosen: Index of each token's experts; -1 for none. int32 [tokens, top_k]
            weights: Weight of each of them. float32 [tokens, top_k]
            run: How the op runs.

        Returns:
            [splits, tokens, hidden], in float32 or in the dtype of `x`: see `pallas_kernels.mixture_of_experts_sums`.
        """
        arguments = x, self.up[...], self.down[...], chosen, weights
        if self.axis is None:
            return mixture_of_experts_sums(*arguments, activation=self.activation, run=run)
        out = mixture_of_experts(*arguments, activation=self.activation, out_dtype="float32", run=run)
        return Partial(out[None], self.axis)

    def routed_sums(
        self,
        x: jax.Array,
        logits: jax.Array,
        routing: Routing,
        *,
        bias: jax.Array | None = None,
        valid: jax.Array | None = None,
        run: Run = Run(),
    ) -> Outputs:
        """Chooses the experts of each token and computes what `sums` returns for them.

        A single token's experts are chosen inside the experts' kernel if they are not split over devices.

        Args:
            x: Inputs. [tokens, hidden]
            logits: The router's outputs: see `pallas_kernels.choose_experts`.
            routing: How they choose the experts.
            bias: See `pallas_kernels.choose_experts`.
            valid: See `MixtureOfExperts`.
            run: How the ops run.
        """
        choice = dict(bias=bias, valid=valid, run=run)
        if self.axis is not None:
            return self.sums(x, *choose_experts(logits, routing, **choice), run)
        weights = self.up[...], self.down[...]
        return ops.routed_experts_sums(x, logits, *weights, routing, activation=self.activation, **choice)


class MixtureOfExperts(nnx.Module):
    """The base of feed-forward layers with experts. `Carry.feed_forward` tells them which tokens are padding."""

    def __call__(self, x: jax.Array, valid: jax.Array | None = None, run: Run = Run()) -> Outputs:
        """Runs packed tokens.

        Args:
            x: Inputs. [tokens, hidden]
            valid: False for padding tokens, which choose no experts; None if there are none. bool [tokens]
            run: How the ops of routers and experts run. A step's `implementation` is also that of its mixers' ops and of
                its chains. Other products and norms always choose by platform.

        Returns:
            What `Residual.add` takes: [tokens, hidden], or sums [splits, tokens, hidden].
        """
        raise NotImplementedError


class SoftmaxMoE(MixtureOfExperts):
    """Computes the sum of the chosen experts, weighted by a softmax over their logits.

    With `renormalise` false the softmax is over the logits of all experts.
    """

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        top_k: int,
        size: int,
        dtype: str,
        rngs: nnx.Rngs,
        *,
        renormalise: bool = True,
    ) -> None:
        """Makes a layer with random weights. The arguments are those of `SharedExpertMoE`."""
        self.routing = Routing(top_k=top_k, renormalise=renormalise, logits_dtype=dtype)
        self.router = Linear(hidden_size, experts, dtype, rngs)
        self.experts = Experts(experts, hidden_size, size, dtype, rngs)

    def __call__(self, x: jax.Array, valid: jax.Array | None = None, run: Run = Run()) -> Outputs:
        """Runs packed tokens: see `MixtureOfExperts`."""
        return self.experts.routed_sums(x, self.router.partial_sums(x, run), self.routing, valid=valid, run=run)


class SharedExpertMoE(MixtureOfExperts):
    """Computes the routed experts' weighted sum plus sigmoid(gate(x)) * shared_expert(x), as in Qwen's models.

    The router and the gate are one product, and the shared expert is among the experts: see `shared_experts`.
    """

    takes_chains = True

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
        shared = shared_experts(shared_size, size)
        self.routing = Routing(
            top_k=top_k, shared=shared, shared_gate=True, renormalise=renormalise, logits_dtype=dtype
        )
        self.gate = Linear(hidden_size, experts + 1, dtype, rngs)
        self.experts = Experts(experts + shared, hidden_size, size, dtype, rngs)

    def __call__(self, x: Inputs, valid: jax.Array | None = None, run: Run = Run()) -> Outputs:
        """Runs packed tokens: see `MixtureOfExperts`. It continues a chain."""
        if isinstance(x, Chain) and self.experts.axis is None:
            r, weights = self.routing, (self.gate.weight[...], self.experts.up[...], self.experts.down[...])
            return x.add(ExpertsStep(*weights, valid, r.top_k, r.shared, r.shared_gate, r.renormalise))
        x = settled(x)
        return self.experts.routed_sums(x, self.gate.partial_sums(x, run), self.routing, valid=valid, run=run)


class SigmoidGate(nnx.Module):
    """A router whose scores are sigmoids, with weights and products in float32 for models of every dtype."""

    def __init__(self, hidden_size: int, experts: int, top_k: int, rngs: nnx.Rngs, **routing: Any) -> None:
        """Makes a router with random weights.

        Args:
            hidden_size: Channels of the residual stream.
            experts: Number of experts.
            top_k: Number of experts per token.
            rngs: Random numbers for the weights.
            routing: The other fields of `pallas_kernels.Routing`.
        """
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (experts, hidden_size)) * hidden_size**-0.5)
        self.e_score_correction_bias = nnx.Param(jnp.zeros(experts, jnp.float32))
        self.routing = Routing(top_k=top_k, scores="sigmoid", **routing)

    def __call__(self, x: jax.Array, valid: jax.Array | None = None, run: Run = Run()) -> tuple[jax.Array, jax.Array]:
        """Chooses the experts of packed tokens [tokens, hidden]: see `MixtureOfExperts`.

        Returns:
            The chosen experts and their weights, each [tokens, top_k + shared]: see `choose_experts`.
        """
        bias = self.e_score_correction_bias[...]
        return choose_experts(self.logits(x, run), self.routing, bias=bias, valid=valid, run=run)

    def logits(self, x: jax.Array, run: Run = Run()) -> jax.Array:
        """Computes the router's outputs of packed tokens [tokens, hidden] as partial sums: see `ops.linear_sums`."""
        return ops.linear_sums(x, self.weight[...], run=run)


class SharedExpertsMoE(MixtureOfExperts):
    """Computes the weighted sum of the experts that `gate` chooses, shared ones among them, as in DeepSeek-V3."""

    def __init__(self, gate: SigmoidGate, experts: Experts) -> None:
        self.gate, self.experts = gate, experts

    def __call__(self, x: jax.Array, valid: jax.Array | None = None, run: Run = Run()) -> Outputs:
        """Runs packed tokens: see `MixtureOfExperts`."""
        logits, bias = self.gate.logits(x, run), self.gate.e_score_correction_bias[...]
        return self.experts.routed_sums(x, logits, self.gate.routing, bias=bias, valid=valid, run=run)
