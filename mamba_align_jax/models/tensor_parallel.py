"""Models over a mesh: each layer's parameters cut so that every device has a smaller layer of the same kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_align_jax.kv import KVPages
from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.gated_delta_net import GatedDeltaNet
from mamba_align_jax.layers.kimi_delta_attention import KimiDeltaAttention
from mamba_align_jax.layers.mamba1 import Mamba1Mixer
from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.layers.mla import MultiHeadLatentAttention
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.moe import Experts
from mamba_align_jax.layers.norm import GatedGroupNorm, RMSNorm
from mamba_align_jax.models import nemotron_h
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.sharding import AXIS, Layout, Part, columns, devices, pool_partition, repeats


def summed_product(
    x: jax.Array, kernel: jax.Array, dimensions: Any, *, precision: Any = None, out_sharding: Any = None
) -> jax.Array:
    """A product whose sum is split over the devices: added up in float32, rounded once, the same bits everywhere."""
    del out_sharding
    partial = jax.lax.dot_general(x, kernel, dimensions, precision=precision, preferred_element_type=jnp.float32)
    return jax.lax.psum(partial, AXIS).astype(x.dtype)


class SplitEmbed(nnx.Module):
    """Embeddings of which each device has some of the vocabulary."""

    def __init__(self, embed: nnx.Embed) -> None:
        self.embedding = embed.embedding

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 [tokens] -> [tokens, hidden]."""
        embedding = self.embedding[...]
        place = tokens - jax.lax.axis_index(AXIS).astype(tokens.dtype) * embedding.shape[0]
        own = (place >= 0) & (place < embedding.shape[0])
        return jax.lax.psum(jnp.where(own[:, None], embedding[jnp.where(own, place, 0)], 0), AXIS)


class SplitExperts(nnx.Module):
    """Experts of which each device has some of the width."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """[tokens, hidden] -> [tokens, hidden]."""
        return jax.lax.psum(self.experts(x, chosen, weights).astype(jnp.float32), AXIS).astype(x.dtype)


class SplitRMSNorm(nnx.Module):
    """A norm over all devices' channels."""

    def __init__(self, norm: RMSNorm) -> None:
        self.weight, self.epsilon, self.offset = norm.weight, norm.epsilon, norm.offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis and those of the other devices. Repeated heads leave the mean as it is."""
        y = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jax.lax.pmean(jnp.mean(y * y, axis=-1, keepdims=True), AXIS) + self.epsilon)
        return (y * scale * (self.offset + self.weight[...].astype(jnp.float32))).astype(x.dtype)


class SplitGroupNorm(GatedGroupNorm):
    """A group norm whose groups are `copies` times in `groups`, each time with other channels, perhaps elsewhere."""

    def __init__(self, norm: GatedGroupNorm, groups: int, copies: int) -> None:
        self.weight, self.epsilon, self.norm_before_gate = norm.weight, norm.epsilon, norm.norm_before_gate
        self.groups, self.copies = groups, copies

    def normalise(self, parts: jax.Array) -> jax.Array:
        """[tokens, groups, size] over the mean squares of whole groups."""
        mean = jnp.mean(parts * parts, axis=-1)
        everywhere = jax.lax.all_gather(mean, AXIS, axis=1, tiled=True)
        whole = jnp.mean(everywhere.reshape(mean.shape[0], -1, self.copies), axis=-1).repeat(self.copies, axis=1)
        own = jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(AXIS) * self.groups, self.groups, axis=1)
        return parts * jax.lax.rsqrt(own[..., None] + self.epsilon)


@dataclass
class _Cut:
    """Places parameters on a mesh."""

    mesh: Mesh
    placed: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        return devices(self.mesh)

    def put(self, variable: nnx.Variable, axis: int | None = None, parts: Sequence[Part] = ()) -> None:
        """Splits a parameter along an axis, part by part if it has parts; copies it to all devices if None."""
        array = variable[...]
        if parts and axis is not None:
            order = columns(parts, self.size)
            if not np.array_equal(order, np.arange(array.shape[axis])):
                array = jnp.take(array, order, axis=axis)
        spec = P() if axis is None else P(*[None] * axis, AXIS)
        variable.set_value(jax.device_put(array, NamedSharding(self.mesh, spec)))
        self.placed.add(id(variable))

    def out(self, linear: nnx.Linear, *parts: Part) -> None:
        """Splits a product's outputs."""
        self.put(linear.kernel, 1, parts)
        if linear.bias is not None:
            self.put(linear.bias, 0, parts)

    def into(self, linear: nnx.Linear, part: Part) -> None:
        """Splits a product's inputs: its outputs are summed over the devices, the bias added once."""
        self.put(linear.kernel, 0, [part])
        linear.dot_general = summed_product


def _vocabulary(model: CausalLM, cut: _Cut) -> None:
    if model.config.vocab_size % cut.size:
        return
    cut.put(model.embed_tokens.embedding, 0)
    model.embed_tokens = SplitEmbed(model.embed_tokens)
    if model.lm_head is not None:
        cut.put(model.lm_head.kernel, 1)
    model.vocab_axis = AXIS


def _attention(layer: Any, cut: _Cut) -> None:
    copies = repeats(layer.kv_heads, cut.size)
    q, kv = Part(layer.heads, layer.head_dim), Part(layer.kv_heads, layer.head_dim, copies)
    cut.out(layer.q_proj, Part(layer.heads, (1 + layer.gated) * layer.head_dim))
    cut.out(layer.k_proj, kv)
    cut.out(layer.v_proj, kv)
    cut.into(layer.o_proj, q)
    if layer.norm_whole and layer.q_norm is not None:
        cut.put(layer.q_norm.weight, 0, [q])
        cut.put(layer.k_norm.weight, 0, [kv])
        layer.q_norm, layer.k_norm = SplitRMSNorm(layer.q_norm), SplitRMSNorm(layer.k_norm)
    layer.heads //= cut.size
    layer.kv_heads = layer.kv_heads * copies // cut.size


def _gated_delta_net(layer: GatedDeltaNet, cut: _Cut) -> None:
    copies = repeats(layer.key_heads, cut.size)
    key, value = Part(layer.key_heads, layer.key_dim, copies), Part(layer.value_heads, layer.value_dim)
    head = Part(layer.value_heads, 1)
    cut.out(layer.in_proj_qkv, key, key, value)
    cut.put(layer.conv1d.weight, 1, (key, key, value))
    cut.out(layer.in_proj_z, value)
    cut.out(layer.in_proj_b, head)
    cut.out(layer.in_proj_a, head)
    cut.put(layer.A_log, 0, [head])
    cut.put(layer.dt_bias, 0, [head])
    cut.into(layer.out_proj, value)
    layer.key_heads = layer.key_heads * copies // cut.size
    layer.value_heads //= cut.size


def _kimi_delta_attention(layer: KimiDeltaAttention, cut: _Cut) -> None:
    head, one = Part(layer.heads, layer.head_dim), Part(layer.heads, 1)
    cut.out(layer.in_proj_qkv, head, head, head)
    cut.put(layer.conv1d.weight, 1, (head, head, head))
    for name in ("f_proj", "f_b_proj", "g_proj", "g_b_proj"):
        if hasattr(layer, name):
            cut.out(getattr(layer, name), head)
    cut.out(layer.b_proj, one)
    cut.put(layer.A_log, 0, [one])
    cut.put(layer.dt_bias, 0, [head])
    cut.into(layer.o_proj, head)
    layer.heads //= cut.size


def _latent_attention(layer: MultiHeadLatentAttention, cut: _Cut) -> None:
    queries = layer.q_proj if hasattr(layer, "q_proj") else layer.q_b_proj
    cut.out(queries, Part(layer.heads, layer.nope_dim + layer.rope_dim))
    cut.out(layer.kv_b_proj, Part(layer.heads, layer.nope_dim + layer.value_dim))
    if layer.g_proj is not None:
        cut.out(layer.g_proj, Part(layer.heads, 1))
    cut.into(layer.o_proj, Part(layer.heads, layer.value_dim))
    layer.heads //= cut.size


def _mamba1(layer: Mamba1Mixer, cut: _Cut) -> None:
    channel = Part(layer.D.shape[0], 1)
    cut.out(layer.in_proj, channel, channel)
    cut.put(layer.conv1d.weight, 1, [channel])
    if layer.conv1d.bias is not None:
        cut.put(layer.conv1d.bias, 0, [channel])
    cut.into(layer.x_proj, channel)
    cut.out(layer.dt_proj, channel)
    for variable in (layer.dt_proj_bias, layer.A_log, layer.D):
        cut.put(variable, 0, [channel])
    cut.into(layer.out_proj, channel)


def _mamba2(layer: Mamba2Mixer, cut: _Cut) -> None:
    copies = repeats(layer.groups, cut.size)
    inner, head = Part(layer.heads, layer.head_dim), Part(layer.heads, 1)
    group = Part(layer.groups, layer.state_dim, copies)
    cut.out(layer.in_proj, inner, inner, group, group, head)
    cut.put(layer.conv1d.weight, 1, (inner, group, group))
    if layer.conv1d.bias is not None:
        cut.put(layer.conv1d.bias, 0, (inner, group, group))
    for variable in (layer.A_log, layer.D, layer.dt_bias):
        cut.put(variable, 0, [head])
    cut.into(layer.out_proj, inner)
    layer.heads //= cut.size
    layer.groups = layer.groups * copies // cut.size
    z, x, B, C, dt = (size // cut.size for size in layer.sizes)
    layer.sizes = z, x, B * copies, C * copies, dt
    if layer.norm is not None:
        cut.put(layer.norm.weight, 0, [inner])
        layer.norm.groups = layer.groups
        if copies > 1:
            layer.norm = SplitGroupNorm(layer.norm, layer.groups, copies)


def _mlp(layer: Any, cut: _Cut) -> None:
    width = Part(layer.down_proj.kernel.shape[0], 1)
    for name in ("gate_proj", "up_proj"):
        if hasattr(layer, name):
            cut.out(getattr(layer, name), width)
    cut.into(layer.down_proj, width)


def _experts(layer: Experts, cut: _Cut) -> SplitExperts:
    width = Part(layer.down.shape[1], 1)
    # [gate | up], or up alone.
    cut.put(layer.up, 2, [width] * (layer.up.shape[2] // width.heads))
    cut.put(layer.down, 1, [width])
    return SplitExperts(layer)


_RULES: dict[type, Callable[[Any, _Cut], nnx.Module | None]] = {
    CausalLM: _vocabulary,
    Attention: _attention,
    MultiHeadLatentAttention: _latent_attention,
    GatedDeltaNet: _gated_delta_net,
    KimiDeltaAttention: _kimi_delta_attention,
    Mamba1Mixer: _mamba1,
    Mamba2Mixer: _mamba2,
    GatedMLP: _mlp,
    nemotron_h.MLP: _mlp,
    Experts: _experts,
}


def shard_model(model: Any, mesh: Mesh) -> tuple[Any, Layout]:
    """Splits a model over the devices of a mesh's axis "tensor".

    Heads, channels, the widths of feed-forward layers and experts, and the vocabulary are divided. Keys' heads, and groups
    of Mamba-2, that don't divide are repeated until they do. A vocabulary that doesn't is on every device whole, as are
    norms, routers, low-rank projections and the latents of latent attention.

    Args:
        model: As `load_model` gives it, with weights on one device or in host memory. It stays as it is.
        mesh: With an axis "tensor".

    Returns:
        A model whose weights lie on the mesh: its code is to run on every device, by the layout's `run`; and the layout.

    Raises:
        ValueError: names the layer that doesn't divide, or that nobody knows how to split.
    """
    cut, groups = _Cut(mesh), model.state_groups()
    graph, state = nnx.split(model)
    # New variables: those of a state are the model's own.
    model = nnx.merge(graph, jax.tree.map(lambda array: array, state))
    modules = dict(nnx.iter_modules(model))
    for path, module in modules.items():
        rule = next((_RULES[kind] for kind in type(module).__mro__ if kind in _RULES), None)
        name = ".".join(map(str, path))
        if rule is None:
            if hasattr(module, "kind"):
                raise ValueError(f"shard_model: {name} must be of a kind that can be split, got {module.kind!r}")
            continue
        try:
            replaced = rule(module, cut)
        except ValueError as error:
            raise ValueError(f"shard_model: {name}: {error}") from error
        if replaced is not None:
            setattr(modules[path[:-1]], str(path[-1]), replaced)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable) and id(variable) not in cut.placed:
            cut.put(variable)
    leaves = jax.tree.leaves(nnx.state(model))
    # Latents are of all heads at once.
    latent = any(isinstance(module, MultiHeadLatentAttention) for module in modules.values())
    pages: Any = P() if latent else P(None, None, None, AXIS)
    return model, Layout(
        mesh=mesh,
        params=tuple(leaf.sharding.spec for leaf in leaves),
        pool=pool_partition(groups),
        kv=KVPages(keys=pages, values=pages),
    )


def share(model: Any) -> Any:
    """One device's share of a model that `shard_model` returned: shapes, without weights."""
    graph, state = nnx.split(model)
    shape = lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
    return nnx.merge(graph, jax.tree.map(shape, state))
