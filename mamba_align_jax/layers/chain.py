"""Products, norms and mixtures of experts of a step that follow each other, and are launched together.

A step of few tokens spends much of its time on starting launches. From the end of one mixer to the beginning of the
next, everything is one of them: see `pallas_kernels.product_chain`. A mixer's own gated norm and convolution may be part
of it.
"""

from dataclasses import replace
from typing import Any, TypeAlias

import jax

from pallas_kernels import Implementation, Run, product_chain
from pallas_kernels.product_chain import Convolution, Experts, GatedNorm, Norm, Product


class Chain:
    """Steps that are still to be launched.

    A method that adds a step changes the chain itself and returns it, so a chain can be continued in one way only. A chain
    belongs to the trace in which it was made.

    Attributes:
        implementation: Implementation of the op; None chooses by platform.
        exchange: The `Exchange` that adds up what the devices of a split model have; None if the model is not split.
        axis: The mesh axis over whose devices the last step's results are still to be added up; None if they are whole.
    """

    def __init__(
        self,
        x: jax.Array,
        implementation: Implementation | None = None,
        exchange: Any = None,
        axis: str | None = None,
    ) -> None:
        """Begins with `x`: [tokens, channels], or partial sums [splits, tokens, channels], which a norm will add up."""
        self._x, self.implementation, self.exchange, self.axis = x, implementation, exchange, axis
        self._residual: jax.Array | None = None
        self._steps: tuple[GatedNorm | Product | Norm | Experts | Convolution, ...] = ()
        self._total: jax.Array | None = None

    def add(self, step: GatedNorm | Experts | Convolution) -> "Chain":
        """Adds a gated norm, a mixture of experts or a convolution.

        A gated norm is the first step, and a product follows it. A convolution is the last step and follows a product.
        """
        self._steps += (step,)
        return self

    def product(self, weight: jax.Array, *, is_gated: bool = False, axis: str | None = None) -> "Chain":
        """Adds a product: see `Product`. With `axis` each device computes a summand of it."""
        self._steps += (Product(weight, is_gated),)
        self.axis = axis
        return self

    def norm(self, norm: Norm, residual: jax.Array | None = None) -> "Chain":
        """Adds a norm. The first one adds to `residual`, the residual stream, and each later one to the sum before."""
        if residual is not None:
            self._residual = residual
        self._steps += (replace(norm, over_devices=self.axis is not None),)
        self.axis = None
        return self

    def launch(self, parts: tuple[int, ...] | None = None) -> Any:
        """Computes the last step's results: see `product_chain`. The chain has ended then."""
        if not self._steps:
            return self._x
        # A model that names Mosaic GPU means the ops that have such kernels for its arguments.
        implementation = None if self.implementation == "mosaic_gpu" else self.implementation
        op = product_chain if self.exchange is None else self.exchange.product_chain
        run = Run(implementation=implementation)
        out, self._total = op(self._x, self._steps, self._residual, parts=parts, run=run)
        self._x, self._steps = out, ()
        return out

    def total(self) -> jax.Array:
        """Returns the residual stream after the last norm. It launches what has not been launched."""
        if self._total is None:
            self.launch()
        assert self._total is not None, "there was no norm"
        return self._total


# The input of a mixer or of a feed-forward layer: [tokens, hidden], or the chain that computes it.
Inputs: TypeAlias = jax.Array | Chain


def settled(x: Inputs) -> jax.Array:
    """Returns the input of a layer as an array [tokens, hidden]."""
    return x.launch() if isinstance(x, Chain) else x


def like(x: Inputs, y: jax.Array) -> Inputs:
    """Returns what a layer that got `x` projects to its outputs: a new chain that begins with `y` if `x` is a chain."""
    return Chain(y, x.implementation, x.exchange) if isinstance(x, Chain) else y
