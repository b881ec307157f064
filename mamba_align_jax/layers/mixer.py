"""The contract of a mixer: a layer through which the tokens of a sequence see each other, over pools.

A new mixer is a file of its own in this folder. What follows the protocol is a mixer; there is no list of them.
"""

from typing import Protocol, runtime_checkable

import jax

from mamba_align_jax.align.config import ConvState, RecurrentState
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.split import Splittable
from mamba_align_jax.metadata.layer_step import LayerStep

# The kind of every mixer that keeps keys and values in pages instead of states in blocks.
ATTENTION = "attention"


@runtime_checkable
class Mixer(Protocol):
    """A layer that reads and writes pools.

    Attributes:
        kind: Names the mixers of a model that share a group: their states have the same shapes. A mixer of kind
            "attention" keeps no states. Its pools are the pages of keys and values (`AttentionMixer`).

    A mixer may also have an attribute `keeps_interior`. It is true if its prefill ops take `Rows.checkpoints`, so
    that the boundaries inside prefill rows are kept in mode "all". Without it the mixer does not serve that mode.

    A mixer may also have an attribute `takes_chains`. It is true if its inputs may be a `Chain`. Its outputs are one then.

    A mixer may also have a method `ring(dtype) -> Ring`, with the dtype of the model. Under policy
    "deferred" the arrays of its ring (`StatePool.rings`) then follow its pools, and its decode and verify rows have
    `Rows.fold`. Without it the mixer does not serve that policy.
    """

    kind: str

    def states(self, conv_dtype: str, state_dtype: str) -> tuple[ConvState | RecurrentState, ...]:
        """Describes the states that a block holds for this layer, in the order of its pools; () for attention.

        Convolution windows have the dtype `conv_dtype`, recurrent states `state_dtype`.
        """

    def __call__(self, x: jax.Array, at: LayerStep, *pools: jax.Array) -> tuple[Outputs, *tuple[jax.Array, ...]]:
        """Runs a step's packed tokens.

        Args:
            x: Inputs, those of decode and verify rows first. [tokens, hidden]
            at: The step's rows, and this layer's index in the pools.
            *pools: One array per state, with all layers and blocks: [layers, blocks, *state]. They are donated.

        Returns:
            The outputs [tokens, hidden], sums [splits, tokens, hidden] whose total over the splits they are, or a
            summand (see `Linear.sums`), finite for padding tokens too, followed by the updated pools.
        """


class AttentionMixer(Mixer, Protocol):
    """A mixer of kind "attention". Its pools are `KVPages.keys` and `KVPages.values`."""

    @property
    def kv_dims(self) -> tuple[int, int, int]:
        """The key heads, the dims of a key and the dims of a value. A value of 0 dims is part of its key."""


@runtime_checkable
class SplitMixer(Mixer, Splittable, Protocol):
    """A mixer that tensor parallelism can split."""
