"""What a model's sizes say of the memory and the time that its steps take."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx

from mamba_align_jax.layers.moe import Experts


class ModelFacts(NamedTuple):
    """The sizes of a model, or of one device's share of it.

    Attributes:
        weight_bytes: Bytes of all weights.
        active_weights: Number of weights that a token is multiplied by, apart from the head's.
        widest: The largest number of channels that a token has between two products, apart from logits.
    """

    weight_bytes: int
    active_weights: int
    widest: int


def facts_of(model: Any) -> ModelFacts:
    """Reads the sizes of a `ServedModel`, which may have shapes instead of weights."""
    leaves = jax.tree.leaves(nnx.state(model))
    vocab_size, top_k = model.config.vocab_size, getattr(model.config, "num_experts_per_tok", None) or 1
    experts = [module for _, module in nnx.iter_modules(model) if isinstance(module, Experts)]
    of_experts = {id(param): top_k / param.shape[0] for module in experts for param in (module.up, module.down)}
    active, widest = 0.0, 1
    for param in (node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)):
        if vocab_size in param.shape:
            continue
        share = of_experts.get(id(param))
        active += math.prod(param.shape) * (1.0 if share is None else share)
        if len(param.shape) >= 2:
            channels = param.shape[1:] if share is not None else param.shape
            widest = max(widest, max(channels) * (1 if share is None else top_k))
    return ModelFacts(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves), int(active), int(widest))
