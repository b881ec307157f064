"""Linear-attention backends for sglang-jax: its gated delta nets and Kimi delta attention run on this library's ops.

`install` puts them into sglang-jax, whose scheduler, radix cache and pools work as before. docs/integrations.md says
with which commit this was run, and has the lines that a user adds.
"""

import functools
import importlib
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_align_jax.integrations.delta_rule_step import BlockRows, Taps, delta_rule_step
from pallas_kernels.dispatch import Implementation

_ATTENTION = "sgl_jax.srt.layers.attention"


class VerifySlots(NamedTuple):
    """Where the rows of a step of draft tokens keep their windows and states. int32 arrays of slots, 0 for none.

    Attributes:
        token: The slot that receives those after each of a row's tokens. [rows, 1 + K]
        kept: The slot that receives a copy of those at a boundary. [rows]
        kept_source: The slot of the token at that boundary. [rows]
    """

    token: Any
    kept: Any
    kept_source: Any


class VerifyStep(NamedTuple):
    """What the layers are told of a step of verify rows, instead of sglang-jax's metadata.

    Attributes:
        cu_q_lens: Index of each row's first token; the last entry is the end of the last row. [rows + 1]
        recurrent_indices: The slot that each row reads. [rows]
        slots: The slots that each row writes.
    """

    cu_q_lens: jax.Array
    recurrent_indices: jax.Array
    slots: VerifySlots


def install(*, implementation: Implementation | None = None) -> None:
    """Makes sglang-jax build these backends for its GDN and KDA layers.

    Call it before the engine is made. sglang-jax starts its scheduler in a process that imports the main script again,
    so the call belongs at the top of that script, outside `if __name__ == "__main__"`.

    It also lets sglang-jax's attention run hybrid models off TPUs: where `HybridLinearKVPool` has no
    `set_kv_buffer_legacy`, it gets one that forwards to the pool inside.

    Args:
        implementation: "xla" or "triton" for all ops. None lets each op choose: a kernel on NVIDIA GPUs where one can
            run the arguments, and XLA otherwise.

    Raises:
        ImportError: if sglang-jax cannot be imported.
        ValueError: if `implementation` is not a known name.
    """
    if implementation not in ("xla", "triton", None):
        raise ValueError(f"implementation must be 'xla', 'triton' or None, got {implementation!r}")
    gdn: Any = sgl_module(f"{_ATTENTION}.linear.gdn_backend")
    kda: Any = sgl_module(f"{_ATTENTION}.linear.kda_backend")
    pool = sgl_module("sgl_jax.srt.mem_cache.memory_pool").HybridLinearKVPool
    # sglang-jax looks both names up in these modules whenever it makes a backend.
    gdn.GDNAttnBackend, kda.KDAAttnBackend = backends(implementation)
    if not hasattr(pool, "set_kv_buffer_legacy"):
        pool.set_kv_buffer_legacy = _set_kv_buffer_legacy


def backends(implementation: Implementation | None = None) -> tuple[type, type]:
    """Makes the backends of GDN and of KDA layers, which are subclasses of sglang-jax's `LinearRecurrentAttnBackend`.

    Calls with the same `implementation`, which is that of `install`, return the same classes. They are constructed as
    sglang-jax's own ones are.

    Raises:
        ImportError: if sglang-jax cannot be imported.
    """
    return _backends(sgl_module(f"{_ATTENTION}.hybrid_linear_attn_backend").LinearRecurrentAttnBackend, implementation)


@functools.cache
def _backends(base: type, implementation: Implementation | None) -> tuple[type, type]:
    class Backend(base):
        def get_forward_metadata(self, batch):
            """Describes a step for the layers: see `LinearRecurrentAttnBackend`. A step of verify rows has slots."""
            step, slots = super().get_forward_metadata(batch), getattr(batch, "verify_slots", None)
            if slots is None:
                return step
            slots = jax.device_put(slots, NamedSharding(self.mesh, P("data")))
            return VerifyStep(step.cu_q_lens, step.recurrent_indices, slots)

    class GDNBackend(Backend):
        """Gated delta nets: one decay per value head, one convolution over queries, keys and values."""

        def __init__(
            self,
            num_k_heads: int,
            num_v_heads: int,
            head_k_dim: int,
            head_v_dim: int,
            conv_kernel_size: int,
            mesh: jax.sharding.Mesh,
            dtype: Any = None,
            prefill_impl: str | None = None,
        ) -> None:
            """Checks that the heads can be divided among the mesh's devices. `prefill_impl` is ignored."""
            super().__init__(mesh=mesh)
            devices = mesh.shape.get("tensor", 1)
            for name, heads in (("num_k_heads", num_k_heads), ("num_v_heads", num_v_heads)):
                if heads % devices:
                    raise ValueError(
                        f"{name} must be a multiple of the {devices} devices of axis 'tensor', got {heads}"
                    )

        def __call__(self, q, k, v, a, b, layer, forward_batch, recurrent_state_pool, **kwargs):
            """Runs one layer: see `LinearRecurrentAttnBackend`."""
            conv = (layer.conv1d.weight.value,)
            weights = conv, layer.A_log.value, layer.dt_bias.value
            # The model's own backend applies SiLU and key_dim ** -0.5 whatever the layer says.
            options = dict(sigmoid_b=True, scale=None, activation="silu")
            return _run(self, (q, k, v, a, b), layer, weights, forward_batch, recurrent_state_pool, options)

    class KDABackend(Backend):
        """Kimi delta attention: one decay per key channel, a convolution each for queries, keys and values."""

        def __init__(self, mesh: jax.sharding.Mesh | None = None) -> None:
            super().__init__(mesh=mesh)

        def __call__(self, q, k, v, a, b, layer, forward_batch, recurrent_state_pool, **kwargs):
            """Runs one layer: see `LinearRecurrentAttnBackend`. `b` is beta itself."""
            heads, dim = layer.num_q_heads, layer.head_q_dim
            conv = tuple(conv.weight.value for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d))
            weights = conv, layer.A_log.value.reshape(heads), layer.dt_bias.value.reshape(heads, dim)
            a, b = a.reshape(a.shape[0], heads, dim), b.reshape(b.shape[0], heads)
            options = dict(sigmoid_b=False, scale=layer.scale, activation=_activation(layer.activation))
            return _run(self, (q, k, v, a, b), layer, weights, forward_batch, recurrent_state_pool, options)

    for backend in (GDNBackend, KDABackend):
        backend.implementation = implementation
    return GDNBackend, KDABackend


def _run(backend, tokens, layer, weights, forward_batch, pool, options):
    """Runs a layer on each device's heads, and returns its outputs [tokens, channels] and (states, [windows])."""
    step, mode = backend.forward_metadata, forward_batch.forward_mode
    states, (windows,) = backend.get_layer_cache(pool, layer.layer_id)
    if windows.dtype != tokens[0].dtype:
        raise ValueError(
            f"the pool of windows must have the model's dtype {tokens[0].dtype}, got {windows.dtype}: "
            f"set SGLANG_JAX_CONV_STATE_DTYPE={tokens[0].dtype}"
        )
    rows = _rows(step, None if mode.is_decode() else forward_batch.extend_prefix_lens)

    def local(tokens, weights, rows, windows, states):
        q, k, v, a, b = tokens
        conv, A_log, dt_bias = weights
        # On each device the channels are [its queries | its keys | its values], in its part of the pool as well.
        conv = jnp.concatenate([part.reshape(part.shape[0], -1) for part in conv])
        out, windows, states = delta_rule_step(
            jnp.concatenate([q, k, v], axis=1), a, b, Taps(conv, A_log, dt_bias), rows, windows, states,
            decode=mode.is_decode(), implementation=backend.implementation, **options,
        )  # fmt: skip
        return out.reshape(out.shape[0], -1), windows, states

    channels, blocks = P("data", "tensor"), P("data", "tensor")
    out, windows, states = jax.shard_map(
        local,
        mesh=backend.mesh,
        in_specs=(channels, P("tensor"), P("data"), blocks, blocks),
        out_specs=(channels, blocks, blocks),
        check_vma=False,
    )(tokens, weights, rows, windows, states)
    return out, (states, [windows])


def _rows(step: Any, num_computed_tokens: jax.Array | None) -> BlockRows:
    """Maps what sglang-jax tells of a step's rows to words of this library."""
    rows = BlockRows(
        query_start_loc=step.cu_q_lens, block=step.recurrent_indices, num_computed_tokens=num_computed_tokens
    )
    if isinstance(step, VerifyStep):
        slots = step.slots
        return rows._replace(token_blocks=slots.token, kept_block=slots.kept, kept_source=slots.kept_source)
    kept = step.recurrent_track_indices
    return rows._replace(
        fresh=None if step.has_initial_state is None else ~step.has_initial_state,
        kept_block=None if kept is None else jnp.where(step.recurrent_track_mask != 0, kept, 0),
    )


def _activation(activation: Any) -> Literal["silu"] | None:
    """Names the activation of a layer's convolution, which sglang-jax gives as a name or as a function."""
    if activation is None:
        return None
    if activation in ("silu", "swish") or activation is jax.nn.silu:
        return "silu"
    raise ValueError(f"activation of the convolution must be SiLU or None, got {activation!r}")


def _set_kv_buffer_legacy(pool, layer_id, loc, cache_k, cache_v):
    """Writes keys and values of a full-attention layer into the pool inside, and returns that layer's buffer."""
    return pool.full_kv_pool.set_kv_buffer_legacy(pool._to_physical(layer_id), loc, cache_k, cache_v)


def sgl_module(name: str) -> ModuleType:
    """Imports a module of sglang-jax. Raises an ImportError that says where sglang-jax is found."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"mamba_align_jax.integrations.sglang_jax needs sglang-jax, whose module {name} could not be imported: "
            f"{error}. Install it from https://github.com/sgl-project/sglang-jax; docs/integrations.md names the commit."
        ) from error
