"""Models over a mesh: every device gets smaller layers of the same kinds, with its share of the parameters."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mamba_align_jax.kv import KVPages
from mamba_align_jax.layers.exchange import Exchange
from mamba_align_jax.layers.linear import ConvTaps
from mamba_align_jax.layers.mixer import ATTENTION, SplitMixer
from mamba_align_jax.layers.mla import MultiHeadLatentAttention
from mamba_align_jax.layers.split import Cut, Splittable
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.sharding import AXIS, Layout, Part, pool_partition, repeats


def shard_model(model: CausalLM, mesh: Mesh) -> tuple[CausalLM, Layout]:
    """Splits a model over the devices of a mesh's axis "tensor".

    Heads, channels, the intermediate channels of feed-forward layers and experts, and the vocabulary are divided among
    the devices. Key heads and the groups of Mamba-2 are repeated until their number is a multiple of the number of
    devices. Norms, routers, low-rank projections and the latents of latent attention are copied to every device, and so
    is a vocabulary that does not divide.

    Args:
        model: A model as `load_model` returns it, with weights on one device or in host memory. It is not changed.
        mesh: A mesh with an axis "tensor".

    Returns:
        A model whose weights lie on the mesh, and the layout, whose `run` runs the model's code on every device.

    Raises:
        ValueError: a layer does not divide, or a mixer has no method `split`. The layer or the mixer's class is named.
    """
    cut, groups, heads = Cut(mesh), model.state_groups(), model.kv_spec().num_heads
    for mixers in model.mixers().values():
        for mixer in mixers:
            if not isinstance(mixer, SplitMixer):
                raise ValueError(
                    "shard_model: mixers must have a method split (layers.mixer.SplitMixer), got "
                    f"{type(mixer).__name__} of kind {mixer.kind!r}"
                )
    graph, state = nnx.split(model)
    # The variables of `state` are the model's own, so the copy gets new ones.
    model = nnx.merge(graph, jax.tree.map(lambda array: array, state))
    for path, module in list(nnx.iter_modules(model)):
        if isinstance(module, Splittable):
            try:
                module.split(cut)
            except ValueError as error:
                raise ValueError(f"shard_model: {'.'.join(map(str, path))}: {error}") from error
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable) and id(variable) not in cut.placed:
            cut.put(variable)
    leaves = jax.tree.leaves(nnx.state(model))
    variables = jax.tree.leaves(nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable))
    # All heads share a latent, so every device keeps all latents.
    latent = any(isinstance(mixer, MultiHeadLatentAttention) for mixers in model.mixers().values() for mixer in mixers)
    pages: Any = P() if latent else P(None, None, None, AXIS)
    return model, Layout(
        mesh=mesh,
        params=tuple(leaf.sharding.spec for leaf in leaves),
        pool=pool_partition(groups),
        kv=KVPages(keys=pages, values=pages),
        ordered_params=tuple(
            order
            for variable in variables
            for order in cut.orders.get(id(variable)) or [None] * len(jax.tree.leaves(variable))
        ),
        windows=tuple(_window_parts(mixers[0], cut) for kind, mixers in model.mixers().items() if kind != ATTENTION),
        kv_heads=() if latent else (Part(heads, 1, repeats(heads, cut.size)),),
    )


def exchange_by(model: nnx.Module, exchange: Exchange) -> None:
    """Lets a split model add up what its devices have by `exchange` instead of XLA's all-reduces.

    The model is changed. `nnx.merge` must have put it together in the same trace as `exchange`.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, CausalLM):
            module.exchange = exchange


def _window_parts(mixer: Any, cut: Cut) -> tuple[Part, ...]:
    """Returns what lies side by side in the channels of a mixer's windows: its taps are split in the same way."""
    taps = [module for _, module in nnx.iter_modules(mixer) if isinstance(module, ConvTaps)]
    return next((cut.parts[id(each.weight)] for each in taps if id(each.weight) in cut.parts), ())


def share(model: CausalLM) -> CausalLM:
    """Returns one device's share of a model that `shard_model` returned: its sizes, and shapes instead of weights."""
    graph, state = nnx.split(model)

    def shape(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)

    return nnx.merge(graph, jax.tree.map(shape, state))
