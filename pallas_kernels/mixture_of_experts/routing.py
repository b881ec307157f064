"""The rule by which a router's outputs choose the experts of a token."""

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels._check import Arguments, dtype_of, require

Scores: TypeAlias = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Routing(Arguments):
    """The rule by which a router's outputs choose a token's experts, and weight them. It is static.

    Shared experts, which every token has, come after the others in index and in order.

    Attributes:
        top_k: The number of experts per token, shared ones not included.
        scores: The function from a token's logits to scores: "softmax" over all experts, or "sigmoid" of each.
        groups: The number of groups of consecutive experts, of equal size.
        top_groups: The number of groups from which a token's experts come: the groups whose two best experts have the
            largest sum of score + bias.
        shared: The number of shared experts.
        shared_gate: Whether the router has one more output, the last, whose sigmoid is the weight of the shared experts.
            Otherwise their weight is 1.
        renormalise: Whether the weights of a token's experts are scaled to the sum 1.
        scale: Factor of the weights, applied after `renormalise`.
        logits_dtype: The dtype to which the total of the logits' partial sums is rounded. None does not round it.
    """

    top_k: int
    scores: Scores = "softmax"
    groups: int = 1
    top_groups: int = 1
    shared: int = 0
    shared_gate: bool = False
    renormalise: bool = True
    scale: float = 1.0
    logits_dtype: str | None = None

    @property
    def chosen(self) -> int:
        """The number of experts per token, shared ones included."""
        return self.top_k + self.shared

    def routed(self, logits: Any) -> int:
        """Return the number of experts that are not shared, given logits [..., outputs]."""
        return logits.shape[-1] - self.shared_gate

    def total(self, partial_sums: Iterable[jax.Array]) -> jax.Array:
        """Add the partial sums of logits in float32, and round the total to `logits_dtype`."""
        total = functools.reduce(operator.add, [one.astype(jnp.float32) for one in partial_sums])
        return total.astype(self.logits_dtype or jnp.float32).astype(jnp.float32)

    def checked(self, op: str, logits: jax.Array, bias: jax.Array | None) -> "Routing":
        """Return itself for op `op`, whose logits are [tokens, outputs] or [splits, tokens, outputs].

        Raises:
            ValueError: A field does not fit the logits, the axis `splits` is empty, or `bias` does not fit the experts.
        """
        experts = self.routed(logits)
        require(logits.ndim == 2 or logits.shape[0] >= 1, f"{op}: logits must have at least one partial sum, got none")
        if bias is not None and bias.shape[0] != experts:
            raise ValueError(f"{op}: bias must have an element for each of {experts} experts, got {bias.shape[0]}")
        field, groups, top_groups = f"{op}: routing", self.groups, self.top_groups
        require(
            self.shared >= int(self.shared_gate),
            f"{field}.shared must be at least 0, and at least 1 with shared_gate, got {self.shared}",
        )
        is_known = self.scores in ("softmax", "sigmoid")
        require(is_known, f"{field}.scores must be 'softmax' or 'sigmoid', got {self.scores!r}")
        is_divisor = groups >= 1 and experts % groups == 0
        require(is_divisor, f"{field}.groups must divide {experts} experts, got {groups}")
        require(1 <= top_groups <= groups, f"{field}.top_groups must be from 1 to groups = {groups}, got {top_groups}")
        allowed = experts // groups * top_groups
        require(1 <= self.top_k <= allowed, f"{field}.top_k must be from 1 to {allowed}, got {self.top_k}")
        require(
            top_groups == groups or experts // groups >= 2,
            f"{op}: a group must have at least 2 experts, got {experts} experts in {groups} groups",
        )
        dtype_of(op, "routing.logits_dtype", self.logits_dtype, jnp.float32)
        return replace(self, scale=float(self.scale))
